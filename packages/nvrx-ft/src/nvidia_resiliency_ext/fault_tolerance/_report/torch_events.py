# SPDX-License-Identifier: Apache-2.0
"""Starts and ends of workers for torch's event handlers, as torchrun tells them.

The handlers are torch's, so torch is imported: in a thread, and only when the first workers have
started. Nothing waits for it but the end of the job, and that not for long.
"""

from __future__ import annotations

import json
import logging
import queue
import socket
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nvidia_resiliency_ext.shared_utils.clock import Clock

if TYPE_CHECKING:
    from nvidia_resiliency_ext.fault_tolerance._core.machine import Assignment

    from .failures import Failure


logger = logging.getLogger("nvrx")

NO_HANDLER = "null"
# What torch itself has; others are known to a torch that a site has changed.
_BUILT_IN = frozenset({NO_HANDLER, "console", "dynamic_rendezvous"})
LAST_WORDS_S = 60.0


@dataclass(frozen=True, slots=True)
class JobFacts:
    """What every event says of the job; `entry` is what the workers run."""

    run_id: str
    role: str
    entry: str


@dataclass(frozen=True, slots=True)
class _Event:
    """One event, before torch is there to make one of its own."""

    state: str
    is_of_worker: bool
    metadata: Mapping[str, Any]


def check_handler(name: str) -> None:
    """Refuse the name of a handler that torch does not know; imports torch for unusual ones."""
    if name in _BUILT_IN:
        return
    from torch.distributed.elastic.events.handlers import get_logging_handler

    try:
        get_logging_handler(name)
    except KeyError:
        names = ", ".join(sorted(_BUILT_IN))
        raise ValueError(
            f"--event-log-handler {name}: torch knows no handler of this name; it has {names}"
        ) from None


class TorchEvents:
    """Tells a handler of torch what happens to the workers of this node."""

    def __init__(self, handler: str, facts: JobFacts, clock: Clock) -> None:
        self._handler = handler
        self._facts = facts
        self._clock = clock
        self._began = clock.monotonic()
        self._assignment: Assignment | None = None
        self._pids: dict[int, int] = {}
        self._queue: queue.SimpleQueue[_Event | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    # What the launcher says ------------------------------------------------------------------

    def started(self, assignment: Assignment, pids: Mapping[int, int]) -> None:
        """Tell of the workers of a cycle, which run now."""
        self._assignment, self._pids = assignment, dict(pids)
        for local_rank in self._pids:
            self._worker("START", local_rank)

    def ended(self, exit_code: int, failures: Sequence[Failure], stop_signal: int | None) -> None:
        """Tell how the job ended here, of each worker and of the launcher itself."""
        failed = {failure.local_rank: failure for failure in failures}
        if stop_signal is None and (failed or exit_code == 0):
            for local_rank in self._pids:
                self._worker_end(local_rank, failed)
        # As torchrun: its agent has succeeded when it knows how the workers ended.
        is_known = stop_signal is None and (exit_code == 0 or bool(failed))
        self._say("SUCCEEDED" if is_known else "FAILED", None, {})

    def close(self) -> None:
        """Wait until all events are delivered, for `LAST_WORDS_S` at most."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._queue.put(None)
        thread.join(LAST_WORDS_S)
        if thread.is_alive():
            logger.warning("the event handler %r did not take all events", self._handler)

    def _worker_end(self, local_rank: int, failed: Mapping[int, Failure]) -> None:
        failure = failed.get(local_rank)
        if failure is None:
            self._worker("TERMINATED" if failed else "SUCCEEDED", local_rank)
            return
        error = {} if failure.error is None else {"message": failure.error.message}
        self._worker(
            "FAILED",
            local_rank,
            worker_pid=failure.pid,
            exit_code=failure.status.returncode,
            raw_error=json.dumps(error),
        )

    # Events ----------------------------------------------------------------------------

    def _worker(
        self,
        state: str,
        local_rank: int,
        *,
        worker_pid: int | None = None,
        exit_code: int | None = None,
        raw_error: str | None = None,
    ) -> None:
        assert self._assignment is not None
        rank = self._assignment.rank_offset + local_rank
        of_worker = {
            # Lists of one, as torchrun writes them.
            "local_rank": [local_rank],
            "role_rank": [rank],
            "role_world_size": [self._assignment.world_size],
            "exit_code": [exit_code],
            "worker_pid": [worker_pid],
        }
        metadata = {
            "global_rank": rank,
            "worker_id": str(self._pids[local_rank]),
            "raw_error": raw_error,
        }
        self._say(state, of_worker, metadata)

    def _say(
        self, state: str, of_worker: Mapping[str, Any] | None, metadata: Mapping[str, Any]
    ) -> None:
        at, facts = self._assignment, self._facts
        about = {
            "group_world_size": at.group_world_size if at else None,
            "entry_point": facts.entry,
            **(of_worker or {}),
        }
        everything = {
            "run_id": facts.run_id,
            "global_rank": None,
            "group_rank": at.group_rank if at else None,
            "worker_id": None,
            "role": facts.role,
            "state": state,
            "total_run_time": int(self._clock.monotonic() - self._began),
            "rdzv_backend": "c10d",
            "raw_error": None,
            "metadata": json.dumps(about),
            "agent_restarts": at.cycle if at else 0,
            "duration_ms": None,
            **metadata,
        }
        self._queue.put(_Event(state, of_worker is not None, everything))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="nvrx-torch-events", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        try:
            self._deliver_all()
        except Exception as error:  # noqa: BLE001 - a handler of the user's may raise anything
            what = f"{type(error).__name__}: {error}"
            logger.warning("the event handler %r is told nothing more: %s", self._handler, what)

    def _deliver_all(self) -> None:
        from torch.distributed.elastic import events
        from torch.distributed.elastic.events.api import Event, EventSource

        host = socket.getfqdn(socket.gethostname())
        while (event := self._queue.get()) is not None:
            source = EventSource.WORKER if event.is_of_worker else EventSource.AGENT
            torch_event = Event(
                name=f"torchelastic.worker.status.{event.state}",
                source=source,
                metadata={**event.metadata, "hostname": host},
            )
            events.record(torch_event, self._handler)
