# SPDX-License-Identifier: Apache-2.0
"""What the environment says about the flight recorder; checked, and kept nowhere."""

from __future__ import annotations

import os

__all__ = ["flight_record_path", "flight_recorder_size"]

_SIZES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")


def flight_record_path() -> str | None:
    """Return the folder for flight records, `None` if none is wanted."""
    return os.environ.get("NVRX_FR_TRACE_PATH") or None


def flight_recorder_size() -> int:
    """Return how many entries torch's flight recorder keeps; 0 if it is off.

    Raises:
        ValueError: It is set and is no number; the message names it.
    """
    sizes = [_size(name, os.environ[name]) for name in _SIZES if os.environ.get(name)]
    return max(sizes, default=0)


def _size(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name}={text[:64]!r} in the environment is not a number") from None
