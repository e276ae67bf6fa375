# SPDX-License-Identifier: Apache-2.0
"""Random schedules of the rendezvous over a real TCPStore, and what must hold in each of them.

    python rendezvous_schedules.py --schedules 1000 [--seed 7] [--at-once 8]

Nodes are threads with the launcher's own session threads; every store call is delayed at random,
before and after. Nodes fail, several at once; open rounds long past; die between any two calls;
come late; stand by; leave; are cut off while they train, for less than their lease or for longer.
A schedule is a function of its seed, as far as threads allow.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import itertools
import logging
import os
import queue
import random
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from nvidia_resiliency_ext.fault_tolerance._core.machine import Cause
from nvidia_resiliency_ext.fault_tolerance._rendezvous import (
    coordinator,
    coordinator_loop,
    endpoint,
    keys,
    store,
)
from nvidia_resiliency_ext.fault_tolerance._rendezvous.client import NodeClient, NodeSettings
from nvidia_resiliency_ext.fault_tolerance._rendezvous.coordinator import CoordinatorRules
from nvidia_resiliency_ext.fault_tolerance._rendezvous.coordinator_loop import Coordinator
from nvidia_resiliency_ext.fault_tolerance._rendezvous.placement import PlacementRules
from nvidia_resiliency_ext.fault_tolerance._rendezvous.records import (
    Arrival,
    Entry,
    Kind,
    Phase,
    encode,
)
from nvidia_resiliency_ext.fault_tolerance._rendezvous.restarts import Budget
from nvidia_resiliency_ext.fault_tolerance._rendezvous.session import (
    Lost,
    NodeSession,
    Opened,
    Over,
    RankAssigned,
    SessionEvent,
    SpareNode,
)
from nvidia_resiliency_ext.shared_utils.clock import SystemClock

LEASE_S = 1.0  # on a busy machine the threads of all nodes wait for one interpreter
LIMIT_S = 90.0
LOOK_AGAIN_S = 0.1
GOODBYE_WAIT_S = 0.5
SECRET = b"schedules"
# torch asks the name service for a name of each peer, and waits for it.
RESOLVER = "attempts:1 timeout:1"


class ScheduleError(AssertionError):
    """Something happened that must never happen."""


class Link:
    """What befalls all connections of a node: it dies, or nothing passes until `cut_until`."""

    def __init__(self) -> None:
        self.is_dead = threading.Event()
        self.cut_until = 0.0


class SlowClient:
    """A client whose calls take longer, at random; it may die between two of them."""

    def __init__(
        self, client: Any, rng: random.Random, lives_for: int | None, link: Link | None
    ) -> None:
        self._client = client
        self._rng = rng
        self._left = lives_for
        self.link = link or Link()

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._client, name)
        return self._slow(value) if callable(value) else value

    def cut(self) -> None:
        """End the connection, as another thread would."""
        self._client.cut()

    def close(self) -> None:
        """End the connection, as a process's end would: it is no operation of the store."""
        self._client.close()

    def _slow(self, call: Any) -> Any:
        def slow(*args: Any) -> Any:
            self._spend()
            answer = call(*args)
            self._pause()
            return answer

        return slow

    def _spend(self) -> None:
        if self._left is not None:
            self._left -= 1
            if self._left <= 0:
                self.link.is_dead.set()
        if self.link.is_dead.is_set():
            raise RuntimeError("this node is dead")
        self._pause()

    def _pause(self) -> None:
        time.sleep(max(0.0, self.link.cut_until - time.monotonic()))
        draw = self._rng.random()
        if draw < 0.6:
            # The delay is what is tested here; nothing is waited for.
            time.sleep(self._rng.uniform(0, 0.002) if draw > 0.05 else self._rng.uniform(0, 0.03))


class SlowStore(store.JobStore):
    """A job's store over slow clients."""

    def __init__(
        self,
        port: int,
        prefix: str,
        rng: random.Random,
        lives_for: int | None,
        link: Link | None = None,
    ) -> None:
        client = store._connect_client("127.0.0.1", port)
        self._slow = SlowClient(client, rng, lives_for, link)
        super().__init__(self._slow, prefix, SECRET)
        self._arguments = (port, prefix, random.Random(rng.random()))

    def another(self) -> store.JobStore:
        """Return a store of a node that dies, and is cut off, as a whole."""
        return SlowStore(*self._arguments, None, self._slow.link)


