# SPDX-License-Identifier: Apache-2.0
"""Owns the error that a sender of log chunks is told; gRPC's codes are named, not imported."""

from __future__ import annotations

from nvidia_resiliency_ext.shared_utils.errors import NvrxError

__all__ = ["RETRY_CODE", "Refusal"]

RETRY_CODE = "UNAVAILABLE"
"""The code of a refusal after which the same chunk may be sent again later."""


class Refusal(NvrxError):  # noqa: N818 - what a sender is told; for the server it is none
    """A chunk, or a whole stream, is not taken.

    Args:
        code: Name of a gRPC status code.
        reason: What is wrong, in words for the sender's log.
    """

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(code, reason)
        self.code = code
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.code}: {self.reason}"
