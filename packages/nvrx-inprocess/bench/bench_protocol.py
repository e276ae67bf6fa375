# SPDX-License-Identifier: Apache-2.0
"""What a restart says through a real TCPStore, and how long barriers and decisions take.

The store is hosted by a store server process. Ranks are simulated by a few threads with a
connection each; bytes are those of the kernel's TCP counters, torch's own framing included.

    python packages/nvrx-inprocess/bench/bench_protocol.py [--ranks 8,64,256,1024] [--repeats 5]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import statistics
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

from nvidia_resiliency_ext.inprocess._protocol.decision import Arrival
from nvidia_resiliency_ext.inprocess._protocol.iteration_store import IterationStore
from nvidia_resiliency_ext.inprocess._store.access import StoreAccess
from nvidia_resiliency_ext.inprocess._store.endpoint import Endpoint, iteration_keys
from nvidia_resiliency_ext.inprocess._store_server import host_store
from nvidia_resiliency_ext.inprocess.attribution import Interruption, InterruptionRecord
from nvidia_resiliency_ext.inprocess.store import BarrierTimeout, TCPStore

_THREADS = 4
_WATCHERS = 16
# tcpi_bytes_acked and tcpi_bytes_received of struct tcp_info.
_TCP_INFO_BYTES = 136
_COUNTERS = struct.Struct("@120xQQ")
_TIMEOUT = timedelta(seconds=60)


def traffic(store: TCPStore) -> int:
    """Return the bytes that a client has sent and received."""
    descriptor = int(repr(store).partition("fd=")[2].partition(",")[0])
    with socket.socket(fileno=os.dup(descriptor)) as sock:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    sent, received = _COUNTERS.unpack(info)
    return int(sent + received)


class Ranks:
    """Simulated ranks on nodes, driven by a few threads."""

    def __init__(self, endpoint: Endpoint, ranks: int, per_node: int, prefix: str) -> None:
        self.participants = frozenset(range(ranks))
        self.per_node = per_node
        self.stores = [TCPStore.connect(endpoint, _TIMEOUT) for _ in range(_THREADS)]
        self.iteration_stores = [IterationStore(store, prefix) for store in self.stores]

    def each(
        self, work: Callable[[IterationStore, int], object], *, per_node: bool = False
    ) -> float:
        """Call `work` for each rank, or the first of each node; return the seconds it took."""
        step = self.per_node if per_node else 1
        chosen = sorted(self.participants)[::step]

        def run(number: int) -> None:
            for rank in chosen[number::_THREADS]:
                work(self.iteration_stores[number], rank)

        return in_threads(run, _THREADS)

    def operations(self) -> int:
        """Return how often the store was asked."""
        return sum(iteration_store.operations for iteration_store in self.iteration_stores)

    def bytes(self) -> int:
        """Return how much went over the connections."""
        return sum(map(traffic, self.stores))


def in_threads(run: Callable[[int], object], count: int) -> float:
    """Run in threads that begin together; return seconds until the last has ended."""
    interrupter = threading.Barrier(count + 1)
    errors: list[BaseException] = []

    def guarded(number: int) -> None:
        interrupter.wait()
        try:
            run(number)
        except BaseException as error:  # noqa: BLE001 - raised below
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    interrupter.wait()
    began = time.perf_counter()
    for thread in threads:
        thread.join()
    took_s = time.perf_counter() - began
    if errors:
        raise errors[0]
    return took_s


def restart(endpoint: Endpoint, ranks: int, per_node: int, faulty: str, prefix: str) -> Any:
    """Run one restart; return its figures."""
    job = Ranks(endpoint, ranks, per_node, prefix)
    everybody = job.participants
    before = job.bytes()
    decider = IterationStore(TCPStore.connect(endpoint, _TIMEOUT), prefix)

    def report(iteration_store: IterationStore, rank: int) -> None:
        iteration_store.interrupt(0, [InterruptionRecord(rank, Interruption.EXCEPTION)], everybody)

    if faulty == "all":
        job.each(report)
    else:
        report(job.iteration_stores[0], 0)

    def read_events(iteration_store: IterationStore, _: int) -> None:
        assert iteration_store.outcome(0, 10)
        assert (
            iteration_store.wait_all_reported(0, 10.0 if faulty == "all" else 0.001)
            or faulty == "one"
        )
        assert iteration_store.records(0)

    job.each(read_events, per_node=True)

    def arrive(iteration_store: IterationStore, rank: int) -> None:
        # The last to come is somebody else here: the decision's own cost is counted apart.
        if rank != ranks - 1:
            iteration_store.arrive(0, Arrival(rank, rank, ranks, is_out=False), everybody)

    arrivals_s = job.each(arrive)
    counted = job.operations() + 2, job.bytes() - before
    decision_s = decide(endpoint, decider, ranks, prefix)

    began = time.perf_counter()
    assert decider.decision(0, 10)
    read_s = time.perf_counter() - began

    def learn(iteration_store: IterationStore, _: int) -> None:
        assert iteration_store.decision(0, 10)

    nodes = len(everybody) // per_node
    learned = job.operations(), job.bytes()
    job.each(learn, per_node=True)
    operations = counted[0] + job.operations() - learned[0]
    learned_bytes = job.bytes() - learned[1]
    return {
        "operations": operations / ranks,
        "bytes": counted[1] / ranks,
        "decision_bytes": learned_bytes / nodes,
        "decider_operations": decider.operations - 1,
        "arrivals_ms": arrivals_s * 1e3,
        "decision_ms": decision_s * 1e3,
        "read_decision_ms": read_s * 1e3,
    }


def decide(endpoint: Endpoint, decider: IterationStore, ranks: int, prefix: str) -> float:
    """Let the last rank arrive; return the seconds until all who wait know the decision."""
    known: list[float] = []
    ready = threading.Barrier(_WATCHERS + 1)

    def watch(number: int) -> None:  # noqa: ARG001 - all do the same
        access = StoreAccess(TCPStore.connect(endpoint, _TIMEOUT))
        ready.wait()
        # Its reading is left out: here all would read one after the other, under one lock.
        assert access.get(iteration_keys(prefix, 0).decision, 30)
        known.append(time.perf_counter())

    threads = [threading.Thread(target=watch, args=(n,)) for n in range(_WATCHERS)]
    for thread in threads:
        thread.start()
    ready.wait()
    # Until they are blocked in the store; there is no event for that.
    time.sleep(0.05)
    began = time.perf_counter()
    last = Arrival(ranks - 1, ranks - 1, ranks, is_out=False)
    decider.arrive(0, last, frozenset(range(ranks)))
    for thread in threads:
        thread.join()
    return max(known) - began


def barrier(endpoint: Endpoint, ranks: int, kind: str, name: str) -> float:
    """Return the seconds that a barrier of so many ranks takes."""
    stores = [TCPStore.connect(endpoint, _TIMEOUT) for _ in range(_THREADS)]

    def run(number: int) -> None:
        passing = getattr(stores[number], kind)
        mine = range(number, ranks, _THREADS)
        for rank in mine:
            with contextlib.suppress(BarrierTimeout):
                timeout = _TIMEOUT if rank == mine[-1] else timedelta(0)
                passing([rank], name, ranks, timeout)

    return in_threads(run, _THREADS)


def medians(runs: list[dict[str, float]]) -> dict[str, float]:
    """Return the median of each figure."""
    return {name: round(statistics.median(r[name] for r in runs), 3) for name in runs[0]}


def figures(endpoint: Endpoint, counts: list[int], repeats: int) -> Iterator[dict[str, Any]]:
    """Yield one line per figure."""
    unique = iter(range(1 << 30))
    for ranks in counts:
        for per_node in (1, 8):
            for faulty in ("one", "all"):
                runs = [
                    restart(endpoint, ranks, per_node, faulty, f"bench/{next(unique)}/")
                    for _ in range(repeats)
                ]
                case = {"ranks": ranks, "ranks_per_node": per_node, "faulty": faulty}
                yield {"bench": "restart", **case, **medians(runs)}
    for kind in ("barrier", "reentrant_barrier"):
        for ranks in counts:
            times = [
                barrier(endpoint, ranks, kind, f"b{next(unique)}") * 1e3 for _ in range(repeats)
            ]
            yield {
                "bench": kind,
                "ranks": ranks,
                "ms": round(statistics.median(times), 3),
                "min_ms": round(min(times), 3),
                "min_us_per_rank": round(min(times) * 1e3 / ranks, 1),
            }


def main() -> int:
    """Print a JSON line per figure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", default="8,64,256,1024")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    here = Endpoint("127.0.0.1", 0, is_served=False)
    store_server = host_store(here, "bench", TCPStore.connect, is_single_node=True)
    try:
        counts = [int(text) for text in options.ranks.split(",")]
        for line in figures(store_server.endpoint, counts, options.repeats):
            print(json.dumps({**line, "load": os.getloadavg()[0]}), flush=True)
    finally:
        store_server.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
