# SPDX-License-Identifier: Apache-2.0
"""The arguments of `Wrapper` in one value, and whether they fit together: pure, nothing is made."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from types import NoneType
from typing import Any

from nvidia_resiliency_ext.inprocess._store.mixin import StoreMixin
from nvidia_resiliency_ext.inprocess.abort import Abort
from nvidia_resiliency_ext.inprocess.completion import Completion
from nvidia_resiliency_ext.inprocess.compose import members_of
from nvidia_resiliency_ext.inprocess.finalize import Finalize
from nvidia_resiliency_ext.inprocess.health_check import HealthCheck
from nvidia_resiliency_ext.inprocess.initialize import Initialize
from nvidia_resiliency_ext.inprocess.rank_assignment import (
    FilterCountGroupedByKey,
    RankAssignment,
    RankFilter,
)
from nvidia_resiliency_ext.inprocess.rank_filter import RankFilter as OlderRankFilter
from nvidia_resiliency_ext.inprocess.terminate import Terminate


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The arguments of `Wrapper`, under the same names; `Wrapper` documents them."""

    store_factory: type[Any]
    rank_assignment: Any
    store_kwargs: dict[str, Any] | None = None
    initialize: Initialize | None = None
    abort: Abort | None = None
    finalize: Finalize | None = None
    health_check: HealthCheck | None = None
    rank_filter: Any = None
    monitor_thread_interval: timedelta = timedelta(seconds=1)
    monitor_process_interval: timedelta = timedelta(seconds=1)
    heartbeat_interval: timedelta = timedelta(seconds=1)
    progress_watchdog_interval: timedelta = timedelta(seconds=1)
    soft_timeout: timedelta = timedelta(seconds=60)
    hard_timeout: timedelta = timedelta(seconds=90)
    heartbeat_timeout: timedelta = timedelta(seconds=30)
    barrier_timeout: timedelta = timedelta(seconds=120)
    completion_timeout: timedelta = timedelta(seconds=120)
    last_call_wait: timedelta = timedelta(seconds=1)
    termination_grace_time: timedelta = timedelta(seconds=5)
    monitor_process_logfile: str | None = None
    monitor_process_pidfile: str | None = None
    enabled: bool = True
    completion: Completion | None = None
    terminate: Terminate | None = None


_TIMES = tuple(field.name for field in fields(Settings) if isinstance(field.default, timedelta))

# Without a pause between two looks nothing else would run.
_PERIODS = ("monitor_process_interval", "heartbeat_interval", "progress_watchdog_interval")

# `poll` counts milliseconds in an int, and sums of times must not overflow.
_LONGEST = timedelta(days=24)

_PATHS = ("monitor_process_logfile", "monitor_process_pidfile")

_TYPES: Mapping[str, tuple[type, ...]] = {
    "initialize": (Initialize, NoneType),
    "abort": (Abort, NoneType),
    "finalize": (Finalize, NoneType),
    "health_check": (HealthCheck, NoneType),
    "completion": (Completion, NoneType),
    "terminate": (Terminate, NoneType),
    "rank_assignment": (RankAssignment,),
    "rank_filter": (RankFilter, OlderRankFilter, NoneType),
    **dict.fromkeys(_TIMES, (timedelta,)),
    **dict.fromkeys(_PATHS, (str, NoneType)),
    "enabled": (bool,),
}

_ORDERS = (
    ("soft_timeout", "hard_timeout", "barrier_timeout"),
    ("monitor_process_interval", "barrier_timeout"),
    ("monitor_process_interval", "heartbeat_timeout"),
    ("monitor_process_interval", "soft_timeout"),
    ("heartbeat_timeout", "barrier_timeout"),
    ("heartbeat_interval", "heartbeat_timeout"),
    ("monitor_thread_interval", "soft_timeout"),
    ("progress_watchdog_interval", "soft_timeout"),
)
"""What must be less than what comes after it."""


def check_settings(settings: Settings, *, is_distributed_available: bool) -> None:
    """Raise a TypeError or ValueError that names the argument, or the relation that is broken."""
    _check_types(settings)
    _check_relations(settings)
    _check_renumbering(settings)
    for name in _PATHS:
        path = getattr(settings, name)
        # The monitor runs in another directory.
        if path is not None and not os.path.isabs(path):
            raise ValueError(f"os.path.isabs({name}) does not hold: {name}={path!r}")
    if not is_distributed_available:
        raise ValueError("torch.distributed.is_available() does not hold: this torch lacks it")


def bounded(settings: Settings) -> Settings:
    """Return settings in which "never", as of `timedelta.max`, is a time that can be waited for."""
    times = {name: min(getattr(settings, name), _LONGEST) for name in _TIMES}
    return replace(settings, **times)


def _check_types(settings: Settings) -> None:
    factory: Any = settings.store_factory
    if not isinstance(factory, type) or not issubclass(factory, StoreMixin):
        raise _type_error("store_factory", "a subclass of StoreMixin", factory)
    kwargs: Any = settings.store_kwargs
    if kwargs is not None and not isinstance(kwargs, dict):
        raise _type_error("store_kwargs", "dict or None", kwargs)
    if not all(isinstance(key, str) for key in kwargs or ()):
        raise _type_error("store_kwargs", "a dict whose keys are str", kwargs)
    for name, classes in _TYPES.items():
        value = getattr(settings, name)
        if not isinstance(value, classes):
            names = ["None" if cls is NoneType else cls.__name__ for cls in classes]
            # RankFilter stands there twice: the present and the older class.
            raise _type_error(name, " or ".join(dict.fromkeys(names)), value)


def _check_relations(settings: Settings) -> None:
    """Check that times are not negative, periods not zero, and which must be shorter than which."""
    for name in _TIMES:
        if getattr(settings, name) < timedelta(0):
            raise ValueError(f"{name} >= 0 does not hold: {_shown(settings, (name,))}")
    for name in _PERIODS:
        if not getattr(settings, name):
            raise ValueError(f"{name} > 0 does not hold: {_shown(settings, (name,))}")
    for names in _ORDERS:
        values = [getattr(settings, name) for name in names]
        if not all(map(timedelta.__lt__, values, values[1:])):
            raise ValueError(f"{' < '.join(names)} does not hold: {_shown(settings, names)}")


def _check_renumbering(settings: Settings) -> None:
    """Check that ranks are renumbered after some were filtered out; else it would do nothing."""
    is_renumbered = True
    # The filter is called after the assignment, of which the last member is called first.
    for member in reversed([*members_of(settings.rank_filter, settings.rank_assignment)]):
        if isinstance(member, FilterCountGroupedByKey):
            is_renumbered = False
        elif isinstance(member, RankAssignment) and not isinstance(member, RankFilter):
            is_renumbered = True
    if not is_renumbered:
        raise ValueError(
            "FilterCountGroupedByKey must be followed by what gives new numbers, and rank_filter"
            " comes after: rank_assignment=Compose(ShiftRanks(), FilterCountGroupedByKey(...)),"
            f" not rank_assignment={settings.rank_assignment!r},"
            f" rank_filter={settings.rank_filter!r}"
        )


def _type_error(name: str, wanted: str, value: object) -> TypeError:
    return TypeError(f"{name} must be {wanted}, not {type(value).__name__} {repr(value)[:200]}")


def _shown(settings: Settings, names: tuple[str, ...]) -> str:
    return ", ".join(f"{name}={getattr(settings, name)}" for name in names)
