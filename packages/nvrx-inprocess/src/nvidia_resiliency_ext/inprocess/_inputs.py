# SPDX-License-Identifier: Apache-2.0
"""Check inputs: variables of the environment, arguments, the CUDA device; calls with a deadline."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, TypeVar

from nvidia_resiliency_ext.shared_utils.abandonable import AbandonableCall

from . import exception

T = TypeVar("T")

_RANKS = ("RANK", "WORLD_SIZE")
_SIZES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
_TRUE = frozenset({"true", "1", "yes", "on"})


def number(name: str, default: int) -> int:
    """Return a number of the environment; a ValueError names a variable that is none."""
    text = os.environ.get(name)
    if text is None:
        return default
    if not _is_number(text):
        raise ValueError(f"{name}={text[:64]!r} in the environment is not a number")
    return int(text)


def optional_number(name: str) -> int | None:
    """Return a number of the environment; None where the variable is not set to one."""
    text = os.environ.get(name, "")
    return int(text) if _is_number(text) else None


@contextlib.contextmanager
def exported_ranks_restored() -> Iterator[None]:
    """Restore RANK and WORLD_SIZE, which `export_ranks` changes, at the end of the block."""
    before = {name: os.environ.get(name) for name in _RANKS}
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def export_ranks(rank: int, world_size: int) -> None:
    """Set RANK and WORLD_SIZE, which `torch.distributed` reads at its start."""
    os.environ["RANK"] = str(rank)
    os.environ["WORLD_SIZE"] = str(world_size)


def wants_verbose_ranks() -> bool:
    """Return whether sets of ranks are logged in full."""
    return os.environ.get("NVRX_LOG_RANK_FORMAT_VERBOSE", "").strip().lower() in _TRUE


def flight_recorder_size() -> int:
    """Return how many entries torch's flight recorder keeps; 0 if it is off."""
    sizes = (_recorder_size(name, os.environ[name]) for name in _SIZES if os.environ.get(name))
    return max(sizes, default=0)


def _recorder_size(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name}={text[:64]!r} in the environment is not a number") from None


def _is_number(text: str) -> bool:
    stripped = text.strip()
    return stripped.isascii() and stripped.isdigit() and len(stripped) < 10  # noqa: PLR2004


def check_integer(name: str, value: Any, *, least: int | None = None) -> None:
    """Raise a TypeError unless a value is an integer, a ValueError if it is less than `least`."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, not {value!r}")
    if least is not None and value < least:
        raise ValueError(f"{name} must be at least {least}, not {value}")


def check_duration(name: str, value: Any) -> None:
    """Raise a TypeError unless a value is a `timedelta`, a ValueError if it is negative."""
    if not isinstance(value, timedelta):
        raise TypeError(f"{name} must be a timedelta, not {value!r}")
    if value < timedelta(0):
        raise ValueError(f"{name} must not be negative, as {value} is")


def check_callable(name: str, value: Any) -> None:
    """Raise a TypeError unless a value can be called."""
    if not callable(value):
        raise TypeError(f"{name} must be callable, {value!r} is not")


def check_path(name: str, value: Any) -> None:
    """Raise a TypeError unless a value names a file."""
    if not isinstance(value, (str, os.PathLike)):
        raise TypeError(f"{name} must be a path, not {value!r}")


def is_in_use() -> bool:
    """Return whether this process has begun to use CUDA."""
    # CUDA can only have been begun by a torch that is imported.
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.cuda.is_initialized())


def device_of_rank() -> int | None:
    """Return the device of `LOCAL_RANK`, or the calling thread's; None if CUDA is not in use."""
    if not is_in_use():
        return None
    import torch

    index = optional_number("LOCAL_RANK")
    if index is not None and index < torch.cuda.device_count():
        return index
    return int(torch.cuda.current_device())


def call_bounded(name: str, function: Callable[[], T], timeout: timedelta) -> T:
    """Call a function in a daemon thread; the package's TimeoutError if it takes too long."""

    def run() -> T:
        # Users find the thread by this name, which has no prefix.
        threading.current_thread().name = name
        return function()

    call = AbandonableCall(name, run)
    # An error of its own, which cannot be taken for one that the function raised.
    if not call.ended.wait(min(timeout.total_seconds(), threading.TIMEOUT_MAX)):
        raise exception.TimeoutError(f"{name} has not ended within {timeout}")
    return call.result()
