# SPDX-License-Identifier: Apache-2.0
"""Local checkpoints against the machine's own limits, in one run: save, load, 2-way replication.

    python bench_local.py --mb 512 --root /dev/shm/bench-local [--python OTHER_PYTHON]
    python bench_local.py --mb 512 --mbit 1000      two hosts with a link of 1 Gbit/s each way

Prints one JSON line per figure, with the load average. Limits are measured by two processes at the
same time: a plain write that removes the file before, as a save does; a read into fresh memory, as
a load needs it, and into memory that was used before; plain TCP in both directions at once; and
`copy`: TCP in both directions while each end writes its own file and the one that arrives, without
checksums. `write_used` and `copy_used` write over files that are there, as saves do from the third
on. The time of a write that runs beside training counts from the end of the calls. The last line
compares stalls: saves without copies and with them take turns.

With `--mbit` each rank has a network of its own, and the link between them lets no more pass each
way: so it shows what replication makes of a transport that is slower than the processors. That
needs root, `ip`, `tc` and a kernel with network namespaces and `tbf`.
"""

import argparse
import ctypes
import json
import mmap
import multiprocessing
import os
import shutil
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

MIB = 1 << 20
CHUNK = 8 * MIB
WORLD = 2
CLONE_NEWNET = 0x40000000


def emit(**fields: Any) -> None:
    """Print one figure."""
    print(json.dumps({**fields, "load_average": round(os.getloadavg()[0], 1)}), flush=True)


def memory() -> int:
    """Return the memory of this process and its children, pages that are shared counted once."""
    pids, total = [os.getpid()], 0
    while pids:
        pid = pids.pop()
        try:
            for task in os.listdir(f"/proc/{pid}/task"):
                with open(f"/proc/{pid}/task/{task}/children") as file:
                    pids += map(int, file.read().split())
            with open(f"/proc/{pid}/smaps_rollup") as file:
                total += sum(int(x.split()[1]) * 1024 for x in file if x.startswith("Pss:"))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return total


class Peak(threading.Thread):
    """The largest memory while it runs."""

    def __init__(self, base: int) -> None:
        super().__init__(daemon=True)
        self.base, self.peak = base, base
        self.over = threading.Event()
        self.start()

    def run(self) -> None:
        """Look until told to stop."""
        while not self.over.wait(0.05):
            self.peak = max(self.peak, memory())

    def stop(self) -> int:
        """Return how much more there was than at the start."""
        self.over.set()
        self.join()
        return self.peak - self.base


def address(rank: int, options: argparse.Namespace) -> str:
    """Return the address of a rank."""
    return f"10.0.0.{rank + 1}" if options.mbit else "127.0.0.1"


