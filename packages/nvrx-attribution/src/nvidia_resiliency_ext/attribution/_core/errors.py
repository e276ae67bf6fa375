# SPDX-License-Identifier: Apache-2.0
"""The errors that the analysis raises on purpose; it holds no behaviour beyond messages."""

from __future__ import annotations

from nvidia_resiliency_ext.shared_utils.errors import ConfigError, NvrxError

__all__ = ["AttributionError", "NoTraceError", "RegistryError", "UnreadableInputError"]


class AttributionError(NvrxError):
    """Base of the errors of nvrx-attribution."""


class _PathError(AttributionError):
    """Something is wrong with a path.

    Args:
        path: The file, directory or prefix.
        reason: Why, in words.
    """

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(path, reason)
        self.path = path
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


class UnreadableInputError(_PathError, OSError):
    """A log, trace or history cannot be read."""


class NoTraceError(_PathError, ValueError):
    """A path holds no readable flight-recorder dump."""


class RegistryError(AttributionError, ConfigError):
    """A rule file is wrong; the message names the file, the rule and what is allowed."""
