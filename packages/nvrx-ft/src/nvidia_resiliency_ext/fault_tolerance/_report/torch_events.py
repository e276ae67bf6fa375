# SPDX-License-Identifier: Apache-2.0
"""Starts and ends of workers for torch's event handlers, as torchrun tells them.

The handlers need torch, which a thread imports when the first workers have started. Only the end
of the job waits for it, and not for long.
"""

from __future__ import annotations

import json
import logging
import queue
import socket
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from nvidia_resiliency_ext.fault_tolerance._core.machine import Assignment
from nvidia_resiliency_ext.shared_utils.clock import Clock

from .failures import Failure

logger = logging.getLogger("nvrx")

NO_HANDLER = "null"
# Others are known to a torch that a site has changed.
_BUILT_IN = frozenset({NO_HANDLER, "console", "dynamic_rendezvous"})
DRAIN_S = 60.0


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
    """Tells a handler of torch what happens to the workers of this node, which run `entry`."""

    def __init__(self, handler: str, clock: Clock, *, run_id: str, role: str, entry: str) -> None:
        self._handler = handler
        self._clock = clock
        self._job = {"run_id": run_id, "role": role}
        self._entry = entry
        self._began = clock.monotonic()
        self._assignment: Assignment | None = None
        self._pids: dict[int, int] = {}
        # State and metadata of each event, before torch is there to make one of its own.
        self._queue: queue.SimpleQueue[tuple[str, dict[str, Any]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def started(self, assignment: Assignment, pids: Mapping[int, int]) -> None:
        """Queue an event for each worker of a cycle that starts."""
        self._assignment, self._pids = assignment, dict(pids)
        for local_rank in self._pids:
            self._queue_event("START", local_rank)

    def ended(self, exit_code: int, failures: Sequence[Failure], stop_signal: int | None) -> None:
        """Queue the events of the job's end here, of each worker and of the launcher itself."""
        failed = {failure.local_rank: failure for failure in failures}
        if stop_signal is None and (failed or exit_code == 0):
            for local_rank in self._pids:
                failure = failed.get(local_rank)
                others = "TERMINATED" if failed else "SUCCEEDED"
                self._queue_event("FAILED" if failure else others, local_rank, failure)
        # As torchrun: its agent has succeeded when it knows how the workers ended.
        is_known = stop_signal is None and (exit_code == 0 or bool(failed))
        self._queue_event("SUCCEEDED" if is_known else "FAILED")

    def close(self) -> None:
        """Wait until all events are delivered, for `DRAIN_S` at most."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._queue.put(None)
        thread.join(DRAIN_S)
        if thread.is_alive():
            logger.warning("the event handler %r did not take all events", self._handler)

    def _queue_event(
        self, state: str, local_rank: int | None = None, failure: Failure | None = None
    ) -> None:
        """Queue an event of a worker; without `local_rank`, of the launcher itself."""
        at = self._assignment
        about: dict[str, Any] = {
            "group_world_size": at.group_world_size if at else None,
            "entry_point": self._entry,
        }
        rank = worker_id = raw_error = None
        if local_rank is not None:
            assert at is not None
            rank, worker_id = at.rank_offset + local_rank, str(self._pids[local_rank])
            about |= {
                # Lists of one, as torchrun writes them.
                "local_rank": [local_rank],
                "role_rank": [rank],
                "role_world_size": [at.world_size],
                "exit_code": [failure and failure.status.returncode],
                "worker_pid": [failure and failure.pid],
            }
        if failure is not None:
            raw_error = json.dumps({"message": failure.error.message} if failure.error else {})
        event = {
            **self._job,
            "global_rank": rank,
            "group_rank": at.group_rank if at else None,
            "worker_id": worker_id,
            "state": state,
            "total_run_time": int(self._clock.monotonic() - self._began),
            "rdzv_backend": "c10d",
            "raw_error": raw_error,
            "metadata": json.dumps(about),
            "agent_restarts": at.cycle if at else 0,
            "duration_ms": None,
        }
        self._queue.put((state, event))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="nvrx-torch-events", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        try:
            from torch.distributed.elastic import events
            from torch.distributed.elastic.events.api import Event, EventSource

            host = socket.getfqdn(socket.gethostname())
            while (item := self._queue.get()) is not None:
                state, metadata = item
                is_of_worker = metadata["worker_id"] is not None
                torch_event = Event(
                    name=f"torchelastic.worker.status.{state}",
                    source=EventSource.WORKER if is_of_worker else EventSource.AGENT,
                    metadata={**metadata, "hostname": host},
                )
                events.record(torch_event, self._handler)
        except Exception as error:  # noqa: BLE001 - a handler of the user's may raise anything
            what = f"{type(error).__name__}: {error}"
            logger.warning("the event handler %r is told nothing more: %s", self._handler, what)
