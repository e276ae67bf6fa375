# SPDX-License-Identifier: Apache-2.0
"""What can be wrong with a store and with what stands in it, and numbers read from foreign text."""

from __future__ import annotations

from nvidia_resiliency_ext.shared_utils.errors import NvrxError

_SHOWN = 200


class StoreLostError(NvrxError):
    """The store does not answer: its host is gone, or the way to it."""


class NobodyListensError(StoreLostError):
    """There is no store: nobody listens at its port."""


class ForeignValueError(NvrxError):
    """A key holds what none of us has written.

    Args:
        key: Name of the key.
        value: What stands there; the message shows its beginning.
    """

    def __init__(self, key: str, value: str) -> None:
        super().__init__(key, value[:_SHOWN])
        self.key = key
        self.value = value[:_SHOWN]

    def __str__(self) -> str:
        """Name key and value."""
        return f"the store holds at {self.key!r} what no rank of this job writes: {self.value!r}"


_MOST_DIGITS = 9


def parse_number(text: str) -> int | None:
    """Return the number that up to nine ASCII digits say; None for anything else."""
    if text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS:
        return int(text)
    return None
