# SPDX-License-Identifier: Apache-2.0
"""Resilient training for PyTorch."""

from pkgutil import extend_path

__version__ = "0.7.0"
__path__ = extend_path(__path__, __name__)


def distribution_versions() -> dict[str, str]:
    """Return the installed version of each nvrx distribution, keyed by its name."""
    from importlib.metadata import distributions

    found = {dist.metadata["Name"]: dist.version for dist in distributions()}
    return {name: version for name, version in sorted(found.items()) if name.startswith("nvrx-")}
