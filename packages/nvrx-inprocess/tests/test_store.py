# SPDX-License-Identifier: Apache-2.0
"""The wrapper's stores: methods, barriers, what is foreign or lost, and how much is said."""

import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from protocol_schedules import RealRun

from nvidia_resiliency_ext.inprocess import store as stores
from nvidia_resiliency_ext.inprocess._protocol.decision import Arrival, NodeEntry
from nvidia_resiliency_ext.inprocess._protocol.iteration_store import (
    KEPT_OUTCOMES,
    IterationStore,
    Outcome,
)
from nvidia_resiliency_ext.inprocess._store.access import StoreAccess
from nvidia_resiliency_ext.inprocess._store.endpoint import (
    Endpoint,
    ForeignValueError,
    iteration_keys,
)
from nvidia_resiliency_ext.inprocess.attribution import Interruption, InterruptionRecord
from nvidia_resiliency_ext.inprocess.state import Mode, State
from nvidia_resiliency_ext.shared_utils.errors import ConfigError
from nvidia_resiliency_ext.shared_utils.store_client import StoreLostError

# torch asks for the name of each peer; here nobody may answer.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

pytestmark = pytest.mark.slow  # together

SHORT = timedelta(milliseconds=200)
LONG = timedelta(seconds=20)
P = "nvrx/job/0.0/0/"
EXCEPTION, SOFT_TIMEOUT = Interruption.EXCEPTION, Interruption.SOFT_TIMEOUT
FAULT = [InterruptionRecord(0, Interruption.EXCEPTION)]

Make = Callable[[], Any]


class HashStore(stores.StoreMixin, dist.HashStore):  # type: ignore[name-defined,misc]
    """The mixin over a store in memory, for speed."""


@pytest.fixture(autouse=True)
def rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "ERROR")


