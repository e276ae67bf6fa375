# SPDX-License-Identifier: Apache-2.0
"""The kinds of faults by name and number, the draw of a plan, and what all faults share."""

from __future__ import annotations

import enum
import threading
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator


_added: dict[str, Fault] = {}
_adding = threading.Lock()
_ATTRIBUTES = frozenset({"name", "value"})


class InjectedException(Exception):  # noqa: N818 - callers catch it under this name
    """Raised on purpose, by a fault."""


class _FaultType(enum.EnumMeta):
    """Lets `Fault` be looked up, counted and walked through with its later members."""

    def __getitem__(cls, name: str) -> Any:
        return _added[name] if name in _added else super().__getitem__(name)

    def __getattr__(cls, name: str) -> Any:
        # Asked only for what the class itself does not have.
        if name in _added:
            return _added[name]
        raise AttributeError(f"there is no fault {name}")

    def __iter__(cls) -> Iterator[Any]:
        yield from super().__iter__()
        yield from tuple(_added.values())

    def __reversed__(cls) -> Iterator[Any]:
        yield from reversed(tuple(_added.values()))
        yield from super().__reversed__()

    def __len__(cls) -> int:
        return super().__len__() + len(_added)

    def __contains__(cls, value: object) -> bool:
        added = _added.values()
        if any(value is each or value == each.value for each in added):
            return True
        # The stub types it narrower than it is.
        return super().__contains__(value)  # type: ignore[operator]

    def __dir__(cls) -> list[str]:
        return [*super().__dir__(), *_added]

    @property
    def __members__(cls) -> MappingProxyType[str, Any]:
        first: MappingProxyType[str, Any] = super().__members__
        return MappingProxyType({**first, **_added})


class Fault(enum.Enum, metaclass=_FaultType):
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

    @classmethod
    def _missing_(cls, value: object) -> Fault | None:
        return next((each for each in _added.values() if each.value == value), None)


def add_fault(name: str) -> Fault:
    """Return the fault of that name, made with the next free number if there is none."""
    with _adding:
        if name in Fault.__members__:
            return Fault[name]
        taken = name in _ATTRIBUTES or hasattr(Fault, name)
        if taken or not name.isidentifier() or name.startswith("_"):
            raise ValueError(f"{name!r} cannot be the name of a fault")
        member: Fault = object.__new__(Fault)
        member._name_ = name
        member._value_ = max(each.value for each in Fault) + 1
        _added[name] = member
        return member


class FaultPlan(NamedTuple):
    """One fault for some ranks.

    Attributes:
        delay: After how many seconds.
    """

    fault: Fault
    ranks: tuple[int, ...]
    delay: float


def draw_plan(
    faults: Fault | Iterable[Fault],
    num_faults: int | tuple[int, int],
    keep_alive: int,
    delay: float | tuple[float, float],
    seed: int,
    world_size: int,
) -> FaultPlan:
    """Draw a plan that depends on the arguments only."""
    from random import Random

    choices = (faults,) if isinstance(faults, Fault) else tuple(faults)
    if not choices:
        raise ValueError("there is no fault to choose from")
    draw = Random(seed)  # noqa: S311 - repeatable is the point
    if isinstance(delay, (int, float)):
        seconds = float(delay)
    else:
        seconds = draw.uniform(*_pair("delay", delay))
    low, high = _pair(
        "num_faults", (num_faults, num_faults) if isinstance(num_faults, int) else num_faults
    )
    candidates = range(max(keep_alive, 0), world_size)
    number = min(draw.randint(int(low), int(high)), len(candidates))
    ranks = tuple(sorted(draw.sample(candidates, number)))
    return FaultPlan(draw.choice(choices), ranks, seconds)


def _pair(name: str, values: tuple[float, float]) -> tuple[float, float]:
    low, high = values
    if not 0 <= low <= high:
        raise ValueError(f"{name}: {values!r} is no pair of a least and a most")
    return low, high


class Action:
    """One fault on its way; made while it is dispatched, used by one background thread.

    Args:
        effect: Makes it happen; a lasting effect that can end ends when the event is set.
    """

    def __init__(self, effect: Callable[[threading.Event], object]) -> None:
        self.act = effect

    def begin(self) -> None:
        """Learn that the time has come and that the callback runs next."""

    def withdraw(self) -> bool:
        """Give it up before its time; return whether it surely does not happen."""
        return True


def refusal(fault: str, reason: str) -> RuntimeError:
    """Return the error for a fault that this process or machine cannot be given."""
    return RuntimeError(f"fault {fault} is refused: {reason}")


def on_main_thread_only(fault: str) -> None:
    """Refuse a fault whose signal handler only the main thread may install."""
    if threading.current_thread() is not threading.main_thread():
        raise refusal(fault, "dispatch it from the main thread, which alone can install handlers")
