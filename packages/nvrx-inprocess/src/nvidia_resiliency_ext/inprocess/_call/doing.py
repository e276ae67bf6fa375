# SPDX-License-Identifier: Apache-2.0
"""What the main thread of this rank is doing when its iteration is interrupted."""

from __future__ import annotations

import sys
import threading
import traceback
from dataclasses import dataclass
from types import FrameType

import torch

from nvidia_resiliency_ext.inprocess._monitor.messages import WAITED
from nvidia_resiliency_ext.shared_utils.rank_activity import Frame, stack_of

__all__ = ["WAITS", "Doing", "of_main_thread", "of_raised"]

_MOST_FRAMES = 64
# gloo raises a plain RuntimeError, which names the line of its transport.
_GLOO = "gloo/transport/"


@dataclass(frozen=True, slots=True)
class Doing:
    """What the main thread was in: the words of `messages.Arrived`."""

    call: str = ""
    place: str = ""


WAITS = Doing(WAITED)
"""The function has returned, or has nothing to do: this rank waits for the others."""


def of_main_thread() -> Doing:
    """Return what the main thread does now; called by another thread."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)  # noqa: SLF001
    frames: list[Frame] = []
    while frame is not None and len(frames) < _MOST_FRAMES:
        frames.append(_of_frame(frame, frame.f_lineno))
        frame = frame.f_back
    stack = stack_of(frames)
    return Doing(stack.call.value, stack.place)


def of_raised(error: BaseException) -> Doing:
    """Return what raised: a collective that failed, so that this rank waited, or anything else."""
    if not isinstance(error, torch.distributed.DistError) and _GLOO not in str(error):
        return Doing()
    frames = [_of_frame(*pair) for pair in traceback.walk_tb(error.__traceback__)]
    return Doing(WAITED, stack_of(frames[: -_MOST_FRAMES - 1 : -1]).place)


def _of_frame(frame: FrameType, line: int | None) -> Frame:
    return frame.f_code.co_filename, line or 0, frame.f_code.co_name