@dataclass
class Seen:
    """What a schedule did, as all who took part saw it."""

    adopted: list[Entry] = field(default_factory=list)
    placements: dict[int, list[str]] = field(default_factory=dict)
    assigned: list[tuple[str, RankAssigned]] = field(default_factory=list)
    spares: list[tuple[str, int]] = field(default_factory=list)
    taken: dict[str, list[Entry]] = field(default_factory=dict)
    cut_off: set[str] = field(default_factory=set)


class RecordedThreads(NodeClient):
    """Session threads that record which decisions they were told, and when they were cut off."""

    _confirmed_at: float | None = None
    killed_to = -1
    """The last round whose workers the rank monitor has killed: no renewal was confirmed."""

    def __init__(self, record: list[Entry], *args: Any, **kwargs: Any) -> None:
        self._record = record
        super().__init__(*args, **kwargs)

    @property
    def confirmed_at(self) -> float | None:
        return self._confirmed_at

    @confirmed_at.setter
    def confirmed_at(self, sent_at: float | None) -> None:
        # First: who sees the new time must know that it came too late for the workers.
        if not self._may_train():
            self.killed_to = max((entry.round for entry in self._record), default=0)
        self._confirmed_at = sent_at

    def may_train(self, round_: int) -> bool:
        """Whether workers of a round can still run here."""
        return self._may_train() and round_ > self.killed_to

    def _may_train(self) -> bool:
        before = self._confirmed_at
        return before is None or time.monotonic() < before + keys.LEASES_TO_KILL * LEASE_S

    def _take(self, session: NodeSession, entry: Entry) -> None:
        self._record.append(entry)
        super()._take(session, entry)


class RecordedHost(Coordinator):
    """A host that records the decisions as they became valid."""

    seen: Seen

    def _adopt(self, entry: Entry) -> None:
        self.seen.adopted.append(entry)
        super()._adopt(entry)


@dataclass(frozen=True)
class Plan:
    """One node's part in a schedule."""

    name: str
    comes_after_s: float
    lives_for: int | None
    leaves_in_round: int | None


