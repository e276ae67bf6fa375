# SPDX-License-Identifier: Apache-2.0
"""The barrier rendezvous with torch's interface: handlers in threads over a real store."""

import datetime as dt
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import handler_nodes
import pytest
from torch.distributed import FileStore
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousGracefulExitError,
    RendezvousParameters,
    RendezvousTimeoutError,
)

from nvidia_resiliency_ext.fault_tolerance._core.errors import UnhealthyNodeException
from nvidia_resiliency_ext.fault_tolerance.data import WorkloadAction, WorkloadControlRequest
from nvidia_resiliency_ext.fault_tolerance.ft_rendezvous_barrier import (
    FtRendezvousBarrierHandler,
    GroupRankStatus,
    RendezvousParticipantInfo,
    RendezvousStoreValue,
    RendezvousTimeout,
    create_handler,
)

DEADLINE_S = handler_nodes.DEADLINE_S

pytestmark = [pytest.mark.usefixtures("clean_environment"), pytest.mark.slow]


@pytest.fixture
def job() -> Iterator[Callable[..., handler_nodes.Nodes]]:
    """Return what makes the nodes of a job, which end with the test."""
    made: list[handler_nodes.Nodes] = []

    def make(min_nodes: int, max_nodes: int, **conf: Any) -> handler_nodes.Nodes:
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


def test_all_nodes_get_their_places(job: Callable[..., handler_nodes.Nodes]) -> None:
    """Each node gets a rank of its own, the number of nodes, and where rank 0 is to be met."""
    nodes = job(3, 3)
    handlers = [nodes.add(host=number == 1) for number in range(3)]
    infos = nodes.join(*handlers)
    assert sorted(info.rank for info in infos) == [0, 1, 2]
    assert {info.world_size for info in infos} == {3}
    masters = {str(info.bootstrap_store_info) for info in infos}
    assert len(masters) == 1
    first = next(handler for handler, info in zip(handlers, infos, strict=True) if info.rank == 0)
    number = handlers.index(first) + 2
    assert infos[0].bootstrap_store_info.master_addr == f"127.0.0.{number}"
    assert infos[0].bootstrap_store_info.master_port > 0
    assert [handler.round() for handler in handlers] == [0, 0, 0]
    assert (first.get_run_id(), first.get_backend(), first.use_agent_store) == (
        "job",
        "c10d",
        False,
    )


def test_the_store_of_a_round_is_apart(job: Callable[..., handler_nodes.Nodes]) -> None:
    """What agents put into a round's store stands under the job's name and the round."""
    nodes = job(1, 1)
    (info,) = nodes.join(nodes.add(host=True))
    info.store.set("key", "value")
    assert nodes.store().get("torch.rendezvous.job.0/key") == b"value"


def test_a_prefixed_store_will_do(job: Callable[..., handler_nodes.Nodes]) -> None:
    """Two jobs of one name, behind different prefixes of one store, do not meet."""
    nodes = job(1, 1)
    one, other = nodes.add(host=True, prefix="one"), nodes.add(host=True, prefix="other")
    assert [info.rank for info in nodes.join(one, other)] == [0, 0]


def test_another_kind_of_store_is_refused(tmp_path: Any) -> None:
    """A store that cannot do what rounds need is refused at once, by name."""
    params = RendezvousParameters("c10d", "", "job", 1, 1)
    with pytest.raises(ValueError, match="FileStore: a TCPStore is needed"):
        create_handler(FileStore(str(tmp_path / "store"), 1), None, params)


def test_a_restart_gives_survivors_their_ranks(job: Callable[..., handler_nodes.Nodes]) -> None:
    """One node that begins another rendezvous takes all into the next round, with their ranks."""
    nodes = job(3, 3)
    handlers = [nodes.add(host=number == 0) for number in range(3)]
    before = [info.rank for info in nodes.join(*handlers)]
    assert [handler.num_nodes_waiting() for handler in handlers] == [0, 0, 0]
    failed = nodes.call(handlers[1].next_rendezvous)
    until(lambda: all(handlers[n].is_next_round_open() for n in (0, 2)))
    assert handlers[0].num_nodes_waiting() == 1
    others = [nodes.call(handlers[n].next_rendezvous) for n in (0, 2)]
    after = [call.result(DEADLINE_S).rank for call in (others[0], failed, others[1])]
    assert after == before
    assert [handler.round() for handler in handlers] == [1, 1, 1]
    assert handlers[1].num_nodes_waiting() == 0