@pytest.fixture(params=["tcp", "tcp without libuv", "file", "prefix over tcp", "prefix over file"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    """Return what makes a connection to one and the same store."""
    if "file" in request.param:
        first: Any = stores.FileStore(tmp_path / "store", 2)
    else:
        first = stores.TCPStore(
            "127.0.0.1", 0, 1, wait_for_workers=False, use_libuv="without" not in request.param
        )
    if "prefix" in request.param:
        first = stores.PrefixStore(3, first)
    return first.clone  # type: ignore[no-any-return]


@pytest.fixture
def server() -> Any:
    return stores.TCPStore("127.0.0.1", 0, 1, wait_for_workers=False)


def test_compare_set_of_missing_keys_is_the_same_everywhere(make: Make) -> None:
    """Only the expected value "" sets a missing key; any other gives itself and sets nothing."""
    access = StoreAccess(make())
    assert access.swap("a", "x", "y") == "x"
    assert not access.check("a")
    assert access.peek("a") is None
    assert access.swap("a", "", "1") == "1"
    assert access.swap("a", "", "2") == "1"
    assert access.swap("a", "1", "3") == "3"
    assert access.peek("a") == "3"


def test_wait_for_an_outcome_ends_at_once(make: Make) -> None:
    """Outcome and decision wake those who wait for them, whatever torch's server does for swaps."""
    access = StoreAccess(make())
    found: list[str | None] = []
    waiter = StoreAccess(make())
    thread = threading.Thread(target=lambda: found.append(waiter.get("outcome", 180.0)))
    thread.start()
    threading.Event().wait(0.05)  # that it waits by now cannot be seen in every store
    began = time.monotonic()
    assert access.settle("outcome", "one") == "one"
    thread.join()
    assert found == ["one"]
    assert time.monotonic() - began < 90
    assert access.settle("outcome", "other") == "one"
    assert access.get("outcome", 1) == "one"


def test_waits_end_when_their_time_is_over(make: Make) -> None:
    """A wait for a missing key ends without a value; the store's own limit stays as it was."""
    store = make()
    usual = store.timeout
    access = StoreAccess(store)
    began = time.monotonic()
    assert access.get("missing", 0.1) is None
    assert not access.wait("missing", 0.1)
    assert access.get_all(["missing"], 0.1) == [None]
    assert time.monotonic() - began < 60
    assert store.timeout == usual
    access.set("there", "1")
    assert access.get("there", 20.0) == "1"
    assert access.get_all(["there"], 20.0) == ["1"]


def test_a_wait_that_ends_in_vain_is_no_value(server: Any) -> None:
    """Somebody who peeks at a missing key wakes those who wait for it; they do not see a value."""
    found: list[str | None] = []
    iteration_store = IterationStore(server.clone(), P)
    thread = threading.Thread(
        target=lambda: found.append(iteration_store.decision(0, 1.0)), daemon=True
    )  # type: ignore[arg-type]
    thread.start()
    key = iteration_keys(P, 0).decision
    while thread.is_alive():
        StoreAccess(server).peek(key)
        thread.join(0.02)
    assert found == [None]


def test_additions_of_many_threads_all_stand(make: Make) -> None:
    """What several connections append and count at once is all there."""

    def work(number: int) -> None:
        access = StoreAccess(make())
        for step in range(20):
            access.append("list", f"{number}.{step};")
            access.add("count", 1)

    in_threads([lambda number=number: work(number) for number in range(4)])
    access = StoreAccess(make())
    entries = (access.peek("list") or "").split(";")[:-1]
    assert sorted(entries) == sorted(f"{n}.{s}" for n in range(4) for s in range(20))
    assert access.peek("count") == "80"


def test_barrier_is_ours(make: Make) -> None:
    """torch's own method of that name never hides the wrapper's, which counts ranks."""
    store = make()
    with pytest.raises(stores.BarrierTimeout, match=r"group: 1 of 2 ranks .* within 0\.2 s"):
        store.barrier(ranks=[0], group_name="group", rendezvous_count=2, timeout=SHORT)
    store.barrier(ranks=[1], group_name="group", rendezvous_count=2, timeout=SHORT)
    with pytest.raises(stores.BarrierOverflow, match="3 ranks for 2 places"):
        store.barrier(ranks=[2], group_name="group", rendezvous_count=2, timeout=SHORT)


def test_a_rank_counts_once_at_a_reentrant_barrier(make: Make) -> None:
    """Arriving again, or for others, changes nothing; one rank too many is an error."""
    store = make()
    for _ in range(3):
        with pytest.raises(stores.BarrierTimeout):
            store.iteration_barrier([0, 1], 3, timedelta(0))
    assert store.is_rank_at_reentrant_barrier(1, "iteration_barrier")
    assert not store.is_rank_at_reentrant_barrier(2, "iteration_barrier")
    store.iteration_barrier([2], 3, timedelta(0))
    store.iteration_barrier([0], 3, timedelta(0))
    with pytest.raises(stores.BarrierOverflow):
        store.iteration_barrier([7], 3, timedelta(0))


@pytest.mark.parametrize("name", ["initial", "completion", "iteration", "termination"])
def test_barriers_let_all_through_together(name: str, server: Any) -> None:
    """Waiting ranks pass when the last one arrives, whatever the slices of the wait."""
    passed: list[int] = []

    def work(rank: int) -> None:
        barrier = getattr(server.clone(), f"{name}_barrier")
        barrier([rank], 4, timeout=timedelta.max, timeout_chunk=timedelta(milliseconds=50))
        passed.append(rank)

    in_threads([lambda rank=rank: work(rank) for rank in range(4)])
    assert sorted(passed) == [0, 1, 2, 3]


def test_who_only_arrives_costs_two_operations(server: Any) -> None:
    """Without time to wait, the store is asked nothing after the arrival."""
    store = server.clone()
    access = StoreAccess(store)
    store._access = lambda: access
    with pytest.raises(stores.BarrierTimeout):
        store.reentrant_barrier([0], "group", 2, timedelta(0))
    assert access.operations == 2


def test_a_reentrant_barrier_needs_no_last_one(server: Any) -> None:
    """If the rank that counted last ended before it had looked, those who wait look themselves."""
    access = StoreAccess(server.clone())
    key = "inprocess_barrier_prefix:reentrant_barrier:iteration_barrier:arrived"
    waiting = threading.Thread(
        target=server.clone().iteration_barrier, args=([0], 2, LONG, SHORT), daemon=True
    )
    waiting.start()
    access.append(key, "1,")
    waiting.join(15)
    assert not waiting.is_alive()


def test_ranks_and_heartbeats(make: Make) -> None:
    """What ranks say about themselves is read by the others."""
    store = make()
    for rank in range(3):
        store.set_initial_rank(rank, rank + 5)
        store.set_active_rank(rank, rank if rank < 2 else None)
        store.send_heartbeat(rank)
        store.send_state(State(rank, 3, mode=Mode.ACTIVE, fn_exception=ValueError("x")), rank)
        store.send_key(["root", f"host {rank}"], rank)
    assert store.get_initial_ranks(range(3)) == [5, 6, 7]
    assert store.get_all_active_ranks(3) == [0, 1, None]
    assert abs(store.get_heartbeat(1) - time.time()) < 60
    assert len(store.get_all_heartbeats(range(3))) == 3
    assert store.get_states([2, 0]) == [
        State(2, 3, mode=Mode.ACTIVE),
        State(0, 3, mode=Mode.ACTIVE),
    ]
    assert store.get_keys([1]) == [["root", "host 1"]]


def test_records_count_until_they_are_locked(make: Make) -> None:
    """Records written before the lock are read by all, later ones are not."""
    store = make()
    kinds = [Interruption.EXCEPTION, Interruption.TERMINATED]
    records = [InterruptionRecord(rank, kind) for rank, kind in enumerate(kinds)]
    assert store.get_interruption_records() == []
    store.record_interrupted(records[:1])
    store.record_interrupted(records[1:])
    store.lock_interruption_records()
    store.record_interrupted(records[:1])
    store.record_interrupted()
    assert store.get_interruption_records() == records


def test_waits_raise_the_error_of_stores(make: Make) -> None:
    """Expiry is torch's DistStoreError on every store, a value ends the wait."""
    store = make()
    for wait in (store.wait_for_interrupted, store.wait_for_completed):
        with pytest.raises(dist.DistStoreError):
            wait(SHORT)
    store.record_interrupted()
    store.record_completed()
    store.wait_for_interrupted(LONG)
    store.wait_for_completed(LONG)
    store.set_timeout(SHORT)
    with pytest.raises(dist.DistStoreError):
        store.get_states([9])


def test_terminated_ranks_are_a_set(make: Make) -> None:
    """Ranks said to have ended, by whomever and however often, are known once."""
    store = make()
    assert store.get_terminated_ranks() == set()
    store.record_terminated_ranks([3, 11])
    store.record_terminated_ranks([3])
    assert store.get_terminated_ranks() == {3, 11}


FOREIGN: list[tuple[str, Callable[[Any], object]]] = [
    ("initial_rank_0", lambda s: s.get_initial_ranks([0])),
    ("active_rank_0", lambda s: s.get_all_active_ranks(1)),
    ("heartbeat_0", lambda s: s.get_heartbeat(0)),
    ("state_0", lambda s: s.get_states([0])),
    ("key_0", lambda s: s.get_keys([0])),
    ("terminated_ranks", lambda s: s.get_terminated_ranks()),
    ("interruption_records", lambda s: s.get_interruption_records()),
    ("interruption_records_lock", lambda s: s.record_interrupted(FAULT)),
    ("inprocess_barrier_prefix:barrier:b:arrived", lambda s: s.barrier([0], "b", 2, SHORT)),
    (
        "inprocess_barrier_prefix:reentrant_barrier:b:arrived",
        lambda s: s.reentrant_barrier([0], "b", 1, SHORT),
    ),
    (
        "inprocess_barrier_prefix:reentrant_barrier:b:count",
        lambda s: s.reentrant_barrier([0], "b", 1, SHORT),
    ),
]
GARBAGE = ["nonsense", "\u00e9\u00e8", "[" * 3000, '{"rank": 1]']


def test_foreign_values_are_named(make: Make) -> None:
    """Garbage at any key of the mixin gives an error with key and value, on every store."""
    for number, ((key, use), garbage) in enumerate(itertools.product(FOREIGN, GARBAGE)):
        store = stores.PrefixStore(number, make())
        store.set(key, garbage)
        with pytest.raises(ForeignValueError, match="holds at") as caught:
            use(store)
        assert key in caught.value.key


ITERATION_STORE_USES: dict[str, Callable[[IterationStore], object]] = {
    "outcome": lambda b: (b.outcome(0, 20.0), b.interrupt(0, FAULT, frozenset({0, 1}))),
    "completions": lambda b: b.complete(0, Arrival(0, 0, 1, is_out=False)),
    "completed": lambda b: b.complete(0, Arrival(0, 0, 1, is_out=False)),
    "interruption_records": lambda b: b.records(0),
    # The first report counts all of its ranks but one.
    "reported": lambda b: b.interrupt(
        0, [*FAULT, InterruptionRecord(1, EXCEPTION)], frozenset({0, 1, 2})
    ),
    "all_reported": lambda b: b.wait_all_reported(0, 20.0),
    "arrivals": lambda b: b.arrive(0, Arrival(0, 0, 1, is_out=False), frozenset({0})),
    "arrived": lambda b: b.arrive(0, Arrival(0, 0, 1, is_out=False), frozenset({0})),
    "decision": lambda b: b.decision(0, 20.0),
}


def test_foreign_values_of_an_iteration_are_named(make: Make) -> None:
    """Garbage at any key of the protocol is named; other keys still work."""
    for (name, use), garbage in itertools.product(ITERATION_STORE_USES.items(), GARBAGE):
        prefix = f"{P}{name}{GARBAGE.index(garbage)}/"
        iteration_store = IterationStore(make(), prefix)
        key = getattr(iteration_keys(prefix, 0), name)
        other = make()
        other.set(key, garbage)
        other.add("done", 1)  # torch does not wait for what it sets, but for this
        with pytest.raises(ForeignValueError, match=name) as caught:
            use(iteration_store)
        assert caught.value.key == key
        iteration_store.renew_lease(1)
        assert iteration_store.leases([1]) == {1: 1}


def test_foreign_leases_and_nodes_are_named(make: Make) -> None:
    """Garbage where nodes and leases stand is named."""
    store = make()
    iteration_store = IterationStore(make(), P)
    store.set(f"{P}nodes", "garbage")
    store.set(f"{P}lease_4", "garbage")
    store.add("done", 1)  # torch does not wait for what it sets, but for this
    with pytest.raises(ForeignValueError, match="nodes"):
        iteration_store.nodes()
    with pytest.raises(ForeignValueError, match="lease_4"):
        iteration_store.leases([4])
    with pytest.raises(ForeignValueError, match="lease_4"):
        iteration_store.renew_lease(4)


def test_nodes_and_leases(make: Make) -> None:
    """Announced nodes are known with a lease; a node that nobody announced has none."""
    iteration_store = IterationStore(make(), P)
    entries = [NodeEntry(0, {0: (7, 1), 1: (8, 1)}), NodeEntry(2, {2: (9, 1)})]
    for entry in entries:
        iteration_store.register_node(entry)
    iteration_store.renew_lease(2)
    assert iteration_store.nodes() == entries
    assert iteration_store.leases([0, 2]) == {0: 1, 2: 2}
    assert iteration_store.leases([0, 5]) == {0: 1}
    assert iteration_store.leases([]) == {}


def test_look_does_what_was_left_undone(make: Make) -> None:
    """Lists that are whole although nobody counted to the end still lead to their value."""
    iteration_store = IterationStore(make(), P)
    keys = iteration_keys(P, 0)
    participants = frozenset({0, 1})
    iteration_store.interrupt(0, FAULT, participants)
    other = make()
    other.append(keys.arrivals, "0:0:2;1:1:2;")
    other.add("done", 1)  # torch does not wait for what it appends, but for this
    assert iteration_store.decision(0, 0.05) is None
    looked = iteration_store.look(0, participants)
    assert looked is not None
    assert looked.going_on == {0, 1}
    assert looked.records == tuple(FAULT)
    assert iteration_store.decision(0, 20.0) == looked
    other.append(iteration_keys(P, 1).completions, "0:0:2;1:1:2;")
    other.add("done", 1)
    assert iteration_store.look(1, participants) is None
    assert iteration_store.outcome(1, 1) is Outcome.COMPLETED


def test_late_words_change_nothing(make: Make) -> None:
    """After the decision, reports, arrivals and forgetting leave it and the outcome as they are."""
    iteration_store = IterationStore(make(), P)
    participants = frozenset({0, 1})
    for rank in (0, 1):
        iteration_store.interrupt(
            0, [InterruptionRecord(rank, Interruption.EXCEPTION)], participants
        )
        iteration_store.arrive(0, Arrival(rank, rank, 2, is_out=False), participants)
    decided = iteration_store.decision(0, 1)
    assert iteration_store.wait_all_reported(0, 1)
    assert {record.rank for record in iteration_store.records(0)} == {0, 1}
    iteration_store.interrupt(0, [InterruptionRecord(1, Interruption.TERMINATED)], participants)
    iteration_store.arrive(0, Arrival(1, None, None, is_out=False), participants)
    for rank in (0, 1):
        iteration_store.complete(0, Arrival(rank, rank, 2, is_out=False))
    iteration_store.forget(0)
    assert iteration_store.decision(0, 1) == decided
    assert iteration_store.outcome(0, 1) is Outcome.INTERRUPTED


def test_who_has_nothing_to_report_is_not_waited_for(make: Make) -> None:
    """The last call ends when all have reported but a reserve and who has completed."""
    iteration_store = IterationStore(make(), P)
    participants = frozenset(range(4))
    iteration_store.complete(0, Arrival(3, 3, 4, is_out=False))
    iteration_store.complete(0, Arrival(2, 2, 4, is_out=False))
    iteration_store.interrupt(0, [InterruptionRecord(1, Interruption.TERMINATED)], participants)
    assert not iteration_store.wait_all_reported(0, 0.05)
    iteration_store.interrupt(0, [InterruptionRecord(0, Interruption.EXCEPTION)], participants)
    assert iteration_store.wait_all_reported(0, 1)
    assert {record.rank for record in iteration_store.records(0)} == {0, 1}


def test_completion_is_not_undone(make: Make) -> None:
    """A report that comes after the completion is answered with it and leaves no trace."""
    iteration_store = IterationStore(make(), P)
    iteration_store.complete(0, Arrival(0, 0, 1, is_out=False))
    assert iteration_store.interrupt(0, FAULT, frozenset({0})) is Outcome.COMPLETED
    iteration_store.arrive(0, Arrival(0, None, None, is_out=False), frozenset({0}))
    assert iteration_store.decision(0, 0.05) is None
    assert iteration_store.outcome(0, 20.0) is Outcome.COMPLETED


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 100, 20))
def test_schedules_over_a_real_store(first: int, server: Any) -> None:
    """In threads over TCP, with faults at any operation, all see one outcome and one decision."""
    wrong = []
    for seed in range(first, first + 20):

        def connect(prefix: str = str(seed)) -> Any:
            client = dist.TCPStore("127.0.0.1", server.port, wait_for_workers=False)
            return dist.PrefixStore(prefix, client)

        run = RealRun(seed, connect)
        try:
            run.run(timeout_s=120.0)
        except Exception as error:  # noqa: BLE001 - the report of a schedule
            wrong.append((seed, repr(error)))
    assert not wrong


