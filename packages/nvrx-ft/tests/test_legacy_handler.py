# SPDX-License-Identifier: Apache-2.0
"""The older rendezvous with torch's interface: all nodes that come work, and say how they are."""

import datetime as dt
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import handler_nodes
import pytest
from torch.distributed.elastic.agent.server.api import WorkerState
from torch.distributed.elastic.rendezvous.api import RendezvousClosedError

from nvidia_resiliency_ext.fault_tolerance._ft_rendezvous import (
    FtRendezvousHandler,
    RendezvousTimeout,
    create_handler,
)
from nvidia_resiliency_ext.fault_tolerance._rendezvous.log import read_messages
from nvidia_resiliency_ext.fault_tolerance._rendezvous.records import Kind

DEADLINE_S = handler_nodes.DEADLINE_S

pytestmark = [pytest.mark.usefixtures("clean_environment"), pytest.mark.slow]


@pytest.fixture
def job() -> Iterator[Callable[..., handler_nodes.Nodes]]:
    """Return what makes the nodes of a job, which end with the test."""
    made: list[handler_nodes.Nodes] = []

    def make(min_nodes: int, max_nodes: int, **conf: Any) -> handler_nodes.Nodes:
        # A round closes at once when all have come, and else waits for them; a busy machine loses
        # no node.
        conf = {"last_call_timeout": DEADLINE_S, "heartbeat_timeout": DEADLINE_S, **conf}
        made.append(handler_nodes.Nodes(create_handler, min_nodes, max_nodes, **conf))
        return made[-1]

    yield make
    for nodes in made:
        nodes.close()


def until(holds: Callable[[], bool]) -> None:
    """Wait until something holds."""
    deadline = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < deadline
        threading.Event().wait(0.01)


def states(handler: FtRendezvousHandler) -> list[str]:
    """Return the states of all nodes, by address."""
    return [state.name for _, state in sorted(handler.get_worker_states().items())]


def has_arrived(handler: FtRendezvousHandler, node: str, round_: int) -> bool:
    """Return whether a node has offered itself in a round."""
    messages = handler._ask(lambda session: read_messages(session.store, round_))
    return any(message.node == node and message.kind is Kind.ARRIVED for message in messages)


def start(nodes: handler_nodes.Nodes, count: int) -> list[Any]:
    """Let `count` nodes begin a job together."""
    handlers = [nodes.add(host=number == 0) for number in range(count)]
    nodes.join(*handlers)
    return handlers


def test_all_work_that_come(job: Callable[..., handler_nodes.Nodes]) -> None:
    """A round closes with every node up to the most, at once when all have come."""
    nodes = job(1, 3)
    handlers = [nodes.add(host=number == 0) for number in range(3)]
    infos = nodes.join(*handlers)
    assert sorted(info.rank for info in infos) == [0, 1, 2]
    assert [handler.num_nodes() for handler in handlers] == [3, 3, 3]
    assert states(handlers[1]) == ["HEALTHY"] * 3


def test_a_late_node_is_taken_in_while_there_is_room(
    job: Callable[..., handler_nodes.Nodes],
) -> None:
    """With upscaling a new node opens the next round, in which all work."""
    nodes = job(1, 2, last_call_timeout=1)
    first = nodes.add(host=True)
    early = nodes.call(first.next_rendezvous)
    assert early.result(DEADLINE_S).world_size == 1
    late = nodes.add()
    joined = nodes.call(late.next_rendezvous)
    until(lambda: first.num_nodes_waiting() > 0)
    again = nodes.call(first.next_rendezvous)
    assert {again.result(DEADLINE_S).rank, joined.result(DEADLINE_S).rank} == {0, 1}