class Node(threading.Thread):
    """A launcher without workers: it joins, fails, opens rounds, ends."""

    def __init__(self, plan: Plan, seed: int, schedule: Schedule) -> None:
        super().__init__(name=plan.name, daemon=True)
        self.plan = plan
        self.rng = random.Random(f"{seed}/{plan.name}")
        self.schedule = schedule
        self.event: queue.Queue[SessionEvent] = queue.Queue()
        self.link = Link()
        self.trains_in: int | None = None
        self.end = ""
        self.problem: BaseException | None = None

    def run(self) -> None:
        try:
            self._run()
        except BaseException as error:  # noqa: BLE001 - evaluated by the schedule
            self.problem = error

    def _run(self) -> None:
        schedule = self.schedule
        time.sleep(self.plan.comes_after_s)
        me = Arrival(node=self.plan.name, addr="", host=self.plan.name)
        self.threads = RecordedThreads(
            schedule.seen.taken.setdefault(self.plan.name, []),
            NodeSettings(arrival=me, lease_s=LEASE_S, connect_timeout_s=LIMIT_S),
            lambda _: SlowStore(
                schedule.port, schedule.prefix, self.rng, self.plan.lives_for, self.link
            ),
            self.event.put,
            SystemClock(),
        )
        try:
            self._join(None)
            while not self.end:
                self._meet(self.event.get(timeout=LIMIT_S))
            if self.end == "over":
                self.threads.submit(lambda session: session.send(Kind.GOODBYE))
        except queue.Empty:
            self.end = "stuck"
        finally:
            self.threads.close(5.0)

    def _join(self, rank: int | None) -> None:
        name = self.plan.name
        arrival = Arrival(node=name, addr=name.split("_")[0], host=name, previous_rank=rank)

        def arrive(session: NodeSession) -> None:
            if session.entry.phase is Phase.OVER:
                self.event.put(Over(session.entry))
            elif not session.arrive(arrival):
                self.event.put(SpareNode(session.entry))

        self.threads.submit(arrive)

    def may_train_beside(self, round_: int) -> bool:
        """Whether workers of an earlier round may run here that nobody has been told to stop."""
        trains_in = self.trains_in
        if trains_in is None or trains_in >= round_ or self.link.is_dead.is_set():
            return False
        if any(e.round > trains_in for e in self.schedule.seen.taken[self.plan.name]):
            return False
        return self.threads.may_train(trains_in)

    def _meet(self, event: SessionEvent) -> None:
        self.trains_in = event.entry.round if isinstance(event, RankAssigned) else None
        if isinstance(event, Over):
            self.end = "over"
        elif isinstance(event, Lost):
            self.end = f"lost: {event.what}"
        elif isinstance(event, Opened):
            self._join(None)
        elif isinstance(event, SpareNode):
            self.schedule.seen.spares.append((self.plan.name, event.entry.round))
        else:
            self.schedule.seen.assigned.append((self.plan.name, event))
            self._train(event)

    def _train(self, assigned: RankAssigned) -> None:
        schedule = self.schedule
        round_, last = assigned.entry.round, schedule.rounds
        if self.plan.leaves_in_round is not None and round_ >= self.plan.leaves_in_round:
            cause = Cause("drained", f"{self.plan.name} leaves")
            self.trains_in = None
            self.threads.submit(lambda session: session.send(Kind.LEFT, cause=cause))
            self.end = "left"
            return
        rank = assigned.assignment.group_rank
        # Rank 0 fails, so another round is opened meanwhile.
        if round_ < last and rank != 0 and self.plan.lives_for is None and schedule.may_cut_off():
            schedule.seen.cut_off.add(self.plan.name)
            self.link.cut_until = time.monotonic() + self.rng.uniform(0.2, 4 * LEASE_S)
            return
        if round_ < last and rank != 0 and self.rng.random() >= 0.4:
            return
        self.trains_in = None
        cause = Cause("exit", f"{self.plan.name} failed in {round_}")
        if round_ >= last and schedule.ends_badly:
            self.threads.submit(lambda session: session.end("failure", cause))
            self.end = "over"
        elif round_ >= last:
            self.threads.submit(lambda session: session.succeeded(round_))
        else:
            time.sleep(self.rng.choice((0, 0, 0.002, 0.02)))
            self.threads.submit(lambda session: session.open_next(round_, cause))
            self._join(rank)
            if self.rng.random() < 0.2:
                # The same again, when the job may be somewhere else.
                self.threads.submit(lambda session: session.open_next(round_, cause))
            if self.rng.random() < 0.2:
                self.threads.submit(lambda session: session.succeeded(round_))


