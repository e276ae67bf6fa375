# SPDX-License-Identifier: Apache-2.0
"""Builds event files in memory: a test gives each event its time in seconds from the begin."""

from nvidia_resiliency_ext.shared_utils._events.read import EventFile, EventRecord
from nvidia_resiliency_ext.shared_utils.events import Event

BEGIN = 1_700_000_000.0


class RecordedJob:
    """The events of one node."""

    def __init__(self, host: str = "n1", job_id: str = "7", launch_id: str = "a") -> None:
        """Begin without any event."""
        self.header = {
            "kind": "header", "schema": "nvrx_events.v1", "host": host, "launch_id": launch_id,
            "job_id": job_id, "clock": {"wall": BEGIN, "mono": 100.0},
        }  # fmt: skip
        self.records: list[EventRecord] = []

    def at(
        self, seconds: float, event: Event, cycle: int | None = 0, rank: int | None = None
    ) -> "RecordedJob":
        """Add an event that happened so many seconds after the begin."""
        names = event.field_names()
        given = {name: getattr(event, name) for name in names if getattr(event, name) is not None}
        self.records.append(
            EventRecord(
                BEGIN + seconds, 100.0 + seconds, event.kind, "launcher", cycle, rank, 1, given
            )
        )
        return self

    def file(self) -> EventFile:
        """Return what reading the node's file would give."""
        return EventFile(f"events-{self.header['host']}", self.header, tuple(self.records), 0)
