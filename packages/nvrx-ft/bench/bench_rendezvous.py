# SPDX-License-Identifier: Apache-2.0
"""How fast do many nodes meet, and what does it cost the store? Simulated nodes, a real TCPStore.

    python bench_rendezvous.py [--nodes 8 64 256 1024 4096] [--repeats 7] [--idle-s 10]

The store and its host run in a process of their own, as in a launcher that serves them. Each node
is a thread with a connection of its own that runs the launcher's steps (`NodeSession`); 256 of them
share a process, and this process is the last node. A restart round is measured after all other
nodes have arrived:

decided_ms the last needed node arrives -> the host has written that the round is closed
close_ms   the last needed node arrives -> it has its place
placed_ms  the last needed node arrives -> every node has its place
known_ms   a node opens a round -> every other node has read that
ops        operations on the store per node and round

All but `decided_ms` contain what the simulation itself costs: all nodes share two cores and a few
interpreters, where in a job each has its own. `--floor` measures that: the same threads wait
for a key and read it, with torch's client alone.

One JSON line per size: medians of the rounds, then the idle job: `idle_ops` per node and second,
CPU of the store host per second, its memory.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

from nvidia_resiliency_ext.fault_tolerance._core.machine import Cause
from nvidia_resiliency_ext.fault_tolerance._rendezvous import endpoint, keys, store
from nvidia_resiliency_ext.fault_tolerance._rendezvous.client import NodeClient, NodeSettings
from nvidia_resiliency_ext.fault_tolerance._rendezvous.coordinator import CoordinatorRules
from nvidia_resiliency_ext.fault_tolerance._rendezvous.coordinator_loop import Coordinator
from nvidia_resiliency_ext.fault_tolerance._rendezvous.log import DecisionLog
from nvidia_resiliency_ext.fault_tolerance._rendezvous.placement import PlacementRules
from nvidia_resiliency_ext.fault_tolerance._rendezvous.records import Arrival, Entry, Kind
from nvidia_resiliency_ext.fault_tolerance._rendezvous.restarts import Budget
from nvidia_resiliency_ext.fault_tolerance._rendezvous.session import (
    NodeSession,
    Opened,
    Over,
    RankAssigned,
)
from nvidia_resiliency_ext.shared_utils.clock import SystemClock
from nvidia_resiliency_ext.shared_utils.store_client import StoreClient

PREFIX = keys.prefix("bench")
SECRET = b"bench"
CAUSE = Cause("exit", "bench")
PER_PROCESS = 256
LIMIT_S = 300.0
LEASE_S = 5.0


def connect(port: int) -> store.JobStore:
    """Connect as launchers do."""
    client = StoreClient("127.0.0.1", port, timedelta(seconds=LIMIT_S))
    return store.JobStore(client, PREFIX, SECRET)


def name(index: int) -> str:
    """Return the identity of a node."""
    return f"10.{index >> 16}.{index >> 8 & 255}.{index & 255}_{1000 + index}_0"


def arrival(index: int, rank: int | None) -> Arrival:
    """Return what a node offers."""
    return Arrival(
        node=name(index),
        addr=name(index).partition("_")[0],
        host=f"node{index:05}",
        nproc=8,
        master_port=29500,
        previous_rank=rank,
    )


def say(**document: object) -> None:
    """Tell the parent."""
    sys.stdout.write(json.dumps(document) + "\n")
    sys.stdout.flush()


# The store host --------------------------------------------------------------------------------


class TimedHost(Coordinator):
    """A host that notes when each decision became valid."""

    def _adopt(self, entry: Entry) -> None:
        self.adopted_at = {**getattr(self, "adopted_at", {}), entry.seq: time.monotonic()}
        super()._adopt(entry)


def run_host(nodes: int) -> None:
    """Serve the store and decide; answer questions about this process."""
    listener = endpoint.claim("127.0.0.1", 0, None)
    assert listener is not None
    port = listener.getsockname()[1]
    server = store.serve(listener, "127.0.0.1", nodes)
    rules = CoordinatorRules(PlacementRules(nodes, nodes), Budget(10**6), lease_s=LEASE_S)
    host = TimedHost(connect(port), rules, me="host", epoch="e", clock=SystemClock())
    threading.Thread(target=host.run, daemon=True).start()
    say(port=port)
    for _ in sys.stdin:
        used = resource.getrusage(resource.RUSAGE_SELF)
        status = Path("/proc/self/status").read_text(encoding="ascii")
        rss_kb = next(line.split()[1] for line in status.splitlines() if line.startswith("VmRSS"))
        say(
            cpu_s=used.ru_utime + used.ru_stime,
            rss_mb=int(rss_kb) / 1024,
            last_at=max(host.adopted_at.values(), default=0.0),
        )
    del server
    os._exit(0)


# Nodes -----------------------------------------------------------------------------------------


class Node(threading.Thread):
    """One node: follows the log, arrives whenever a round is open."""

    def __init__(self, port: int, index: int) -> None:
        super().__init__(daemon=True)
        self.store = connect(port)
        self.index = index
        self.at: dict[int, float] = {}
        self.done: dict[int, float] = {}
        self.ops: dict[int, int] = {}

    def run(self) -> None:
        """Follow the job to its end."""
        session = NodeSession(self.store, name(self.index), f"node{self.index:05}", LIMIT_S)
        seq = session.entry.seq
        session.arrive(arrival(self.index, None))
        log, rank = DecisionLog(self.store), None
        while True:
            entry = log.wait_for(seq + 1, LIMIT_S)
            if entry is None:
                continue
            seq = entry.seq
            self.at[seq] = time.monotonic()
            news = session.take(entry)
            self.done[seq] = time.monotonic()
            if isinstance(news, Over):
                session.send(Kind.GOODBYE)
                return
            if isinstance(news, RankAssigned):
                rank = news.assignment.group_rank
            if isinstance(news, Opened):
                session.arrive(arrival(self.index, rank))
            self.ops[seq] = self.store.operations


def run_nodes(port: int, first: int, count: int) -> None:
    """Be some nodes; answer questions about decisions; renew their leases."""
    threading.stack_size(256 * 1024)
    nodes = [Node(port, index) for index in range(first, first + count)]
    for node in nodes:
        node.start()
    leases = connect(port)

    def renew() -> None:
        pause = threading.Event()
        while True:
            for node in nodes:
                leases.count(keys.lease(name(node.index)), 1)
                pause.wait(LEASE_S / count)

    threading.Thread(target=renew, daemon=True).start()
    say(ready=count)
    for line in sys.stdin:
        seq = int(line)
        deadline = time.monotonic() + LIMIT_S
        while not all(seq in node.ops for node in nodes):
            assert time.monotonic() < deadline
            time.sleep(0.005)
        say(
            at=max(node.at[seq] for node in nodes),
            done=max(node.done[seq] for node in nodes),
            ops=sum(node.ops[seq] for node in nodes),
        )
    os._exit(0)


def run_floor(port: int, first: int, count: int) -> None:
    """Wait for keys and read them, as nodes do, with nothing of ours."""
    threading.stack_size(256 * 1024)
    at: dict[int, dict[int, float]] = {}

    def wait(index: int, client: Any) -> None:
        number = 0
        while True:
            client.wait([f"floor/{number}"], timedelta(seconds=LIMIT_S))
            client.compare_set(f"floor/{number}", "-", "-")
            at.setdefault(number, {})[index] = time.monotonic()
            number += 1

    for index in range(first, first + count):
        client = connect(port)._client  # noqa: SLF001
        threading.Thread(target=wait, args=(index, client), daemon=True).start()
    say(ready=count)
    for line in sys.stdin:
        number = int(line)
        deadline = time.monotonic() + LIMIT_S
        while len(at.get(number, {})) < count:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        say(at=max(at[number].values()))
    os._exit(0)


# The measurement -------------------------------------------------------------------------------


class Child:
    """A process of this script in another part."""

    def __init__(self, *arguments: object) -> None:
        environ = {**os.environ, "RES_OPTIONS": "attempts:1 timeout:1"}
        self._process = subprocess.Popen(
            [sys.executable, __file__, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environ,
        )

    def answer(self) -> dict[str, Any]:
        """Return the next line."""
        assert self._process.stdout is not None
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer

    def ask(self, question: object) -> None:
        """Write a line."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{question}\n")
        self._process.stdin.flush()

    def end(self) -> None:
        """End it."""
        self._process.kill()
        self._process.communicate()


