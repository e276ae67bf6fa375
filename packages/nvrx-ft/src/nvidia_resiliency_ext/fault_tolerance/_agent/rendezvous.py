# SPDX-License-Identifier: Apache-2.0
"""Rounds: who takes part in a cycle and with which rank; here, those of a single node."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from nvidia_resiliency_ext.fault_tolerance._core import machine
from nvidia_resiliency_ext.fault_tolerance._core.machine import Cause
from nvidia_resiliency_ext.fault_tolerance._workers.command import PortReservation
from nvidia_resiliency_ext.shared_utils.hang_culprit import RankState

if TYPE_CHECKING:
    from .job import Job


class RoundPorts:
    """The MASTER_PORT that this node offers, and that of a round in which it has rank 0.

    Each round has its own, unless the user fixed one. Raises PortInUseError: that one is taken.
    """

    def __init__(self, fixed: int | None = None) -> None:
        self._is_fixed = fixed is not None
        self._offered = PortReservation(fixed)
        self._in_use: PortReservation | None = None

    @property
    def offered(self) -> int:
        return self._offered.port

    def take(self) -> None:
        """Keep the port for the round that begins, and offer another for the one after."""
        if not self._is_fixed:
            self.end_round()
            self._in_use, self._offered = self._offered, PortReservation()

    def end_round(self) -> None:
        if self._in_use is not None:
            self._in_use.release()
            self._in_use = None

    def close(self) -> None:
        self.end_round()
        self._offered.release()


class LocalRendezvous:
    """Rounds of a single node, decided on the spot. Raises PortInUseError, as `RoundPorts`.

    `StoreRendezvous` has the same methods; both post what happens to the agent.
    """

    must_stay = False  # Whether others need this launcher although its own part is over.
    is_over = False  # Whether all nodes have agreed that the job is over; here nobody is asked.

    def __init__(self, job: Job) -> None:
        self._plan, self._post = job.plan, job.post
        self._closed: str | None = None
        self._ports = RoundPorts(job.plan.master_port)

    def join(self, cycle: int) -> None:
        """Offer this node for `cycle`: the round is complete at once."""
        port = self._ports.offered
        if self._closed is None:
            try:
                # The next round's is reserved now, so that no bind is in its way.
                self._ports.take()
            except OSError as error:
                self._closed = f"no port for MASTER_PORT can be reserved: {error}"
        if self._closed is not None:
            self._post(machine.RoundClosed(self._closed))
            return
        assignment = machine.Assignment(
            cycle=cycle,
            group_rank=0,
            group_world_size=1,
            rank_offset=0,
            world_size=self._plan.nproc_per_node,
            master_addr=self._plan.local_addr or self._plan.master_addr,
            master_port=port,
        )
        self._post(machine.RoundReady(assignment, tuple(range(self._plan.nproc_per_node))))

    def perform(self, effect: machine.Effect) -> None:
        """Answer at once, as there is no other node; of reasons to close the first one stays."""
        match effect:
            case machine.CloseRendezvous(reason):
                self._closed = self._closed or reason
            case machine.Preempted(cause):
                self._post(machine.RoundLeaves(cause))
            case machine.RanksHeld(calls):
                self._post(machine.SaveAgreed(machine.agreed_call([calls])))

    def hung(self, ranks: Sequence[RankState], complaint: Cause | None) -> None:
        """Do nothing: the ranks of a single node are evaluated by its monitor."""

    def shutdown(self) -> None:
        self._ports.close()