def test_a_standby_waits_until_it_is_needed(job: Callable[..., handler_nodes.Nodes]) -> None:
    """The surplus stands by without a sign to the others, and takes the place of one that left."""
    nodes = job(2, 3)
    handlers = [nodes.add(host=number == 0) for number in range(2)]
    infos = nodes.join(*handlers)
    spare = nodes.add()
    waiting = nodes.call(spare.next_rendezvous)
    until(lambda: handlers[0].get_standby_node_addrs() == ["127.0.0.4"])
    assert handlers[0].num_nodes_waiting() == 0
    assert len(handlers[1].get_active_node_addrs()) == 2
    assert handlers[1].get_active_ranks() == [0, 1]

    def unfit() -> None:
        raise UnhealthyNodeException("a fan is loud")

    handlers[1].set_node_check(unfit)
    with pytest.raises(UnhealthyNodeException, match="a fan"):
        handlers[1].next_rendezvous()
    again = nodes.call(handlers[0].next_rendezvous)
    assert {waiting.result(DEADLINE_S).rank, again.result(DEADLINE_S).rank} == {0, 1}
    assert again.result().rank == infos[0].rank
    assert set(handlers[0].get_active_node_addrs()) == {"127.0.0.2", "127.0.0.4"}


def test_who_missed_a_round_learns_of_it(job: Callable[..., handler_nodes.Nodes]) -> None:
    """A round that closed with a spare before a slow node looked: the node leaves its old round."""
    nodes = job(2, 3)
    slow, failed = (nodes.add(host=number == 0) for number in range(2))
    nodes.join(slow, failed)
    spare = nodes.add()
    waiting = nodes.call(spare.next_rendezvous)
    until(lambda: len(failed.get_standby_node_addrs()) == 1)
    again = nodes.call(failed.next_rendezvous)
    assert {again.result(DEADLINE_S).world_size, waiting.result(DEADLINE_S).world_size} == {2}
    until(lambda: slow.round() == 1)
    assert slow.num_nodes_waiting() >= 1
    stands_by = nodes.call(slow.next_rendezvous)
    until(lambda: len(failed.get_standby_node_addrs()) == 1)
    assert slow.num_nodes_waiting() == 0
    failed.shutdown()
    with pytest.raises(RendezvousGracefulExitError):
        stands_by.result(DEADLINE_S)


def test_an_unfit_node_does_not_join(
    job: Callable[..., handler_nodes.Nodes], tmp_path: Path
) -> None:
    """The checks that the settings ask for are made before a node joins; the job goes on."""
    nodes = job(1, 2)
    missing = str(tmp_path / "missing")
    unfit = nodes.add(storage_healthcheck_paths=[missing])
    works = nodes.add(host=True, storage_healthcheck_paths=str(tmp_path))
    with pytest.raises(UnhealthyNodeException, match="missing"):
        unfit.next_rendezvous()
    assert [info.rank for info in nodes.join(works)] == [0]


def test_a_node_that_left_ends_alone(job: Callable[..., handler_nodes.Nodes]) -> None:
    """An excluded node's shutdown lets the job go on, and it cannot come back."""
    nodes = job(1, 2)
    works = nodes.add(host=True)
    nodes.join(works)
    excluded = nodes.add()
    request = WorkloadControlRequest(WorkloadAction.ExcludeThisNode, "link errors")
    agent = Agent([(3, request)])
    excluded.set_agent(agent)
    with pytest.raises(UnhealthyNodeException, match="rank 3: link errors"):
        excluded.next_rendezvous()
    with pytest.raises(RendezvousClosedError, match="has left"):
        excluded.next_rendezvous()
    assert excluded.shutdown()
    assert not works.is_closed()


