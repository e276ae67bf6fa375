# SPDX-License-Identifier: Apache-2.0
"""Resilient training for PyTorch."""

from pkgutil import extend_path

__version__ = "0.7.0"
__path__ = extend_path(__path__, __name__)


def distribution_versions() -> dict[str, str]:
    """Return the installed version of each nvrx distribution, keyed by its name."""
    from importlib.metadata import distributions

    # What an interrupted pip leaves has no name.
    found = {name: dist.version for dist in distributions() if (name := dist.metadata["Name"])}
    return {name: version for name, version in sorted(found.items()) if name.startswith("nvrx-")}