class CountingStore:
    """Counts operations and the bytes of keys and values in both directions."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.operations = 0
        self.bytes = 0

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)
        if name in {"timeout", "set_timeout", "has_extended_api"}:
            return method

        def call(*args: Any) -> Any:
            self.operations += 1
            self.bytes += _size(args)
            found = method(*args)
            self.bytes += _size(found)
            return found

        return call


def _size(value: object) -> int:
    if isinstance(value, (str, bytes)):
        return len(value)
    if isinstance(value, (list, tuple)):
        return sum(map(_size, value))
    return 8


@pytest.mark.parametrize("world_size", [8, 64, 256])
@pytest.mark.parametrize("faulty", ["one", "stuck", "several", "all", "one leaves"])
def test_a_restart_says_little(world_size: int, faulty: str) -> None:
    """With a node per rank, at most 8 operations and 4 KiB per restart, but for who decides."""
    base = dist.HashStore()
    participants = frozenset(range(world_size))
    counting = [CountingStore(base) for _ in participants]
    iteration_stores = [IterationStore(store, P) for store in counting]  # type: ignore[arg-type]
    reporters = {"all": participants, "several": {0, 1, 2, 5}}.get(faulty, {0})
    kinds = {"several": {5: SOFT_TIMEOUT}, "stuck": {0: SOFT_TIMEOUT}}.get(faulty, {})
    for rank in sorted(reporters):
        iteration_stores[rank].interrupt(
            0, [InterruptionRecord(rank, kinds.get(rank, EXCEPTION))], participants
        )
    last_reporter = counting[max(reporters)]
    spared = {id(last_reporter)} if faulty == "all" else set()
    for rank, iteration_store in enumerate(iteration_stores):
        assert iteration_store.outcome(0, 1) is Outcome.INTERRUPTED
        assert iteration_store.wait_all_reported(0, 1 if faulty == "all" else 0.001) is (
            faulty == "all"
        )
        # A rank that left its function with an exception of its own receives no records there.
        if rank in reporters and faulty != "all" and rank not in kinds:
            assert len(iteration_store.first_records(0)) == 1
        else:
            assert len(iteration_store.records(0)) == len(reporters)
    out = {0} if faulty == "one leaves" else set()
    for rank, iteration_store in enumerate(iteration_stores):
        number = None if rank in out else rank
        arrival = Arrival(rank, number, world_size if number is not None else None, rank in out)
        iteration_store.arrive(0, arrival, participants, has_reported=rank in reporters)
    for iteration_store in iteration_stores:
        decision = iteration_store.decision(0, 1)
        assert decision is not None
        assert decision.going_on == participants - out
    spared.add(id(counting[-1]))
    ordinary = [store for store in counting if id(store) not in spared]
    assert max(store.operations for store in ordinary) <= 8
    assert max(store.bytes for store in ordinary) <= 4096
    assert counting[-1].operations <= 16
    assert counting[-1].bytes <= 4096 + 128 * world_size


def test_keys_of_old_iterations_go() -> None:
    """However often there is a restart, the store holds as many keys as after some."""
    base = dist.HashStore()
    participants = frozenset(range(3))
    iteration_stores = [IterationStore(base, P) for _ in participants]
    held = []
    for iteration in range(30):
        for rank, iteration_store in enumerate(iteration_stores):
            iteration_store.interrupt(
                iteration, [InterruptionRecord(rank, EXCEPTION)], participants
            )
        for rank, iteration_store in enumerate(iteration_stores):
            iteration_store.arrive(iteration, Arrival(rank, rank, 3, is_out=False), participants)
        for iteration_store in iteration_stores:
            assert iteration_store.outcome(iteration, 1) is Outcome.INTERRUPTED
            decision = iteration_store.decision(iteration, 1)
            assert decision is not None
            assert len(decision.records) == len(iteration_stores)
        held.append(base.num_keys())
    assert set(held[KEPT_OUTCOMES:]) == {held[KEPT_OUTCOMES]}
    # Of the last iterations it can still be read what became of them.
    assert IterationStore(base, P).decision(30 - KEPT_OUTCOMES, 0.1) == decision
    # A node that was given up, and comes back late, is not one that goes on.
    late = IterationStore(base, P)
    assert late.outcome(3, 0.01) is Outcome.INTERRUPTED
    forgotten = late.decision(3, 0.01)
    assert forgotten is not None
    assert not forgotten.going_on
    assert late.outcome(30, 0.01) is None


def test_the_store_is_taken_as_it_is_found(server: Any) -> None:
    """Rank 0 joins a store that listens on the port already, and hosts one where none does."""
    server.set("k", "v")
    joined = stores.TCPStore("127.0.0.1", server.port, 1, wait_for_workers=False)
    assert joined.get("k") == b"v"
    assert joined.critical_ranks == (0,)
    assert stores.PrefixStore(2, joined).critical_ranks == (0,)


def test_the_environment_names_the_store(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without arguments the store is where MASTER_ADDR and MASTER_PORT say."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(server.port))
    monkeypatch.setenv("RANK", "1")
    stores.TCPStore().set("said", "1")
    assert server.get("said") == b"1"


def test_a_prefix_store_keeps_what_it_stands_on(server: Any) -> None:
    """Keys of an iteration are kept below its number; the store below stays reachable."""
    prefixed = stores.PrefixStore(4, server)
    prefixed.set("k", "v")
    assert prefixed.base_store is server
    assert server.get("_inprocess_4/k") == b"v"
    assert prefixed.clone().get("k") == b"v"


def test_the_store_listens_at_one_address(server: Any) -> None:
    """A store at 127.0.0.1 cannot be reached at another address of the host."""
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", server.port), 5)


SERVER = """
import sys
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def foreign_server() -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Yield a store in another process, and its port."""
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    try:
        yield process, int(process.stdout.readline())
    finally:
        process.kill()
        process.communicate()


OPERATIONS: dict[str, Callable[[IterationStore], object]] = {
    "outcome": lambda b: b.outcome(0, 0.5),
    "interrupt": lambda b: b.interrupt(0, FAULT, frozenset({0, 1})),
    "renew_lease": lambda b: b.renew_lease(0),
    "nodes": lambda b: b.nodes(),
    "leases": lambda b: b.leases([0]),
}


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_store_is_an_error_in_bounded_time(
    end: signal.Signals, foreign_server: tuple[subprocess.Popen[str], int]
) -> None:
    """Every operation of a store whose host is gone, or hangs, is a StoreLostError, soon."""
    process, port = foreign_server
    endpoint = Endpoint("127.0.0.1", port, is_served=True)
    connections = {name: stores.TCPStore.connect(endpoint, LONG) for name in OPERATIONS}
    iteration_stores = {name: IterationStore(store, P) for name, store in connections.items()}
    iteration_stores["leases"].renew_lease(0)
    for store in connections.values():
        store.limit_answers(0.3)
    process.send_signal(end)
    # Its kernel knows at once, but ours hears of it a little later.
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(0.01 if end is signal.SIGSTOP else 10)
    for name, use in OPERATIONS.items():
        began = time.monotonic()
        for _ in range(2):
            with pytest.raises(StoreLostError, match="store does not answer"):
                use(iteration_stores[name])
        assert time.monotonic() - began < 10, name


def test_a_wait_is_not_cut_short(server: Any) -> None:
    """The limit of an answer does not end a wait whose own time is longer."""
    store = server.clone()
    store.limit_answers(1.0)
    began = time.monotonic()
    assert StoreAccess(store).get("missing", 2.5) is None
    assert time.monotonic() - began >= 2.49
    store.set("k", "v")
    assert store.get("k") == b"v"


def test_what_is_no_store_is_an_error() -> None:
    """Connecting to a program that says nothing, or to nobody, ends in time with StoreLostError."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = Endpoint("127.0.0.1", silent.getsockname()[1], is_served=True)
        began = time.monotonic()
        with pytest.raises(StoreLostError, match="no store answers at 127"):
            stores.TCPStore.connect(endpoint, timedelta(seconds=0.2))
        assert time.monotonic() - began < 20
    began = time.monotonic()
    with pytest.raises(StoreLostError, match=r"no store answers at 127.*: nobody listens there"):
        stores.TCPStore.connect(endpoint, timedelta(seconds=0.2))
    assert time.monotonic() - began < 10