class Schedule:
    """One run, from a seed."""

    def __init__(self, seed: int, port: int) -> None:
        self.seed = seed
        self.port = port
        self.prefix = keys.prefix(f"schedule-{seed}-{random.random()}")
        self.seen = Seen()
        rng = random.Random(seed)
        self.rounds = rng.randint(1, 6)
        self.ends_badly = rng.random() < 0.1
        total = rng.randint(2, 8)
        self.min_nodes = rng.randint(1, total)
        may_go = total - self.min_nodes
        self.plans = []
        for index in range(total):
            goes = index < may_go and rng.random() < 0.6
            dies = goes and rng.random() < 0.7
            self.plans.append(
                Plan(
                    name=f"10.0.0.{index}_{1000 + index}_0",
                    comes_after_s=rng.uniform(0, 0.15) if rng.random() < 0.3 else 0.0,
                    lives_for=rng.randint(2, 60) if dies else None,
                    leaves_in_round=rng.randint(0, 3) if goes and not dies else None,
                )
            )
        rng.shuffle(self.plans)
        stay = sum(plan.lives_for is plan.leaves_in_round is None for plan in self.plans)
        self._cuts = threading.Semaphore(stay - self.min_nodes)

    def may_cut_off(self) -> bool:
        """Whether enough others are left when one more node is cut off; it then counts as one."""
        return self._cuts.acquire(blocking=False)

    def run(self) -> None:
        """Run it.

        Raises:
            ScheduleError: what must hold did not.
        """
        rules = CoordinatorRules(
            PlacementRules(min_nodes=self.min_nodes, max_nodes=len(self.plans)),
            Budget(1000),
            lease_s=LEASE_S,
            last_call_s=0.05,
        )
        rng = random.Random(self.seed + 1)
        clean = SlowStore(self.port, self.prefix, rng, None)
        host = RecordedHost.__new__(RecordedHost)
        host.seen = self.seen
        stop = threading.Event()

        def begins(cycle: int, active: Any, *_more: Any, **_how: Any) -> None:
            names = [candidate.node for candidate in active]
            if self.seen.placements.setdefault(cycle, names) is not names:
                raise ScheduleError(f"round {cycle} was closed twice")
            beside = [node.name for node in nodes if node.may_train_beside(cycle)]
            if beside:
                raise ScheduleError(f"round {cycle} begins while {beside} train on")

        host.__init__(  # type: ignore[misc]
            clean,
            rules,
            me="host",
            epoch="e",
            clock=SystemClock(),
            begins=begins,
            stop=stop,
        )
        nodes = [Node(plan, self.seed, self) for plan in self.plans]
        failed: list[BaseException] = []
        serving = threading.Thread(target=_caught, args=(host.run, failed), daemon=True)
        serving.start()
        ghost = threading.Thread(target=_caught, args=(self._haunt, []), daemon=True)
        for thread in (*nodes, ghost):
            thread.start()
        deadline = time.monotonic() + LIMIT_S
        for thread in (*nodes, serving, ghost):
            thread.join(max(0.0, deadline - time.monotonic()))
        try:
            if failed:
                raise ScheduleError(f"the host failed: {failed[0]!r}")
            self._evaluate(nodes, serving)
        finally:
            stop.set()
            clean.cut()

    def _haunt(self) -> None:
        """Open a round of long ago, as a node does whose process was stopped meanwhile."""
        client = SlowStore(self.port, self.prefix, random.Random(self.seed + 2), None)
        session = NodeSession(client, "10.0.9.9_1_0", "ghost", LIMIT_S)
        log, entry = session._log, session.entry
        rng = random.Random(self.seed + 3)
        stop_at = entry.seq + rng.randint(0, 6)
        while entry.phase is not Phase.OVER and entry.seq < stop_at:
            found = log.wait_for(entry.seq + 1, 2.0)
            if found is None:
                break
            session.take(found)
            entry = found
        time.sleep(rng.uniform(0, 0.3))
        session.open_next(entry.round, Cause("ghost", "from long ago"))
        client.cut()

    def _evaluate(self, nodes: list[Node], serving: threading.Thread) -> None:
        self._check_log()
        for node in nodes:
            self._check_node(node)
        if serving.is_alive():
            raise ScheduleError("the host does not end")
        self._check_assignments()

    def _check_log(self) -> None:
        before = None
        opened = collections.Counter(
            entry.round
            for entry, last in zip(self.seen.adopted, [None, *self.seen.adopted], strict=False)
            if entry.phase is Phase.OPEN and (last is None or entry.follows(last))
        )
        for entry in self.seen.adopted:
            if before is None:
                # The first one is made, not adopted.
                before = dataclasses.replace(entry, seq=0, phase=Phase.OPEN, round=0)
            if entry.seq != before.seq + 1:
                raise ScheduleError(f"decision {entry.seq} came after {before.seq}")
            step = (before.phase, entry.phase, entry.round - before.round)
            if step not in _STEPS and entry.follows(before):
                raise ScheduleError(f"from {before} to {entry}")
            before = entry
        if any(count > 1 for count in opened.values()):
            raise ScheduleError(f"opened more than once: {opened}")
        if before is None or before.phase is not Phase.OVER:
            raise ScheduleError(f"the job did not end: {before}")

    def _check_node(self, node: Node) -> None:
        if node.problem is not None:
            raise ScheduleError(f"{node.name} failed: {node.problem!r}")
        expected = ["over"]
        if node.plan.lives_for is not None or node.name in self.seen.cut_off:
            expected.append("lost")
        if node.plan.leaves_in_round is not None:
            expected.append("left")
        if node.end.split(":")[0] not in expected or node.is_alive():
            raise ScheduleError(f"{node.name} ended with {node.end!r}")
        by_seq = {entry.seq: encode(entry) for entry in self.seen.adopted}
        notified = self.seen.taken.get(node.name, [])
        for entry in notified:
            if by_seq.get(entry.seq) != encode(entry):
                raise ScheduleError(f"{node.name} was told {entry}, which was never decided")
        for one, two in itertools.pairwise(notified):
            if two.seq != one.seq + 1:
                raise ScheduleError(f"{node.name} was told {two.seq} after {one.seq}")

    def _check_assignments(self) -> None:
        closed = {e.round: e for e in self.seen.adopted if e.phase is Phase.CLOSED}
        ranks: dict[tuple[int, int], str] = {}
        for name, one in self.seen.assigned:
            round_, rank = one.assignment.round, one.assignment.group_rank
            assert rank is not None
            entry = closed[round_]
            if self.seen.placements[round_][rank] != name or one.assignment.rank_offset != rank:
                raise ScheduleError(f"{name} took rank {rank} of {self.seen.placements[round_]}")
            if ranks.setdefault((round_, rank), name) != name:
                raise ScheduleError(f"two nodes had rank {rank} in round {round_}")
            if not entry.active == entry.world_size == self.min_nodes:
                raise ScheduleError(f"round {round_}: {entry}")
        mortal = {p.name for p in self.plans if p.lives_for is not None} | self.seen.cut_off
        for round_, names in self.seen.placements.items():
            if len(set(names)) != self.min_nodes:
                raise ScheduleError(f"round {round_} was closed with {names}")
            over = max(closed)
            for rank, name in enumerate(names):
                if (round_, rank) not in ranks and name not in mortal and round_ == over:
                    notified = [e.round for e in self.seen.taken[name] if e.phase is Phase.CLOSED]
                    if round_ in notified:
                        raise ScheduleError(f"{name} does not know of rank {rank} in {round_}")


