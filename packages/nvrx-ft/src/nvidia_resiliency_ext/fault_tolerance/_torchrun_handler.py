# SPDX-License-Identifier: Apache-2.0
"""Our rounds under plain torchrun: spares, leases, denylist, and the record of the job.

Workers, restarts and failure are torch's agent's, which tells no handler why a rank failed; who
takes part in which round is ours.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError, RendezvousParameters

from nvidia_resiliency_ext.shared_utils import events

from ._core.errors import RDZV_SHUTDOWN_REASON_FAILURE, RDZV_SHUTDOWN_REASON_GRACEFUL
from ._core.machine import Cause
from ._rendezvous.records import Kind
from ._rendezvous.session import Opened, Over, RankAssigned, SessionEvent
from ._torch.settings import NodeOptions
from .c10d_monkey_patch import create_tcp_store
from .ft_rendezvous_barrier import FtRendezvousBarrierHandler, RendezvousSettings, make_handler

__all__ = ["TorchrunHandler", "create_torchrun_handler"]


class TorchrunHandler(FtRendezvousBarrierHandler):
    """One node of a job whose launchers are torchrun's."""

    def __init__(self, store: Store, settings: RendezvousSettings, options: NodeOptions) -> None:
        self._log = _event_log(settings.run_id)
        # Decisions arrive in a thread.
        self._lock = threading.Lock()
        self._cycle: int | None = None
        self._reason = "start"
        nnodes = f"{settings.min_nodes}:{settings.max_nodes}"
        self._log.record(events.JobStart(nnodes=nnodes, policy="any-failed"), cycle=None)
        super().__init__(store, settings, options)

    def get_backend(self) -> str:
        """Return `nvrx`, the name that torch knows this handler by."""
        return "nvrx"

    def next_rendezvous(self) -> Any:
        """Take part in the next round; workers find its number in NVRX_CYCLE.

        torch counts restarts of its own node in TORCHELASTIC_RESTART_COUNT.
        """
        with self._lock:
            if self._cycle is not None:
                # No other node has opened a round: it is torch's agent here that starts anew.
                what = f"workers on host {self._me.host} failed; torchrun's log says how"
                self._restarts_because(self._cause("exit", what))
        info = super().next_rendezvous()
        os.environ["NVRX_CYCLE"] = str(self.round())
        return info

    def shutdown(self, reason: str = "") -> bool:
        """Let go of everything; an error of this launcher alone does not end the job for others.

        torch calls this without a word when its agent has ended, well or not.
        """
        error = sys.exc_info()[1]
        is_own_error = not reason and error is not None and not isinstance(error, ChildFailedError)
        if is_own_error and not self.is_closed() and not self._has_left:
            what = f"{type(error).__name__}: {error}"[:1000]
            # Where no message can be sent the lease expires.
            with contextlib.suppress(RendezvousConnectionError):
                self._leave(Kind.LEFT, self._cause("left", what))
        fallback = RDZV_SHUTDOWN_REASON_GRACEFUL if error is None else RDZV_SHUTDOWN_REASON_FAILURE
        is_reported = super().shutdown(reason or fallback)
        with self._lock:
            self._end_cycle("over")
        result = "success" if error is None else str(error) or type(error).__name__
        code = 0 if error is None else 1
        end = events.JobEnd(result=result[:2000], exit_code=code, restarts=self.round())
        self._log.record(end, cycle=None)
        self._log.close()
        return is_reported

    def _take(self, event: SessionEvent) -> None:
        with self._lock:
            if isinstance(event, Opened) and event.entry.cause is not None:
                self._restarts_because(event.entry.cause)
            elif isinstance(event, Over):
                self._end_cycle(event.entry.reason)
            elif isinstance(event, RankAssigned) and event.entry.round != self._cycle:
                self._cycle = event.entry.round
                start = events.CycleStart(nodes=event.entry.active, reason=self._reason)
                self._log.record(start, cycle=self._cycle)
        super()._take(event)

    def _restarts_because(self, cause: Cause) -> None:
        self._reason = cause.what
        if self._cycle is not None:
            fault = events.Fault(cause=cause.kind, what=cause.what, detected_by=cause.detected_by)
            self._log.record(fault, cycle=self._cycle, rank=cause.rank)
        self._end_cycle(cause.what)

    def _end_cycle(self, result: str) -> None:
        cycle, self._cycle = self._cycle, None
        if cycle is not None:
            self._log.record(events.CycleEnd(result=result), cycle=cycle)


def create_torchrun_handler(params: RendezvousParameters) -> TorchrunHandler:
    """Return the handler of a `torchrun --rdzv-backend=nvrx`, which records in NVRX_EVENT_DIR.

    The node whose name or address is in the endpoint serves the store.
    """
    return make_handler(TorchrunHandler, create_tcp_store(params), params)


def _event_log(job_id: str) -> events.EventLog:
    """Return the record of this node, which its workers find by the environment."""
    directory = os.environ.get("NVRX_EVENT_DIR")
    if not directory:
        return events.NULL_EVENTS
    log = events.EventLog.create(
        directory,
        src="launcher",
        job_id=job_id,
        launch_id=os.urandom(8).hex(),
        host=os.uname().nodename,
    )
    # Workers get this process's environment.
    os.environ.update(log.environment())
    return log