def test_torch_that_goes_on_trying_is_left_to_itself(
    server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long torch tries to connect: the caller has an error when its time is up."""
    is_over, has_ended = threading.Event(), threading.Event()

    def try_on(*_: object, **__: object) -> None:
        is_over.wait(180)
        has_ended.set()

    monkeypatch.setattr(stores.TCPStore, "_open", try_on)
    endpoint = Endpoint("127.0.0.1", server.port, is_served=True)
    began = time.monotonic()
    try:
        with pytest.raises(StoreLostError, match=r"not answer as a store does, after 0.1 s"):
            stores.TCPStore.connect(endpoint, timedelta(seconds=0.1))
        assert time.monotonic() - began < 90
    finally:
        is_over.set()
        assert has_ended.wait(60)


def test_without_a_world_size_the_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store of so many ranks cannot be made when nobody says how many; the error says who can."""
    for text in (None, "many"):
        if text is None:
            monkeypatch.delenv("WORLD_SIZE", raising=False)
        else:
            monkeypatch.setenv("WORLD_SIZE", text)
        with pytest.raises(ConfigError, match=r"WORLD_SIZE='.*' in the environment is no"):
            stores.TCPStore("127.0.0.1", 0)


def test_a_port_that_a_connection_has_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where nobody listens, but the port is another program's, the host says so."""
    monkeypatch.setenv("RANK", "0")
    taken = "is taken.*EADDRINUSE.*another port"
    with held_port() as port, pytest.raises(StoreLostError, match=rf"port {port} {taken}"):
        stores.TCPStore("127.0.0.1", port, 1, timedelta(seconds=0.1))


@contextlib.contextmanager
def held_port() -> Iterator[int]:
    """Yield a port from which another program has made a connection."""
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as outgoing,
    ):
        yield outgoing.getsockname()[1]