class Agent:
    """An agent whose ranks have asked for something."""

    def __init__(self, requests: list[object]) -> None:
        self._asked = requests

    def fetch_control_requests(self) -> list[object]:
        asked, self._asked = self._asked, []
        return asked


def test_an_agent_of_any_kind_may_be_set(job: Callable[..., handler_nodes.Nodes]) -> None:
    """An agent without requests of ranks, whatever it is made of, keeps no node from joining."""
    nodes = job(1, 1)
    works = nodes.add(host=True)
    for agent in (None, SimpleNamespace(), SimpleNamespace(fetch_control_requests=list)):
        works.set_agent(agent)
        works.handle_control_requests_from_rank()
    nodes.join(works)


def test_a_rank_may_shut_the_workload_down(job: Callable[..., handler_nodes.Nodes]) -> None:
    """A request to shut down closes the rendezvous for all, with the rank's words."""
    nodes = job(2, 2)
    handlers = [nodes.add(host=number == 0) for number in range(2)]
    nodes.join(*handlers)
    agent = Agent([(1, WorkloadControlRequest(WorkloadAction.ShutdownWorkload, "enough"))])
    handlers[1].set_agent(agent)
    with pytest.raises(RendezvousClosedError, match="enough"):
        handlers[1].next_rendezvous()
    with pytest.raises(RendezvousClosedError, match="enough"):
        handlers[0].next_rendezvous()
    assert handlers[0].is_shutdown_due_to_failure()


@pytest.mark.parametrize(
    ("reason", "raised", "no_restart"),
    [
        ("graceful", RendezvousGracefulExitError, None),
        ("failure", RendezvousClosedError, None),
        ("no_progress", RendezvousClosedError, "no_progress"),
        ("attribution_stop", RendezvousClosedError, "attribution_stop"),
    ],
)
def test_the_end_reaches_everybody(
    job: Callable[..., handler_nodes.Nodes],
    reason: str,
    raised: type[Exception],
    no_restart: str | None,
) -> None:
    """A standby learns how the job ended; the first reason stays."""
    nodes = job(1, 2)
    works = nodes.add(host=True)
    nodes.join(works)
    spare = nodes.add()
    waiting = nodes.call(spare.next_rendezvous)
    until(lambda: works.get_standby_node_addrs() != [])
    if no_restart:
        works.signal_no_restart(reason)
        assert works.is_closed()
    ended = nodes.call(lambda: works.shutdown(reason))
    with pytest.raises(raised, match=reason):
        waiting.result(DEADLINE_S)
    assert spare.is_closed()
    assert spare.shutdown("failure")
    assert ended.result(DEADLINE_S) is True
    assert spare.get_shutdown_reason() == reason
    assert spare.no_restart_reason() == no_restart
    assert spare.attribution_stop_requested() is (reason == "attribution_stop")
    assert spare.is_shutdown_due_to_failure() is (reason == "failure")


def test_who_comes_after_the_end_just_goes(job: Callable[..., handler_nodes.Nodes]) -> None:
    """A node that finds the job over is told at once, and no thread of it waits on."""
    nodes = job(1, 2)
    works = nodes.add(host=True)
    nodes.join(works)
    ended = nodes.call(works.shutdown)
    until(works.is_closed)
    before = set(threading.enumerate())
    late = nodes.add()
    with pytest.raises(RendezvousGracefulExitError):
        nodes.join(late)
    assert late.shutdown()
    names = {thread.name for thread in set(threading.enumerate()) - before}
    assert not {name for name in names if name.startswith("nvrx-")}
    assert ended.result(DEADLINE_S)


def test_who_has_worked_learns_that_the_job_is_closed(
    job: Callable[..., handler_nodes.Nodes],
) -> None:
    """A node that had work and wants to go on must not take the others' end for its own success."""
    nodes = job(2, 2)
    handlers = [nodes.add(host=number == 0) for number in range(2)]
    nodes.join(*handlers)
    assert handlers[0].get_shutdown_reason() is None
    handlers[0].set_closed()
    assert handlers[0].is_closed()
    until(handlers[1].is_closed)
    with pytest.raises(RendezvousClosedError):
        handlers[1].next_rendezvous()
    assert handlers[0].shutdown_due_to_failure()
    assert handlers[0].get_shutdown_reason() == "graceful"


