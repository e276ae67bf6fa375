# SPDX-License-Identifier: Apache-2.0
"""A launcher whose own part is over, and that stays because the others' store is in its process."""

import types

from nvidia_resiliency_ext.fault_tolerance._agent.agent import NodeAgent
from nvidia_resiliency_ext.fault_tolerance._core.machine import (
    Cause,
    CloseRendezvous,
    Event,
    LeaveRendezvous,
    NodeUnfit,
    Policy,
    RoundClosed,
    Signalled,
    StopRequested,
)
from nvidia_resiliency_ext.fault_tolerance.config import FaultToleranceConfig

POLICY = Policy(2, 15.0, 1800.0, 93, many_nodes=True, is_store_host=True, host="node1")
UNFIT = Cause("unhealthy", "a GPU is gone", host="node1")
USELESS = Cause("attribution", "no restart helps", detected_by="attribution")


class LastRounds:
    """A job that the others go on with until it is closed; this launcher never has a place in it.

    Stands for the loop and the rendezvous: each turn of the loop brings the next event.
    """

    def __init__(self, *events: Event) -> None:
        self.must_stay = True
        self.closed: list[tuple[str, Cause | None]] = []
        self.left: list[Cause] = []
        self._events = [NodeUnfit(UNFIT), *events]
        nothing = types.SimpleNamespace(fault=lambda *_, **__: None, cycle_ended=lambda _: None)
        job = types.SimpleNamespace(
            plan=types.SimpleNamespace(fault_tol_cfg=FaultToleranceConfig()),
            paths=types.SimpleNamespace(host="node1"),
            loop=types.SimpleNamespace(run_once=self._turn, watch=None, call_at=lambda *_: None),
            clock=types.SimpleNamespace(monotonic=lambda: 0.0),
            admission=types.SimpleNamespace(admit=lambda *_: None),
            monitor=types.SimpleNamespace(last_iteration=lambda: None),
            reporter=nothing,
            controller=types.SimpleNamespace(),
            bad_node=types.SimpleNamespace(report=lambda _: None),
            rendezvous=self,
            tee=None,
        )
        self.agent = NodeAgent(job, POLICY)  # type: ignore[arg-type]

    def _turn(self) -> None:
        while self._events:
            event = self._events.pop(0)
            self.agent.post(event)
            if not isinstance(event, Signalled):
                break  # a signal comes together with what follows it
        self.must_stay = self.must_stay and bool(self._events)

    def perform(self, effect: object) -> None:
        """Take note; who ends the job has nobody any more who needs the store."""
        if isinstance(effect, LeaveRendezvous):
            self.left.append(effect.cause)
        if isinstance(effect, CloseRendezvous):
            self.closed.append((effect.reason, effect.cause))
            self.must_stay = False


def test_a_verdict_against_a_restart_ends_the_job_that_others_go_on_with() -> None:
    """STOP comes to the launcher with the store: it ends the job for all, and leaves with 93."""
    rounds = LastRounds(StopRequested(USELESS, "attribution_stop"), RoundClosed("never seen"))
    result = rounds.agent.run()
    assert rounds.closed == [("attribution_stop", USELESS)]
    assert (result.exit_code, result.no_restart) == (93, "attribution_stop")


def test_what_comes_with_a_signal_does_not_change_how_the_launcher_ends() -> None:
    """SIGTERM closes the job; a verdict that arrives in the same turn closes it no second time."""
    rounds = LastRounds(Signalled(15), StopRequested(USELESS, "attribution_stop"))
    result = rounds.agent.run()
    assert len(rounds.closed) == 1
    assert (result.exit_code, result.no_restart) == (1, "")


def test_a_job_that_must_not_start_again_ends_so_on_the_host_of_its_store() -> None:
    """Others found that the job makes no progress; the launcher that only serves says so, too."""
    rounds = LastRounds(RoundClosed("no_progress", no_restart=True))
    assert rounds.agent.run().exit_code == 93


def test_how_others_end_is_not_how_this_launcher_ends() -> None:
    """It left because its machine is unfit; that the job then ends well does not change that."""
    rounds = LastRounds(RoundClosed("graceful"))
    result = rounds.agent.run()
    assert (result.exit_code, result.is_unfit, rounds.left) == (1, True, [UNFIT])
