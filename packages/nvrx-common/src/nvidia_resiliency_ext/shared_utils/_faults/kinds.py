# SPDX-License-Identifier: Apache-2.0
"""The kinds of faults by name and number, the draw of a plan, and what all faults share."""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Iterable

_ATTRIBUTES = frozenset({"name", "value"})


class InjectedException(Exception):  # noqa: N818 - callers catch it under this name
    """Raised on purpose, by a fault."""


class Fault(enum.Enum):
    """A kind of fault. The numbers travel between ranks and never change."""

    GPU_ERROR = 1
    GPU_SLEEP = 2
    WORKLOAD_EXC = 3
    ASYNC_EXC = 4
    SIGNAL_EXC = 5
    OS_ABORT = 6
    LOCK_GIL = 7
    SEGFAULT = 8
    SIGINT = 9
    SIGKILL = 10
    SIGTERM = 11
    SIGSTOP = 12
    HANG = 100
    SLOWDOWN = 101
    CPU_SPIN = 102
    NET_DROP = 103
    OOM_CPU = 104
    OOM_GPU = 105
    DISK_FULL = 106
    CLOCK_SKEW = 107


def add_fault(name: str) -> Fault:
    """Return the fault of that name, else make it with the next number; the caller has a lock."""
    if name in Fault.__members__:
        return Fault[name]
    taken = name in _ATTRIBUTES or hasattr(Fault, name)
    if taken or not name.isidentifier() or name.startswith("_"):
        raise ValueError(f"{name!r} cannot be the name of a fault")
    member: Fault = object.__new__(Fault)
    member._name_ = name
    member._value_ = max(each.value for each in Fault) + 1
    # What `enum` itself does with a member of the class body, on Python 3.10 to 3.13.
    setattr(Fault, name, member)
    Fault._member_names_.append(name)
    Fault._member_map_[name] = member
    Fault._value2member_map_[member.value] = member
    return member


def draw_plan(
    faults: Fault | Iterable[Fault],
    num_faults: int | tuple[int, int],
    keep_alive: int,
    delay: float | tuple[float, float],
    seed: int,
    world_size: int,
) -> tuple[Fault, list[int], float]:
    """Draw a fault, the ranks that get it and its delay, by the arguments only."""
    from random import Random

    choices = (faults,) if isinstance(faults, Fault) else tuple(faults)
    if not choices:
        raise ValueError("there is no fault to choose from")
    draw = Random(seed)  # noqa: S311 - repeatable is the point
    if isinstance(delay, (int, float)):
        seconds = float(delay)
    else:
        seconds = draw.uniform(*_pair("delay", delay))
    counts = (num_faults, num_faults) if isinstance(num_faults, int) else num_faults
    low, high = _pair("num_faults", counts)
    candidates = range(max(keep_alive, 0), world_size)
    number = min(draw.randint(int(low), int(high)), len(candidates))
    ranks = sorted(draw.sample(candidates, number))
    return draw.choice(choices), ranks, seconds


def _pair(name: str, values: tuple[float, float]) -> tuple[float, float]:
    low, high = values
    if not 0 <= low <= high:
        raise ValueError(f"{name}: {values!r} is no pair of a least and a most")
    return low, high


class Action:
    """One fault on its way; made while it is dispatched, used by one background thread."""

    def __init__(
        self, effect: Callable[[threading.Event], object], undo: Callable[[], object] = lambda: None
    ) -> None:
        self.act = effect
        self._undo = undo

    def begin(self) -> None:
        """Learn that the time has come and that the callback runs next."""

    def withdraw(self) -> bool:
        """Give the fault up before its time; return whether it surely does not happen."""
        self._undo()
        return True


def refusal(fault: str, reason: str) -> RuntimeError:
    """Return the error for a fault that this process or machine cannot be given."""
    return RuntimeError(f"fault {fault} is refused: {reason}")


def on_main_thread_only(fault: str) -> None:
    """Refuse a fault whose signal handler only the main thread may install."""
    if threading.current_thread() is not threading.main_thread():
        raise refusal(fault, "dispatch it from the main thread, which alone can install handlers")