def test_a_round_that_does_not_close_times_out(job: Callable[..., handler_nodes.Nodes]) -> None:
    """A node alone in a round of two gives up after the join timeout, and is not counted then."""
    nodes = job(2, 2)
    alone = nodes.add(host=True, join_timeout=0.5)
    with pytest.raises(RendezvousTimeoutError, match="did not close within"):
        alone.next_rendezvous()


def test_a_job_without_a_store_host_times_out(job: Callable[..., handler_nodes.Nodes]) -> None:
    """Where nobody decides, the error says who must."""
    nodes = job(1, 1)
    alone = nodes.add(join_timeout=0.5)
    with pytest.raises(RendezvousTimeoutError, match="is_store_host"):
        alone.next_rendezvous()
    assert alone.shutdown() is False


def test_a_lost_store_is_an_error_and_no_wait() -> None:
    """When the store is gone, whoever waits or asks is told at once."""
    nodes = handler_nodes.Nodes(create_handler, 2, 2)
    handler = nodes.add(host=True)
    waiting = nodes.call(handler.next_rendezvous)
    until(lambda: handler._entry is not None)
    nodes.server = None
    with pytest.raises(RendezvousConnectionError, match="does not answer"):
        waiting.result(DEADLINE_S)
    with pytest.raises(RendezvousConnectionError):
        handler.num_nodes_waiting()
    assert handler.shutdown() is False
    nodes.close()


def test_a_silent_store_stops_a_node_before_it_is_replaced(
    job: Callable[..., handler_nodes.Nodes],
) -> None:
    """A node whose signs of life are not confirmed learns it in its agent's loop, at two leases."""
    nodes = job(1, 1, heartbeat_timeout=1)
    handler = nodes.add(host=True)
    nodes.join(handler)
    threads = handler._client
    blocked, let_go = threading.Event(), threading.Event()

    def block(_session: object) -> None:
        blocked.set()
        let_go.wait(DEADLINE_S)

    threads.submit(block)
    try:
        assert blocked.wait(DEADLINE_S)
        with pytest.raises(RendezvousConnectionError, match="has not answered"):
            until(lambda: handler.num_nodes_waiting() > 0)
    finally:
        let_go.set()


def test_a_lost_node_is_replaced(job: Callable[..., handler_nodes.Nodes]) -> None:
    """When a node gives no sign of life any more, the others are asked into the next round."""
    nodes = job(2, 3, heartbeat_timeout=1, close_timeout=2)
    handlers = [nodes.add(host=number == 0) for number in range(3)]
    calls = [nodes.call(handler.next_rendezvous) for handler in handlers]
    until(lambda: sum(call.done() for call in calls) == 2)
    working = [h for h, call in zip(handlers, calls, strict=True) if call.done()]
    spare = next(call for call in calls if not call.done())
    survivor = (
        next(h for h in working if h is handlers[0]) if handlers[0] in working else working[0]
    )
    lost = next(h for h in working if h is not survivor)
    # Its process is gone: no lease any more.
    lost._client.close(DEADLINE_S)
    until(survivor.is_next_round_open)
    again = nodes.call(survivor.next_rendezvous)
    assert {again.result(DEADLINE_S).world_size, spare.result(DEADLINE_S).world_size} == {2}


def test_different_settings_are_told_by_name(job: Callable[..., handler_nodes.Nodes]) -> None:
    """Nodes that were started for different jobs do not train together; the error says why."""
    nodes = job(2, 2)
    one, other = nodes.add(host=True), nodes.add(last_call_timeout=7)
    calls = [nodes.call(handler.next_rendezvous) for handler in (one, other)]
    with pytest.raises(
        (RendezvousClosedError, RendezvousConnectionError), match="last_call_timeout"
    ):
        calls[1].result(DEADLINE_S)