def join(rank: int, options: argparse.Namespace) -> Any:
    """Become a rank."""
    import torch
    import torch.distributed as dist

    os.environ.update(MASTER_ADDR=address(0, options), MASTER_PORT=str(options.port))
    os.environ.update(LOCAL_WORLD_SIZE="1", GLOO_SOCKET_IFNAME="eth0" if options.mbit else "lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=WORLD)
    return torch, dist


def timed(dist: Any, function: Callable[[], None]) -> float:
    """Return how long the slowest rank took."""
    dist.barrier()
    begin = time.perf_counter()
    function()
    dist.barrier()
    return time.perf_counter() - begin


def transport_between(
    rank: int, options: argparse.Namespace, dist: Any, data: Any
) -> Callable[..., None]:
    """Connect both ranks; return what sends the data both ways at once, into a file if named."""
    listener = socket.create_server((address(rank, options), 0))
    ports = [None] * WORLD
    dist.all_gather_object(ports, listener.getsockname()[1])
    out = socket.create_connection((address(1 - rank, options), ports[1 - rank]))
    inward, _ = listener.accept()

    def transport(to: str = os.devnull, mode: str = "wb") -> None:
        def receive() -> None:
            view, left = memoryview(bytearray(MIB)), len(data)
            with open(to, mode, buffering=0) as file:
                while left:
                    count = inward.recv_into(view[: min(left, MIB)])
                    if to != os.devnull:
                        file.write(view[:count])
                    left -= count

        thread = threading.Thread(target=receive)
        thread.start()
        for start in range(0, len(data), CHUNK):
            out.sendall(data[start : start + CHUNK])
        thread.join()

    return transport


def limits(rank: int, options: argparse.Namespace) -> dict[str, float]:
    """Measure plain write, read and TCP on all ranks at once; return seconds."""
    torch, dist = join(rank, options)
    data = torch.rand(options.mb * MIB // 4).view(torch.uint8).numpy()
    target = bytearray(len(data))
    path = os.path.join(options.root, f"limit-{rank}")

    def write(to: str = path) -> None:
        with open(f"{to}.new", "wb", buffering=0) as file:
            file.writelines(data[start : start + CHUNK] for start in range(0, len(data), CHUNK))
            os.fsync(file.fileno())
        os.replace(f"{to}.new", to)

    def write_used(to: str = path) -> None:
        with open(to, "r+b", buffering=0) as file:
            file.writelines(data[start : start + CHUNK] for start in range(0, len(data), CHUNK))
            os.fsync(file.fileno())

    def read_used() -> None:
        read(target)

    def read(into: Any = None) -> None:
        fresh = memoryview(mmap.mmap(-1, len(data)) if into is None else into)
        with open(path, "rb", buffering=0) as file:
            for start in range(0, len(fresh), CHUNK):
                file.readinto(fresh[start : start + CHUNK])

    transport = transport_between(rank, options, dist, data)

    def copy(own: Callable[[], None] = write, mode: str = "wb") -> None:
        thread = threading.Thread(target=own)
        thread.start()
        transport(f"{path}.copy", mode)
        thread.join()

    def copy_used() -> None:
        copy(write_used, "r+b")

    found = {}
    for function in (write, write_used, read, read_used, transport, copy, copy_used):
        function()
        times = [timed(dist, function) for _ in range(options.repeats)]
        found[function.__name__] = statistics.median(times)
    os.unlink(path)
    os.unlink(f"{path}.copy")
    return found


def saves(
    rank: int, options: argparse.Namespace, repl: bool, asynchronous: bool
) -> dict[str, float]:
    """Measure saves and loads; return medians."""
    torch, dist = join(rank, options)
    from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncCallsQueue
    from nvidia_resiliency_ext.checkpointing.local.basic_state_dict import (
        BasicTensorAwareStateDict,
    )
    from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager import (
        LocalCheckpointManager,
    )
    from nvidia_resiliency_ext.checkpointing.local.replication.strategies import (
        CliqueReplicationStrategy,
    )

    each = options.mb * MIB // 4 // 64
    state = {f"layer{i}": torch.rand(each) for i in range(64)}
    strategy = CliqueReplicationStrategy.from_replication_params(1, 2) if repl else None
    manager = LocalCheckpointManager(options.root, repl_strategy=strategy)
    queue = AsyncCallsQueue() if asynchronous else None
    whole, stall = [], []
    base, peak = memory(), None
    last = options.repeats + 4
    for iteration in range(1, last + 1):
        if iteration == last - 1:
            peak = Peak(base)  # looking at memory takes time: these two are not timed
        dist.barrier()
        begin = time.perf_counter()
        request = manager.save(BasicTensorAwareStateDict(state), iteration, is_async=asynchronous)
        if queue is not None:
            queue.schedule_async_request(request)
            stall.append(time.perf_counter() - begin)
            queue.maybe_finalize_async_calls(blocking=True)
        dist.barrier()
        whole.append(time.perf_counter() - begin)
        if hasattr(manager, "wait_for_cleanup"):
            manager.wait_for_cleanup()
        time.sleep(0.2)
    extra = peak.stop() / (options.mb * MIB) if peak else 0.0
    whole, stall = whole[:-2], stall[:-2]
    loads = []
    for _ in range(options.repeats):
        manager = LocalCheckpointManager(options.root, repl_strategy=strategy)
        assert manager.find_latest() == last
        dist.barrier()
        begin = time.perf_counter()
        loaded, _ = manager.load()
        dist.barrier()
        loads.append(time.perf_counter() - begin)
        assert all(torch.equal(loaded.state_dict[name], state[name]) for name in state)
        del loaded
    if queue is not None:
        queue.close()
    middle = statistics.median
    return {
        "save": middle(whole[2:]),
        "first_save": whole[0],
        "stall": middle(stall[2:]) if stall else middle(whole[2:]),
        "load": middle(loads),
        "extra_memory": extra,
    }


def stalls(rank: int, options: argparse.Namespace) -> dict[str, float]:
    """Measure the stall of saves without copies and with them, in turns; return medians."""
    torch, dist = join(rank, options)
    from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncCallsQueue
    from nvidia_resiliency_ext.checkpointing.local.basic_state_dict import (
        BasicTensorAwareStateDict,
    )
    from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager import (
        LocalCheckpointManager,
    )
    from nvidia_resiliency_ext.checkpointing.local.replication.strategies import (
        CliqueReplicationStrategy,
    )

    state = {f"layer{i}": torch.rand(options.mb * MIB // 4 // 64) for i in range(64)}
    strategy = CliqueReplicationStrategy.from_replication_params(1, 2)
    managers = {
        "without": LocalCheckpointManager(options.root, "without"),
        "with": LocalCheckpointManager(options.root, "with", repl_strategy=strategy),
    }
    queue = AsyncCallsQueue()
    found: dict[str, list[float]] = {"without": [], "with": []}
    for iteration in range(1, 3 * options.repeats + 1):
        for name, manager in managers.items():
            dist.barrier()
            begin = time.perf_counter()
            request = manager.save(BasicTensorAwareStateDict(state), iteration, is_async=True)
            queue.schedule_async_request(request)
            called = time.perf_counter()
            for value in state.values():
                value.add_(1e-3)
            found[name].append(called - begin)
            found.setdefault(f"{name}, next update", []).append(time.perf_counter() - called)
            queue.maybe_finalize_async_calls(blocking=True)
            manager.wait_for_cleanup()
    queue.close()
    return {name: statistics.median(times[2:]) for name, times in found.items()}


def _entry(function: Any, rank: int, options: Any, args: Any, connection: Any) -> None:
    if options.mbit:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "no network of its own; is this root?")
        connection.send("alone")
        connection.recv()
    connection.send(function(rank, options, *args))
    os._exit(0)


def link(pids: list[int], options: argparse.Namespace) -> None:
    """Lay a cable between the networks of two processes, which lets so much pass each way."""
    one, two = (f"netns {pid}" for pid in pids)
    subprocess.run(
        f"ip link add eth0 {one} type veth peer name eth0 {two}".split(), check=True, timeout=30
    )
    for rank, pid in enumerate(pids):
        rate = f"rate {options.mbit}mbit burst 256kb latency 50ms"
        for command in (
            "ip link set lo up",
            f"ip addr add {address(rank, options)}/24 dev eth0",
            "ip link set eth0 up",
            f"tc qdisc add dev eth0 root tbf {rate}",
        ):
            inside = ["nsenter", "-t", str(pid), "-n", *command.split()]
            subprocess.run(inside, check=True, timeout=30)


def on_all(function: Any, options: argparse.Namespace, *args: Any) -> dict[str, float]:
    """Run a function on all ranks and return the worst of each figure."""
    shutil.rmtree(options.root, ignore_errors=True)
    os.makedirs(options.root, mode=0o700)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        options.port = probe.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    ends = [context.Pipe() for _ in range(WORLD)]
    ranks = [
        context.Process(target=_entry, args=(function, rank, options, args, ends[rank][1]))
        for rank in range(WORLD)
    ]
    for process in ranks:
        process.start()

    def answers() -> Iterator[Any]:
        for ours, _ in ends:
            if not ours.poll(options.timeout):
                raise SystemExit("a rank gave no answer")
            yield ours.recv()

    if options.mbit:
        list(answers())
        link([process.pid for process in ranks], options)
        for ours, _ in ends:
            ours.send("connected")
    found = list(answers())
    for process in ranks:
        process.join()
    shutil.rmtree(options.root)
    return {name: max(one[name] for one in found) for name in found[0]}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mb", type=int, default=512, help="MiB per rank")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--root", default="/dev/shm/bench-local")  # noqa: S108
    parser.add_argument("--mbit", type=int, help="limit of a link between two hosts, each way")
    parser.add_argument("--timeout", type=float, default=600.0)
    parser.add_argument("--python", help="another interpreter with the same import names")
    options = parser.parse_args()
    if options.python:
        arguments = [a for a in sys.argv if a not in ("--python", options.python)]
        os.execv(options.python, [options.python, *arguments])  # noqa: S606 - the user named it
    gib = options.mb / 1024 * WORLD
    limit = on_all(limits, options)
    for name, seconds in limit.items():
        emit(what=f"limit: {name}", s=round(seconds, 3), gib_per_s=round(gib / seconds, 2))
    for repl in (False, True):
        for asynchronous in (False, True):
            found = on_all(saves, options, repl, asynchronous)
            writing = found["save"] - (found["stall"] if asynchronous else 0)
            emit(
                what="local checkpoint",
                replicas=repl,
                asynchronous=asynchronous,
                mb=options.mb,
                ranks=WORLD,
                **{name: round(value, 3) for name, value in found.items()},
                save_of_limit=round(limit["copy" if repl else "write"] / writing, 2),
                save_of_limit_used=round(limit["copy_used" if repl else "write_used"] / writing, 2),
                load_of_limit=round(limit["read"] / found["load"], 2),
                replication_of_transport=round(limit["transport"] / writing, 2) if repl else None,
            )
    found = on_all(stalls, options)
    emit(
        what="stall in turns",
        **{name: round(value, 4) for name, value in found.items()},
        ratio=round(found["with"] / found["without"], 2),
    )


if __name__ == "__main__":
    main()