def test_a_helper_that_waits_holds_nobody_up(server: Any) -> None:
    """A clone has a connection of its own: another thread's wait in the store does not delay it."""
    waiting, other = server.clone(), server.clone()
    thread = threading.Thread(target=StoreAccess(waiting).wait, args=("awake", 180.0), daemon=True)
    thread.start()
    began = time.monotonic()
    for number in range(50):
        other.set("k", str(number))
    other.set("awake", "1")
    thread.join(90)
    assert not thread.is_alive()
    assert time.monotonic() - began < 90


def test_no_thread_or_descriptor_stays_behind() -> None:
    """A store that is let go takes its threads and sockets along."""
    stores.TCPStore("127.0.0.1", 0, 1, wait_for_workers=False).clone()
    before = len(os.listdir("/proc/self/fd"))
    threads = set(threading.enumerate())  # one of an earlier test may be about to end
    for _ in range(5):
        store = stores.TCPStore("127.0.0.1", 0, 1, wait_for_workers=False)
        store.clone().set("k", "v")
        del store
    assert len(os.listdir("/proc/self/fd")) <= before
    assert set(threading.enumerate()) <= threads


def in_threads(works: list[Callable[[], object]]) -> None:
    """Run all at once; an error of one is the caller's."""
    errors: list[BaseException] = []

    def guarded(work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised below
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for error in itertools.islice(errors, 1):
        raise error
    assert not any(thread.is_alive() for thread in threads)