@contextlib.contextmanager
def crew(nodes: int, part: str) -> Iterator[tuple[Child, int, list[Child]]]:
    """Start a store host, and all nodes but the last."""
    host = Child("--part", "host", "--nodes", nodes)
    children: list[Child] = []
    try:
        port = host.answer()["port"]
        for first in range(0, nodes - 1, PER_PROCESS):
            count = min(PER_PROCESS, nodes - 1 - first)
            children.append(Child("--part", part, "--of", port, first, count))
        for child in children:
            child.answer()
        yield host, port, children
    finally:
        for child in (*children, host):
            child.end()


def ask_all(children: list[Child], question: object) -> list[dict[str, Any]]:
    """Return what all say."""
    for child in children:
        child.ask(question)
    return [child.answer() for child in children]


def follow(session: NodeSession, log: DecisionLog, seq: int) -> tuple[int, Any]:
    """Return the next decision's number and what it means to the last node."""
    entry = None
    while entry is None:
        entry = log.wait_for(seq + 1, LIMIT_S)
    return entry.seq, session.take(entry)


def wait_for_others(own: store.JobStore, round_: int, others: int) -> None:
    """Wait until all other nodes have arrived and the store has come to rest."""
    deadline = time.monotonic() + LIMIT_S
    while own.count(keys.arrivals(round_), 0) < others:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    time.sleep(0.2)


