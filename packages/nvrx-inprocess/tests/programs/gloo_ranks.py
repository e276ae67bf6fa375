# SPDX-License-Identifier: Apache-2.0
"""Real ranks with gloo, of which one does not come to a collective: is everybody unblocked?

One process imports torch and forks the ranks. Each of them prints a line of JSON per round. Between
the rounds the groups are made anew, so a round also shows that the one before has broken nothing.
"""

import gc
import json
import multiprocessing
import os
import selectors
import socket
import sys
import threading
import time
from datetime import timedelta
from multiprocessing import connection
from typing import Any

import torch
import torch.distributed as dist

from nvidia_resiliency_ext.inprocess._unblock import gloo
from nvidia_resiliency_ext.inprocess.abort import AbortTorchDistributed
from nvidia_resiliency_ext.inprocess.state import State

WORLD_SIZE = 4
GLOO_TIMEOUT = timedelta(seconds=120)


class OwnServer:
    """A server of the program's own that looks like gloo's: epoll, a pipe, a listener, TCP."""

    def __init__(self) -> None:
        self.reading, self.writing = os.pipe()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.selector = selectors.EpollSelector()
        self.selector.register(self.reading, selectors.EVENT_READ)
        self.selector.register(self.listener, selectors.EVENT_READ)
        self.client = socket.create_connection(self.listener.getsockname())
        self.thread = threading.Thread(target=self.serve, daemon=True)
        self.thread.start()

    def serve(self) -> None:
        client = None
        while True:
            for key, _ in self.selector.select(0.01):
                if key.fileobj is self.listener:
                    client, _ = self.listener.accept()
                    self.selector.register(client, selectors.EVENT_READ)
                elif key.fileobj == self.reading:
                    return
                elif client is not None:
                    client.sendall(client.recv(100))

    def echoes(self) -> bool:
        self.client.settimeout(10)
        self.client.sendall(b"still there")
        return self.client.recv(100) == b"still there"


class Model:
    """Pins a process group, as DistributedDataParallel does."""

    def __init__(self, group: object) -> None:
        self.group = group


def several_groups(rank: int) -> object:
    groups = [dist.new_group(list(range(WORLD_SIZE))) for _ in range(3)]
    for group in groups:
        dist.all_reduce(torch.ones(1), group=group)
    return groups[1]


def other_interface(rank: int) -> object:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    group = dist.new_group(list(range(WORLD_SIZE)))
    del os.environ["GLOO_SOCKET_IFNAME"]
    dist.all_reduce(torch.ones(1), group=group)
    return group


def the_default(rank: int) -> object:
    return dist.group.WORLD


QUIET = {"several groups": several_groups, "interface": other_interface}
# Nobody is waited for: one collective follows the other, as in training.
BUSY = {f"busy {number}": the_default for number in range(8)}
ROUNDS = BUSY if "busy" in sys.argv else QUIET


def play(rank: int, name: str, store: Any) -> dict[str, object]:
    number = list(ROUNDS).index(name)
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore(str(number), store),
        rank=rank,
        world_size=WORLD_SIZE,
        timeout=GLOO_TIMEOUT,
    )
    total = torch.ones(1)
    dist.all_reduce(total)
    model = Model(ROUNDS[name](rank))
    times: dict[str, float] = {}
    aborted = threading.Event()

    def abort() -> None:
        # All ranks are told at the same moment, when the collective has begun.
        store.add(f"ready{number}", 1)
        while store.add(f"ready{number}", 0) < WORLD_SIZE:
            time.sleep(0.001)
        time.sleep(0.1)
        times["start"] = time.monotonic()
        AbortTorchDistributed()(State(rank, WORLD_SIZE).freeze())
        times["aborted"] = time.monotonic()
        aborted.set()

    thread = threading.Thread(target=abort)
    thread.start()
    error = ""
    try:
        if rank == WORLD_SIZE - 1 and name in QUIET:
            aborted.wait()
            raise RuntimeError("the fault")  # noqa: TRY301 - as the function of a user does
        while True:
            dist.all_reduce(torch.ones(1000), group=model.group)
    # To tell of the failure torch asks for the default group, which may be no more: a ValueError;
    # in torch 2.4 for this one: a TypeError.
    except (RuntimeError, ValueError, TypeError) as caught:
        error = str(caught)
        times["unblocked"] = time.monotonic()
        pinned = caught  # keeps the frames, and with them the model and its group
    thread.join()
    return {
        "rank": rank,
        "round": name,
        "sum": total.item(),
        "error": error[-60:],
        "pins": isinstance(model.group, dist.ProcessGroup) and pinned is not None,
        "abort_s": times["aborted"] - times["start"],
        "unblocked_s": times["unblocked"] - times["start"],
        "initialized": dist.is_initialized(),
    }


def run(rank: int, port: int) -> None:
    # The store that the ranks keep: the abort must leave it alone.
    store = dist.TCPStore("127.0.0.1", port, WORLD_SIZE, rank == 0, timedelta(seconds=30))
    os.environ["RANK"] = str(rank)
    server = OwnServer()
    for name in ROUNDS:
        result = play(rank, name, store)
        result["server"] = server.echoes()
        result["store"] = store.add("alive", 1) > 0
        os.write(1, json.dumps(result).encode() + b"\n")  # whole, beside the others' lines
        gc.collect()  # the group was pinned by a cycle
    # The one that hosts the store goes last.
    store.add("done", 1)
    while rank == 0 and store.add("done", 0) < WORLD_SIZE:
        time.sleep(0.01)
    os.write(server.writing, b"x")
    server.thread.join()
    os._exit(0)


def main() -> None:
    if "unnamed" in sys.argv:
        # As with versions of gloo whose threads have no name.
        gloo._LOOP_NAMES = frozenset({"no such name"})
    context = multiprocessing.get_context("fork")
    port = int(sys.argv[1])
    ranks = [context.Process(target=run, args=(rank, port)) for rank in range(WORLD_SIZE)]
    for each in ranks:
        each.start()
    running = {each.sentinel: each for each in ranks}
    while running:
        for sentinel in connection.wait(list(running)):
            if running.pop(sentinel).exitcode:  # type: ignore[call-overload]
                for each in running.values():  # they would wait for it
                    each.kill()
    sys.exit(max(abs(each.exitcode or 0) for each in ranks))


if __name__ == "__main__":
    main()