_STEPS = {
    (Phase.OPEN, Phase.CLOSED, 0),
    (Phase.CLOSED, Phase.OPEN, 1),
    (Phase.OPEN, Phase.OVER, 0),
    (Phase.CLOSED, Phase.OVER, 0),
}


def _caught(function: Any, failed: list[BaseException]) -> None:
    try:
        function()
    except BaseException as error:  # noqa: BLE001 - evaluated by the schedule
        failed.append(error)


def serve() -> tuple[Any, int]:
    """Serve a store for schedules, as a launcher does; return it and its port."""
    listener = endpoint.claim("127.0.0.1", 0, None)
    assert listener is not None
    port = listener.getsockname()[1]
    return store.serve(listener, "127.0.0.1", nodes=64), port


def run_all(seeds: list[int], at_once: int) -> dict[int, str]:
    """Run schedules, several at once; return what went wrong, by seed."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(coordinator, "LOOK_AGAIN_S", LOOK_AGAIN_S))
        stack.enter_context(mock.patch.object(coordinator_loop, "GOODBYE_WAIT_S", GOODBYE_WAIT_S))
        stack.enter_context(mock.patch.dict(os.environ, RES_OPTIONS=RESOLVER))
        log = logging.getLogger("nvrx")
        stack.callback(log.setLevel, log.level)
        log.setLevel(logging.CRITICAL)
        return _run_all(seeds, at_once)


def _run_all(seeds: list[int], at_once: int) -> dict[int, str]:
    server, port = serve()
    wrong: dict[int, str] = {}

    def run(seed: int) -> None:
        try:
            Schedule(seed, port).run()
        except BaseException as error:  # noqa: BLE001 - reported with its seed
            wrong[seed] = f"{type(error).__name__}: {error}"

    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(run, seeds))
    del server
    return wrong


def main() -> int:
    """Run what the command line asks for."""
    made = argparse.ArgumentParser(description="Random schedules of the rendezvous.")
    made.add_argument("--schedules", type=int, default=1000)
    made.add_argument("--seed", type=int, default=0, help="of the first schedule")
    made.add_argument("--at-once", type=int, default=8)
    options = made.parse_args()
    seeds = list(range(options.seed, options.seed + options.schedules))
    began = time.monotonic()
    wrong = run_all(seeds, options.at_once)
    for seed, what in sorted(wrong.items()):
        sys.stdout.write(f"seed {seed}: {what}\n")
    took_s = time.monotonic() - began
    sys.stdout.write(f"{len(seeds)} schedules, {len(wrong)} wrong, {took_s:.1f} s\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
