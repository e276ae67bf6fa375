# SPDX-License-Identifier: Apache-2.0
"""A job of several nodes that follows the protocol of iterations, with faults at any operation.

The same nodes run over a store in memory, one operation at a time in a seeded order, and over a
real one, in threads. Whatever happens, all that live must see the same.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from nvidia_resiliency_ext.inprocess._protocol.decision import Arrival, Decision, NodeEntry
from nvidia_resiliency_ext.inprocess._protocol.iteration_store import IterationStore, Outcome
from nvidia_resiliency_ext.inprocess.attribution import Interruption, InterruptionRecord

PREFIX = "nvrx/job/0.0/0/"
WAIT_S = 0.1
MOST_ITERATIONS = 12


class Killed(BaseException):
    """The process of this actor has ended."""


class WrongError(Exception):
    """A rule of the protocol is broken."""


@dataclass
class Rank:
    """A rank, as itself and its node know it."""

    initial: int
    number: int | None
    world_size: int
    alive: bool = True
    iteration: int = 0
    said: list[str] = field(default_factory=list)
    finished: str | None = None

    def arrival(self) -> Arrival:
        return Arrival(self.initial, self.number, self.world_size, is_out=False)

    def record(self, kind: Interruption) -> list[InterruptionRecord]:
        return [InterruptionRecord(self.initial, kind)]


@dataclass
class Node:
    """A node: its ranks and how far it has come."""

    number: int
    ranks: list[Rank]
    iteration: int = 0
    lost: bool = False
    suspected: bool = False
    generation: int = 0
    interrupted: set[int] = field(default_factory=set)
    spoken: set[tuple[int, int]] = field(default_factory=set)

    @property
    def over(self) -> bool:
        return all(rank.finished for rank in self.ranks)


@dataclass
class Actor:
    """One thread of a monitor."""

    name: str
    node: Node
    generation: int
    rng: random.Random

    @property
    def doomed(self) -> bool:
        return self.node.lost or self.node.generation != self.generation


class Runtime(Protocol):
    """How actors run: one operation at a time in memory, or in threads over a real store."""

    def start(self, actor: Actor, work: Callable[[Any], None]) -> None:
        """Run `work` with a store of its own."""

    def park(self, actor: Actor, ready: Callable[[], bool]) -> None:
        """Wait for something local."""


def out(initial: int, *, left: bool) -> Arrival:
    return Arrival(initial, None, None, is_out=left)


class Job:
    """The job, its faults, and what was seen of it."""

    def __init__(self, seed: int, runtime: Runtime) -> None:
        self.rng = random.Random(seed)
        self.seed = seed
        self.runtime = runtime
        world_size = self.rng.randint(2, 8)
        self.faults = self.rng.choice([0, 1, 1, 2, 3, 5])
        self.discards = self.rng.random() < 0.3
        self.eagerness = self.rng.choice([0.05, 0.3, 0.6])
        self.death_rate = self.rng.choice([0.01, 0.03, 0.1])
        ranks = [Rank(i, i, world_size) for i in range(world_size)]
        self.nodes: list[Node] = []
        while ranks:
            size = self.rng.randint(1, len(ranks))
            self.nodes.append(Node(len(self.nodes), ranks[:size]))
            ranks = ranks[size:]
        self.participants = {0: frozenset(range(world_size))}
        self.numbers: dict[int, dict[int, int | None]] = {0: {i: i for i in range(world_size)}}
        self.outcomes: dict[int, Outcome] = {}
        self.decisions: dict[int, Decision] = {}
        self._lock = threading.Lock()

    def start(self) -> None:
        for node in self.nodes:
            self.start_monitor(node)

    def start_monitor(self, node: Node) -> None:
        for name, work in (("commands", self.commands), ("events", self.read_outcomes)):
            rng = random.Random(f"{self.seed} {name} {node.number} {node.generation}")
            actor = Actor(f"{name} {node.number}.{node.generation}", node, node.generation, rng)
            self.runtime.start(
                actor, lambda store, a=actor, w=work: w(a, IterationStore(store, PREFIX))
            )

    @contextlib.contextmanager
    def _noting(self, actor: Actor) -> Iterator[None]:
        """Let an actor note something of its node; in threads its process may just have ended."""
        with self._lock:
            if actor.doomed:
                raise Killed
            yield

    # What happens at each operation.

    def before_operation(self, actor: Actor) -> None:
        """End this actor if its process has ended, and perhaps let something end now."""
        if actor.doomed:
            raise Killed
        if self.faults <= 0 or actor.rng.random() > self.death_rate:
            return
        self.faults -= 1
        node = actor.node
        kind = actor.rng.choice(["rank", "rank", "monitor", "monitor", "node", "suspect"])
        if kind == "rank":
            actor.rng.choice(node.ranks).alive = False
            return
        if kind == "suspect":
            node.suspected = True
            return
        if kind == "monitor" and any(rank.alive and not rank.finished for rank in node.ranks):
            with self._lock:
                node.generation += 1
            self.start_monitor(node)
        else:
            with self._lock:
                node.lost = True
                for rank in node.ranks:
                    rank.alive = False
        raise Killed

    # What a monitor's two threads do.

    def commands(self, actor: Actor, iteration_store: IterationStore) -> None:
        node = actor.node
        processes = {rank.initial: (rank.initial, 1) for rank in node.ranks}
        iteration_store.register_node(NodeEntry(min(processes), processes))
        # It does not know for whom the one before it has spoken.
        node.spoken.clear()
        for rank in node.ranks:
            # Ranks say again what they have said to the monitor before this one.
            for word in list(rank.said) if rank.finished is None else ():
                self.say(rank, word, iteration_store)
        while not node.over:
            actions = self.actions(actor)
            if actions:
                rank, word = actor.rng.choice(actions)
                if word == "speak":
                    self.speak(node, rank, iteration_store)
                else:
                    with self._noting(actor):
                        rank.said.append(word)
                    self.say(rank, word, iteration_store)
            else:
                self.runtime.park(actor, lambda: node.over or bool(self.actions(actor, dry=True)))

    def actions(self, actor: Actor, *, dry: bool = False) -> list[tuple[Rank, str]]:
        node = actor.node
        found = []
        for rank in node.ranks:
            if rank.finished is None and "left" not in rank.said:
                found += self.actions_of(actor, rank, dry=dry)
        return found + [
            (rank, "speak")
            for other in self.nodes
            if (other.lost or other.suspected) and self.spokesman(other) is node
            for rank in other.ranks
            if rank.initial in self.participants.get(node.iteration, ())
            and (node.iteration, rank.initial) not in node.spoken
        ]

    def actions_of(self, actor: Actor, rank: Rank, *, dry: bool) -> list[tuple[Rank, str]]:
        if rank.number is None:
            return [] if rank.said else [(rank, "discarded")]
        if not rank.alive:
            return [] if "ended" in rank.said else [(rank, "ended")]
        if rank.iteration in actor.node.interrupted:
            return [] if "arrived" in rank.said else [(rank, "arrived")]
        if rank.said:
            return []
        if dry:
            return [(rank, "completed")]
        calm = 0.0 if rank.iteration >= MOST_ITERATIONS - 4 else self.eagerness
        word = actor.rng.choices(
            ["failed", "left", "completed"], [calm, calm / 6, 1.0 + rank.iteration]
        )[0]
        return [(rank, word)]

    def spokesman(self, lost: Node) -> Node | None:
        """Return the next node of the ring that lives."""
        count = len(self.nodes)
        ring = [self.nodes[(lost.number + step) % count] for step in range(1, count)]
        return next((node for node in ring if not node.lost and not node.over), None)

    def say(self, rank: Rank, word: str, iteration_store: IterationStore) -> None:
        k, participants = rank.iteration, self.participants[rank.iteration]
        if word == "completed":
            iteration_store.complete(k, rank.arrival())
        elif word == "failed":
            iteration_store.interrupt(k, rank.record(Interruption.EXCEPTION), participants)
        elif word == "arrived":
            iteration_store.arrive(k, rank.arrival(), participants)
        elif word == "ended":
            iteration_store.interrupt(k, rank.record(Interruption.TERMINATED), participants)
            iteration_store.arrive(k, out(rank.initial, left=False), participants)
        elif word == "left":
            iteration_store.interrupt(k, rank.record(Interruption.BASE_EXCEPTION), participants)
            iteration_store.arrive(k, out(rank.initial, left=True), participants)
            rank.finished = rank.finished or "left"
        elif word == "discarded":
            iteration_store.arrive(k, out(rank.initial, left=True), participants)
            rank.finished = rank.finished or "discarded"

    def speak(self, node: Node, rank: Rank, iteration_store: IterationStore) -> None:
        k = node.iteration
        node.spoken.add((k, rank.initial))
        iteration_store.interrupt(k, rank.record(Interruption.UNRESPONSIVE), self.participants[k])
        iteration_store.arrive(k, out(rank.initial, left=False), self.participants[k])

    def read_outcomes(self, actor: Actor, iteration_store: IterationStore) -> None:
        node = actor.node
        while not node.over:
            k = node.iteration
            outcome = iteration_store.outcome(k, WAIT_S)
            if outcome is None:
                iteration_store.look(k, self.participants[k])
                continue
            self.see_outcome(k, outcome)
            if outcome is Outcome.COMPLETED:
                self.end(node)
                return
            if actor.rng.random() < 0.5:
                iteration_store.wait_all_reported(k, WAIT_S)
            iteration_store.records(k)
            node.interrupted.add(k)
            decision = None
            while decision is None:
                if node.over:
                    return
                decision = iteration_store.decision(k, WAIT_S) or iteration_store.look(
                    k, self.participants[k]
                )
            self.see_decision(k, decision)
            with self._noting(actor):
                self.go_on(node, k, decision)
            if k >= 2 and actor.rng.random() < 0.3:
                iteration_store.forget(k - 2)

    def end(self, node: Node) -> None:
        for rank in node.ranks:
            if rank.finished is None:
                if rank.alive and rank.number is not None and "completed" not in rank.said:
                    raise WrongError(f"rank {rank.initial} has not completed, but all have")
                rank.finished = "completed" if rank.alive else "ended"

    def go_on(self, node: Node, k: int, decision: Decision) -> None:
        for rank in node.ranks:
            if rank.finished is None and rank.iteration == k:
                if rank.initial in decision.going_on:
                    rank.number = self.numbers[k + 1][rank.initial]
                    rank.world_size = self.world_size(k + 1)
                    rank.said = []
                    rank.iteration = k + 1
                elif rank.said[-1:] in (["left"], ["discarded"]):
                    rank.finished = rank.said[-1]
                else:
                    rank.finished = "cut off" if rank.alive else "ended"
        node.iteration = k + 1

    # What must be the same for all.

    def see_outcome(self, k: int, outcome: Outcome) -> None:
        if self.outcomes.setdefault(k, outcome) is not outcome:
            raise WrongError(f"iteration {k} has two outcomes")

    def see_decision(self, k: int, decision: Decision) -> None:
        if self.decisions.setdefault(k, decision) != decision:
            raise WrongError(f"iteration {k}: {decision} and {self.decisions[k]}")
        numbers = self.numbers[k]
        for initial in decision.going_on:
            if decision.numbers[initial] != numbers[initial] or initial not in numbers:
                raise WrongError(f"iteration {k}: rank {initial} has another number: {decision}")
        ended = {n for i, n in numbers.items() if n is not None and i not in decision.going_on}
        if decision.going_on and set(decision.terminated) != ended:
            raise WrongError(f"iteration {k}: {ended} have ended, not {decision.terminated}")
        if decision.going_on.union(decision.lost) != set(numbers):
            raise WrongError(f"iteration {k}: somebody is missing in {decision}")
        self.assign(k + 1, decision)

    def assign(self, k: int, decision: Decision) -> None:
        going = sorted(decision.going_on, key=decision.numbers.__getitem__)
        staying = list(going)
        if self.discards and k == 2 and len(going) > 2:
            staying.remove(going[self.seed % len(going)])
        numbers: dict[int, int | None] = dict.fromkeys(going)
        numbers.update({initial: number for number, initial in enumerate(staying)})
        if self.numbers.setdefault(k, numbers) != numbers:
            raise WrongError(f"iteration {k} has two numberings")
        self.participants[k] = decision.going_on

    def world_size(self, k: int) -> int:
        return sum(number is not None for number in self.numbers[k].values())

    def check_end(self) -> None:
        """Everybody has ended, and who lived through it, undisturbed, has completed."""
        completed = [k for k, outcome in self.outcomes.items() if outcome is Outcome.COMPLETED]
        if len(completed) > 1:
            raise WrongError(f"completed in the iterations {completed}")
        for node in self.nodes:
            for rank in node.ranks:
                if node.lost:
                    continue
                if rank.finished is None:
                    raise WrongError(f"rank {rank.initial} never ended")
                if rank.finished == "cut off" and not node.suspected:
                    raise WrongError(f"rank {rank.initial} lives and was left behind")