def test_without_upscaling_a_late_node_stands_by(job: Callable[..., handler_nodes.Nodes]) -> None:
    """Without upscaling nobody is disturbed; the late node comes in with the next restart."""
    nodes = job(1, 2, last_call_timeout=1, upscaling_enabled=False)
    (first,) = start(nodes, 1)
    late = nodes.add()
    joined = nodes.call(late.next_rendezvous)
    until(lambda: has_arrived(first, late._me.node, 0))
    assert first.num_nodes_waiting() == 0
    again = nodes.call(first.next_rendezvous)
    assert {again.result(DEADLINE_S).world_size, joined.result(DEADLINE_S).world_size} == {2}


def test_final_states_stay(job: Callable[..., handler_nodes.Nodes]) -> None:
    """A node says how its workers are; a final word is not taken back."""
    nodes = job(1, 3)
    one, two, three = start(nodes, 3)
    assert one.try_set_worker_state(WorkerState.UNHEALTHY) is WorkerState.UNHEALTHY
    assert one.try_set_worker_state(WorkerState.HEALTHY) is WorkerState.HEALTHY
    assert two.try_set_worker_state(WorkerState.SUCCEEDED) is WorkerState.SUCCEEDED
    assert two.try_set_worker_state(WorkerState.HEALTHY) is WorkerState.SUCCEEDED
    assert states(three) == ["HEALTHY", "SUCCEEDED", "HEALTHY"]
    for state in (WorkerState.INIT, WorkerState.STOPPED):
        with pytest.raises(ValueError, match=state.name):
            one.try_set_worker_state(state)
    outside = nodes.add()
    assert outside.try_set_worker_state(WorkerState.HEALTHY) is WorkerState.UNKNOWN


def test_survivors_are_left_alone_while_they_are_enough(
    job: Callable[..., handler_nodes.Nodes],
) -> None:
    """One failed node of three disturbs nobody where two are enough; a second one does."""
    nodes = job(2, 3)
    one, two, three = start(nodes, 3)
    two.try_set_worker_state(WorkerState.FAILED)
    assert states(one) == ["HEALTHY", "FAILED", "HEALTHY"]
    assert not one.is_next_round_open()
    three.try_set_worker_state(WorkerState.UNHEALTHY)
    until(one.is_next_round_open)


def test_enough_successes_end_the_job(job: Callable[..., handler_nodes.Nodes]) -> None:
    """When nobody works any more and enough have succeeded the job ended well for all."""
    nodes = job(2, 3)
    one, two, three = start(nodes, 3)
    two.try_set_worker_state(WorkerState.FAILED)
    for handler in (one, three):
        handler.try_set_worker_state(WorkerState.SUCCEEDED)
    until(lambda: all(handler.is_closed() for handler in (one, two, three)))
    with pytest.raises(RendezvousClosedError, match="graceful"):
        two.next_rendezvous()


def test_a_lost_node_is_unknown(job: Callable[..., handler_nodes.Nodes]) -> None:
    """The store host tells of a node without signs of life, and the others go on."""
    nodes = job(1, 2, heartbeat_timeout=1, close_timeout=2)
    one, two = start(nodes, 2)
    # Its process is gone: no lease any more.
    two._client.close(DEADLINE_S)
    until(lambda: states(one) == ["HEALTHY", "UNKNOWN"])
    assert not one.is_next_round_open()


def test_a_node_may_leave_and_come_back(job: Callable[..., handler_nodes.Nodes]) -> None:
    """A node that takes itself out is unknown in that round, and is welcome in the next."""
    nodes = job(1, 2)
    one, two = start(nodes, 2)
    two.remove_this_node()
    assert states(one) == ["HEALTHY", "UNKNOWN"]
    back = nodes.call(two.next_rendezvous)
    until(one.is_next_round_open)
    again = nodes.call(one.next_rendezvous)
    assert {again.result(DEADLINE_S).world_size, back.result(DEADLINE_S).world_size} == {2}


def test_the_last_call_is_longer() -> None:
    """This rendezvous waits 30 s for more nodes unless told otherwise."""
    assert RendezvousTimeout().last_call == dt.timedelta(seconds=30)
