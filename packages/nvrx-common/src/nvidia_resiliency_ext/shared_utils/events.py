# SPDX-License-Identifier: Apache-2.0
"""The event record of a job: typed events, one file of JSON lines per node.

Writers use ``EventLog`` (``create`` in the launcher, ``join`` everywhere else) and the kinds below;
readers use ``read_events``. ``report`` evaluates the events. The kinds and the reader are loaded at
first use, so that a process that records nothing does not import them. A write never raises an
exception.
"""

from __future__ import annotations

from ._events.log import NULL_EVENTS, EventLog
from .lazy_names import lazy_names

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

__getattr__, __dir__ = lazy_names(
    globals(), {"_events.kinds": frozenset(__all__) - _READER_NAMES, "_events.read": _READER_NAMES}
)
