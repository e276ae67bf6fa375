# SPDX-License-Identifier: Apache-2.0
"""The names and numbers of faults, also those added at run time; it makes no fault happen.

An `Enum` class is closed once it is made. What is added later is therefore kept beside it, and the
metaclass answers for both through its documented methods: nothing of the standard library's
internals, which differ from version to version, is touched.
"""

from __future__ import annotations

import enum
import threading
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Fault", "InjectedException", "add_fault"]

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
    """Return the fault of that name, made with the next free number if there is none.

    Raises:
        ValueError: The name cannot be one of a fault.
    """
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
