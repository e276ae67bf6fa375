# SPDX-License-Identifier: Apache-2.0
"""Resilient training for PyTorch."""

from pkgutil import extend_path

__version__ = "0.7.0"
__path__ = extend_path(__path__, __name__)


def distribution_versions() -> dict[str, str]:
    """Return the installed version of each nvrx distribution, keyed by its name.

    Example:
        >>> "nvrx-common" in distribution_versions()
        True
    """
    from nvidia_resiliency_ext.shared_utils.doctor import installed_versions

    found = installed_versions()
    return {name: found[name] for name in sorted(found) if name.startswith("nvrx-")}
