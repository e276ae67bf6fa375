# SPDX-License-Identifier: Apache-2.0
"""What can go wrong between us and the driver; none of it leaves the health rooms."""

from __future__ import annotations

from nvidia_resiliency_ext.shared_utils.abandonable import StuckError
from nvidia_resiliency_ext.shared_utils.errors import NvrxError

__all__ = ["DriverHungError", "NvmlCallError", "NvmlError", "NvmlUnavailableError"]


class NvmlError(NvrxError):
    """Base of the errors of this room."""


class NvmlUnavailableError(NvmlError):
    """There is no driver, no library or no binding: nothing to look at, which is no failure."""


class NvmlCallError(NvmlError):
    """The driver answered with an error.

    Args:
        query: What was asked.
        code: Its number.
        text: Its words.
    """

    # Numbers of nvmlReturn_t, which never change.
    INVALID_ARGUMENT = 2
    NOT_SUPPORTED = 3
    NO_PERMISSION = 4
    NOT_FOUND = 6
    DRIVER_NOT_LOADED = 9
    LIBRARY_NOT_FOUND = 12
    FUNCTION_NOT_FOUND = 13

    def __init__(self, query: str, code: int, text: str) -> None:
        super().__init__(query, code, text)
        self.query = query
        self.code = code
        self.text = text

    def __str__(self) -> str:
        return f"NVML {self.query}: {self.text} ({self.code})"

    @property
    def is_unsupported(self) -> bool:
        """Whether this hardware, driver or binding does not know what was asked."""
        return self.code in {self.NOT_SUPPORTED, self.FUNCTION_NOT_FOUND}


class DriverHungError(NvmlError, StuckError):
    """A driver call did not return in time."""

    def __str__(self) -> str:
        return f"hung driver: NVML {StuckError.__str__(self)}"
