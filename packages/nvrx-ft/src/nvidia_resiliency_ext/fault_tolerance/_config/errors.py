# SPDX-License-Identifier: Apache-2.0
"""The error of a wrong configuration, with all its problems at once, and the nearest-name hint."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nvidia_resiliency_ext.shared_utils.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["FaultToleranceConfigError", "SectionMissingError", "nearest", "similar"]


class FaultToleranceConfigError(ConfigError):
    """One or more settings are wrong.

    Args:
        problems: One sentence each: where, which key, which value, what is allowed.
    """

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        super().__init__(self.problems)

    def __str__(self) -> str:
        return "; ".join(self.problems)


class SectionMissingError(FaultToleranceConfigError):
    """A file has no `fault_tolerance` section, or an empty one."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Return `; did you mean X?` for the known name most like `name`, or an empty text."""
    return "".join(f"; did you mean {match}?" for match in similar(name, known))


def similar(name: str, known: Iterable[str]) -> list[str]:
    """Return the known name most like `name`, or nothing."""
    import difflib

    return difflib.get_close_matches(name[:100], list(known), n=1, cutoff=0.6)
