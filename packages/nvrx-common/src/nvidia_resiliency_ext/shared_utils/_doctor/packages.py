# SPDX-License-Identifier: Apache-2.0
"""Owns the look at the installed distributions: ours, and those that cannot be beside them."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from .finding import Finding

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["installed_versions", "package_findings"]

_CONFLICT = "nvidia-resiliency-ext"
_PREFIX = "nvrx-"
_SHOWN = ("torch",)


def installed_versions() -> dict[str, str]:
    """Return the version of each installed distribution, by its normalised name."""
    from importlib.metadata import distributions

    found: dict[str, str] = {}
    for distribution in distributions():
        metadata = distribution.metadata
        if "Name" not in metadata or "Version" not in metadata:
            continue  # the rest of a broken installation
        # The first on the path is the one that is imported.
        found.setdefault(_normalised(metadata["Name"]), metadata["Version"])
    return found


def package_findings(versions: Mapping[str, str]) -> Iterator[Finding]:
    """Yield what is installed, and an error for a package that owns the same files."""
    yield Finding("info", "python", f"{sys.version.split()[0]} ({sys.executable})")
    for name in sorted(versions):
        if name.startswith(_PREFIX) or name in _SHOWN:
            yield Finding("ok", name, versions[name])
    if "nvrx-common" not in versions:
        yield Finding("warning", "nvrx-common", "not installed: it runs from a source folder")
    if _CONFLICT in versions:
        yield Finding(
            "error",
            _CONFLICT,
            f"{versions[_CONFLICT]} is installed and owns the same files as the nvrx packages:"
            " uninstall it, then reinstall the nvrx packages",
        )


def _normalised(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")
