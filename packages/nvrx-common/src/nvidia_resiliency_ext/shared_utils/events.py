# SPDX-License-Identifier: Apache-2.0
"""Owns the record of what happened to a job: typed events, one file of JSON lines per node.

Writers use ``EventLog`` (``create`` in the launcher, ``join`` everywhere else) and the kinds below;
readers use ``read_events``. What the events mean together is the business of ``report``. The kinds
and the reader are loaded when first asked for, so that a process that records nothing does not pay
for them. A write never raises into the caller.
"""

from __future__ import annotations

from ._events.log import NULL_EVENTS, EventLog

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ._events.kinds import (
        CkptLoad,
        CkptSave,
        CkptVerify,
        CycleEnd,
        CycleStart,
        Dropped,
        Event,
        Fault,
        FirstStep,
        Health,
        InprocRestart,
        JobEnd,
        JobStart,
        Phase,
        Progress,
        Standby,
        Straggler,
        TimeoutsSet,
        Verdict,
        WorkerExit,
        WorkerStart,
    )
    from ._events.read import EventFile, EventFileError, EventRecord, read_events

__all__ = [
    "NULL_EVENTS",
    "CkptLoad",
    "CkptSave",
    "CkptVerify",
    "CycleEnd",
    "CycleStart",
    "Dropped",
    "Event",
    "EventFile",
    "EventFileError",
    "EventLog",
    "EventRecord",
    "Fault",
    "FirstStep",
    "Health",
    "InprocRestart",
    "JobEnd",
    "JobStart",
    "Phase",
    "Progress",
    "Standby",
    "Straggler",
    "TimeoutsSet",
    "Verdict",
    "WorkerExit",
    "WorkerStart",
    "read_events",
]

_READER_NAMES = frozenset({"EventFile", "EventFileError", "EventRecord", "read_events"})


def __getattr__(name: str) -> object:
    """Load a kind of event or the reader on first use."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in _READER_NAMES:
        from ._events import read as module
    else:
        from ._events import kinds as module  # type: ignore[no-redef]
    value: object = getattr(module, name)
    globals()[name] = value
    return value