def measure(nodes: int, repeats: int, idle_s: float) -> dict[str, Any]:
    """Return the figures of one size."""
    rounds: list[dict[str, float]] = []
    with crew(nodes, "nodes") as (host, port, children):
        own = connect(port)
        session, log = NodeSession(own, name(nodes - 1), "last", LIMIT_S), DecisionLog(own)
        seq = session.entry.seq
        wait_for_others(own, 0, nodes - 1)
        session.arrive(arrival(nodes - 1, None))
        seq, news = follow(session, log, seq)
        before = sum(child["ops"] for child in ask_all(children, seq))
        for round_ in range(1, repeats + 2):
            assert isinstance(news, RankAssigned)
            rank, opened_at = news.assignment.group_rank, time.monotonic()
            session.open_next(round_ - 1, CAUSE)
            seq, _ = follow(session, log, seq)
            known = ask_all(children, seq)
            wait_for_others(own, round_, nodes - 1)
            arrived_at = time.monotonic()
            session.arrive(arrival(nodes - 1, rank))
            seq, news = follow(session, log, seq)
            placed_at = time.monotonic()
            placed = ask_all(children, seq)
            decided_at = ask_all([host], "")[0]["last_at"]
            ops = sum(child["ops"] for child in placed)
            rounds.append(
                {
                    "decided_ms": 1000 * (decided_at - arrived_at),
                    "close_ms": 1000 * (placed_at - arrived_at),
                    "placed_ms": 1000 * (max(c["done"] for c in placed) - arrived_at),
                    "known_ms": 1000 * (max(c["at"] for c in known) - opened_at),
                    "ops": (ops - before) / (nodes - 1),
                }
            )
            before = ops
        # The first is warm-up.
        figures: dict[str, Any] = {
            key: round(statistics.median(one[key] for one in rounds[1:]), 2) for key in rounds[0]
        }
        figures["close_ms_max"] = round(max(one["close_ms"] for one in rounds[1:]), 2)
        if idle_s:
            figures.update(measure_idle(host, idle_s))
    return figures


def measure_idle(host: Child, idle_s: float) -> dict[str, float]:
    """Return what a healthy job costs the store host; leases are renewed meanwhile."""
    host.ask("")
    before = host.answer()
    time.sleep(idle_s)
    host.ask("")
    after = host.answer()
    return {
        "host_cpu_percent": round(100 * (after["cpu_s"] - before["cpu_s"]) / idle_s, 2),
        "host_rss_mb": round(after["rss_mb"], 1),
    }


def measure_idle_operations(idle_s: float) -> float:
    """Return operations per second of a node with its real threads, in a healthy round."""
    with crew(1, "nodes") as (_, port, _children):
        made: list[store.JobStore] = []
        placed = threading.Event()

        def make(_: object) -> store.JobStore:
            made.append(store.connect("127.0.0.1", port, PREFIX, SECRET, LIMIT_S))
            another = made[0].another
            made[0].another = lambda: made.append(another()) or made[1]  # type: ignore[method-assign]
            return made[0]

        threads = NodeClient(
            NodeSettings(arrival=arrival(0, None), lease_s=LEASE_S, connect_timeout_s=LIMIT_S),
            make,
            lambda news: placed.set() if isinstance(news, RankAssigned) else None,
            SystemClock(),
        )
        threads.submit(lambda session: session.arrive(arrival(0, None)))
        assert placed.wait(LIMIT_S)
        before = sum(one.operations for one in made)
        time.sleep(idle_s)
        spent = sum(one.operations for one in made) - before
        threads.close(1.0)
    return round(spent / idle_s, 3)


def measure_floor(nodes: int, repeats: int) -> dict[str, Any]:
    """Return how long the simulation takes to wake all its threads and read one key each."""
    times = []
    with crew(nodes, "floor") as (_, port, children):
        client = connect(port)._client  # noqa: SLF001
        time.sleep(1.0)
        for number in range(repeats + 1):
            began = time.monotonic()
            client.set(f"floor/{number}", "x" * 200)
            times.append(max(c["at"] for c in ask_all(children, number)) - began)
            time.sleep(0.2)
    return {"floor_ms": round(1000 * statistics.median(times[1:]), 2)}


def main() -> None:
    """Measure what the command line asks for."""
    made = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    made.add_argument("--nodes", type=int, nargs="+", default=[8, 64, 256, 1024])
    made.add_argument("--repeats", type=int, default=7)
    made.add_argument("--idle-s", type=float, default=10.0)
    made.add_argument("--floor", action="store_true", help="measure the simulation itself, too")
    made.add_argument("--part", choices=["host", "nodes", "floor"], help=argparse.SUPPRESS)
    made.add_argument("--of", type=int, nargs=3, help=argparse.SUPPRESS)
    options = made.parse_args()
    if options.part == "host":
        run_host(options.nodes[0])
    elif options.part is not None:
        {"nodes": run_nodes, "floor": run_floor}[options.part](*options.of)
    else:
        if options.idle_s:
            print(json.dumps({"idle_ops": measure_idle_operations(3 * options.idle_s)}), flush=True)
        for nodes in options.nodes:
            figures = measure(nodes, options.repeats, options.idle_s)
            if options.floor:
                figures.update(measure_floor(nodes, options.repeats))
            load = round(os.getloadavg()[0], 1)
            print(json.dumps({"nodes": nodes, **figures, "load": load}), flush=True)


if __name__ == "__main__":
    main()