def test_one_of_several_hosts_decides(job: Callable[..., handler_nodes.Nodes]) -> None:
    """`is_store_host` on every node is a mistake that does no harm."""
    nodes = job(3, 3)
    infos = nodes.join(*[nodes.add(host=True) for _ in range(3)])
    assert sorted(info.rank for info in infos) == [0, 1, 2]


def test_what_a_barrier_does_not_offer(job: Callable[..., handler_nodes.Nodes]) -> None:
    """The older rendezvous' calls are refused, and impossible reasons and times, too."""
    handler = job(1, 1).add(host=True)
    assert isinstance(handler, FtRendezvousBarrierHandler)
    for call in (handler.remove_this_node, handler.num_nodes):
        with pytest.raises(NotImplementedError):
            call()
    with pytest.raises(ValueError, match="'done'"):
        handler.shutdown("done")
    with pytest.raises(ValueError, match="'graceful'"):
        handler.signal_no_restart("graceful")
    assert handler.settings.timeout.last_call == dt.timedelta(0)
    assert handler.settings.nproc_per_node == 1
    handler.set_worker_group(object())
    handler.shutdown_cycle_info_reporter()


def test_functions_cannot_share_a_local_rank(job: Callable[..., handler_nodes.Nodes]) -> None:
    """Under torch's agent a function finds its monitor by its local rank."""
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs

    from nvidia_resiliency_ext.fault_tolerance.config import FaultToleranceConfig
    from nvidia_resiliency_ext.fault_tolerance.launcher import LocalElasticAgent

    handler = job(1, 1).add(host=True)
    spec = WorkerSpec(role="r", local_world_size=2, rdzv_handler=handler, entrypoint=print)
    # An older torch has no such field.
    vars(spec)["virtual_local_rank"] = True
    with pytest.raises(ValueError, match="virtual_local_rank"):
        LocalElasticAgent(spec, FaultToleranceConfig(), DefaultLogsSpecs())


def test_files_about_cycles_are_kept_by_the_store_host(
    job: Callable[..., handler_nodes.Nodes], tmp_path: Path
) -> None:
    """The node that decides the rounds writes them; the others have nothing to finish."""
    nodes = job(2, 2)
    host = nodes.add(host=True, cycle_info_dir=str(tmp_path / "host"))
    other = nodes.add(cycle_info_dir=str(tmp_path / "other"))
    nodes.join(host, other)
    path = tmp_path / "host" / "cycle_info..0.0"
    deadline = time.monotonic() + 20
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    for handler in (host, other):
        handler.shutdown_cycle_info_reporter()
        assert not handler.attribution_stop_requested()
    reported = json.loads(path.read_text())
    assert reported["active_ranks"] == "0-1"
    assert reported["cycle_end_time"]
    assert not (tmp_path / "other").exists()


def test_times_have_defaults_and_bounds() -> None:
    """600, 1, 30 and 5 seconds unless given; only the last call may be zero."""
    timeout = RendezvousTimeout()
    times = (timeout.join, timeout.last_call, timeout.close, timeout.heartbeat)
    assert [time.total_seconds() for time in times] == [600, 1, 30, 5]
    zero = dt.timedelta(0)
    assert RendezvousTimeout(last_call=zero).last_call == zero
    for name in ("join", "close", "heartbeat"):
        with pytest.raises(ValueError, match=name):
            RendezvousTimeout(**{name: zero})
    with pytest.raises(ValueError, match="last_call"):
        RendezvousTimeout(last_call=-dt.timedelta(seconds=1))


def test_values_for_tools_go_there_and_back() -> None:
    """The records that tools read are JSON of a closed set of fields."""
    info = RendezvousParticipantInfo("node1", 42, 0, 7, "d", "3")
    assert RendezvousParticipantInfo.unpack(info.pack()) == info
    value = RendezvousStoreValue(3, {"rank": 1})
    assert RendezvousStoreValue.unpack(value.pack()) == value
    assert GroupRankStatus.UNASSIGNED.value == -1
    for text in ("[]", "no", '{"other": 1}'):
        with pytest.raises(ValueError, match="not a Rendezvous"):
            RendezvousStoreValue.unpack(text)
