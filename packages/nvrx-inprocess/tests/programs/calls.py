# SPDX-License-Identifier: Apache-2.0
"""A rank that makes the wrapped calls it is asked for, one after the other, and says what happened.

Arguments: a directory that all ranks share, and the names of the calls.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime as dt
import gc
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from other_threads import other_threads

from nvidia_resiliency_ext import inprocess
from nvidia_resiliency_ext.inprocess import rank_assignment as ranks
from nvidia_resiliency_ext.inprocess._call import rendezvous
from nvidia_resiliency_ext.inprocess._monitor import client
from nvidia_resiliency_ext.inprocess.monitor_thread import RankShouldRestart
from nvidia_resiliency_ext.shared_utils.store_client import StoreLostError

FOLDER = Path(sys.argv[1])
INITIAL_RANK = int(os.environ["RANK"])
WORLD = int(os.environ["WORLD_SIZE"])
WAIT_S = 100.0
CALLS: dict[str, Callable[[], Any]] = {}
PINNED: list[Any] = []


def seconds(value: float) -> dt.timedelta:
    """Return a time."""
    return dt.timedelta(seconds=value)


QUICK = {"last_call_wait": seconds(0), "store_kwargs": {"port": int(os.environ["MASTER_PORT"]) + 1}}


def call(function: Callable[[], Any]) -> Callable[[], Any]:
    """Make a call known by its name."""
    CALLS[function.__name__] = function
    return function


def meet(mark: str, count: int) -> None:
    """Wait until so many ranks are here."""
    (FOLDER / f"{mark}.{INITIAL_RANK}").touch()
    wait_for_ranks(mark, count)


def wait_for_ranks(mark: str, count: int) -> None:
    """Wait until so many ranks have said that they are here."""
    deadline = time.monotonic() + WAIT_S
    while len(list(FOLDER.glob(f"{mark}.*"))) < count:
        if time.monotonic() > deadline:
            raise RuntimeError(f"nobody else comes to {mark}")
        time.sleep(0.002)


class UncopyableError(Exception):
    """Cannot be copied or pickled."""

    def __init__(self, first: int, second: threading.Lock) -> None:
        super().__init__(first)
        self.second = second


def seen(wrapper: inprocess.CallWrapper) -> dict[str, Any]:
    """Return what a function can see of itself."""
    return {
        "iteration": wrapper.iteration,
        "rank": os.environ["RANK"],
        "world_size": os.environ["WORLD_SIZE"],
    }


def fails_once(error: Callable[[], BaseException], who: Callable[[int], bool]) -> Any:
    """Call a function in which some ranks raise at first, while the others wait."""

    @inprocess.Wrapper(**QUICK)
    def function(wrapper: inprocess.CallWrapper) -> dict[str, Any]:
        mark = f"fails{len(results)}"
        meet(f"{mark}.{wrapper.iteration}", WORLD)
        if wrapper.iteration == 0:
            if who(INITIAL_RANK):
                raise error()
            time.sleep(WAIT_S)
        return seen(wrapper)

    return function(None)  # type: ignore[arg-type]


@call
def returns() -> Any:
    """Return at once."""

    @inprocess.Wrapper(**QUICK)
    def function(value: int, *, wrapper: inprocess.CallWrapper | None = None) -> Any:
        assert wrapper is not None
        return value, seen(wrapper)

    return function(INITIAL_RANK * 10)


@call
def one_raises() -> Any:
    """One of them raises; the others sleep."""
    return fails_once(lambda: RuntimeError("one"), lambda rank: rank == 1)


@call
def all_raise() -> Any:
    """All raise at once, with an exception that cannot be copied."""
    return fails_once(lambda: UncopyableError(1, threading.Lock()), lambda _rank: True)


@call
def asks_for_restart() -> Any:
    """The function itself asks for a restart."""
    return fails_once(lambda: RankShouldRestart("please"), lambda rank: rank == 0)


@call
def reserve() -> Any:
    """Two work until a third is ready to take over; then one raises, and both work again."""
    if INITIAL_RANK == 2:
        threading.Thread(target=tell_when_ready, daemon=True).start()
    assignment = inprocess.Compose(ranks.MaxActiveWorldSize(2), ranks.ShiftRanks())

    @inprocess.Wrapper(rank_assignment=assignment, **QUICK)
    def function(wrapper: inprocess.CallWrapper | None = None) -> Any:
        assert wrapper is not None
        meet(f"reserve{len(results)}.{wrapper.iteration}", 2)
        if wrapper.iteration == 0 and os.environ["RANK"] == "1":
            wait_for_ranks("ready", 1)
            raise RuntimeError("active")
        if wrapper.iteration == 0:
            time.sleep(WAIT_S)
        return seen(wrapper)

    return function(), "torch._dynamo" in sys.modules


def tell_when_ready() -> None:
    """Say so when this rank begins to import what DistributedDataParallel imports late."""
    while "torch._dynamo" not in sys.modules:
        time.sleep(0.01)
    (FOLDER / f"ready.{INITIAL_RANK}").touch()


@call
def hangs() -> Any:
    """One sleeps for longer than the soft timeout, the others return."""

    @inprocess.Wrapper(
        soft_timeout=seconds(1), monitor_process_interval=seconds(0.1),
        monitor_thread_interval=seconds(0.1),
        progress_watchdog_interval=seconds(0.1), **QUICK,
    )  # fmt: skip
    def function(wrapper: inprocess.CallWrapper | None = None) -> Any:
        assert wrapper is not None
        if wrapper.iteration == 0 and INITIAL_RANK == 1:
            time.sleep(WAIT_S)
        return seen(wrapper)

    return function()


def hangs_somewhere(hang: Callable[[], Any], **limits: dt.timedelta) -> Any:
    """Rank 1 hangs at first, and the others wait for it in a collective; say who is blamed."""
    number, reports, hangs = len(results), [], [hang]

    @inprocess.Wrapper(
        monitor_process_interval=seconds(0.1), progress_watchdog_interval=seconds(0.1),
        **limits, **QUICK,
    )  # fmt: skip
    def function(wrapper: inprocess.CallWrapper | None = None) -> Any:
        assert wrapper is not None
        reports[:] = wrapper.restart_reports
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        name = FOLDER / f"hang{number}.{wrapper.iteration}"
        dist.init_process_group("gloo", init_method=f"file://{name}", rank=rank, world_size=size)
        dist.barrier()
        if INITIAL_RANK == 1 and hangs:
            hangs.pop()()
        dist.barrier()
        dist.destroy_process_group()

    function()
    # Who stands still for seconds on a busy host hangs as well.
    return [report.hang for report in reports if report.culprits == (1,)]


def loop_for_ever() -> None:
    """Run bytecode, which stamps, and never come back."""
    while True:
        pass


def keep_the_gil() -> None:
    """Wait in C code for a lock that this thread has already."""
    libc, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
    for _ in range(2):
        libc.pthread_mutex_lock(mutex)


@call
def one_loops() -> Any:
    """Rank 1 runs for ever, which its stamps do not tell; the others pass the soft timeout."""
    return hangs_somewhere(loop_for_ever, soft_timeout=seconds(3))


@call
def one_keeps_the_gil() -> Any:
    """Rank 1 cannot be interrupted, and is killed at the hard timeout."""
    return hangs_somewhere(keep_the_gil, soft_timeout=seconds(3), hard_timeout=seconds(15))


@call
def collective() -> Any:
    """One raises before a collective in which all others wait, with the group in a local name."""

    @inprocess.Wrapper(**QUICK)
    def function(wrapper: inprocess.CallWrapper | None = None) -> Any:
        assert wrapper is not None
        name = FOLDER / f"group{len(results)}.{wrapper.iteration}"
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group("gloo", init_method=f"file://{name}", rank=rank, world_size=size)
        group = dist.new_group(timeout=seconds(WAIT_S))
        dist.barrier(group)
        if wrapper.iteration == 0 and rank == 0:
            raise RuntimeError("before the collective")
        tensor = torch.ones(1)
        dist.all_reduce(tensor, group=group)
        dist.barrier(group)
        dist.destroy_process_group()
        return seen(wrapper), tensor.item()

    return function()


@call
def in_backward() -> Any:
    """Again and again rank 1 raises while rank 0 waits for it in backward, its model at hand."""
    number, restarts = len(results), 20

    @inprocess.Wrapper(soft_timeout=seconds(10), hard_timeout=seconds(15), **QUICK)
    def function(wrapper: inprocess.CallWrapper | None = None) -> Any:
        assert wrapper is not None
        iteration, rank = wrapper.iteration, int(os.environ["RANK"])
        name = FOLDER / f"backward{number}.{iteration}"
        dist.init_process_group("gloo", init_method=f"file://{name}", rank=rank, world_size=2)
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 1, bias=False))
        dist.barrier()
        if iteration < restarts and rank == 1:
            time.sleep(0.02)  # until the other one waits; earlier is no fault
            raise RuntimeError("before backward")
        model(torch.ones(2, 8)).sum().backward()
        return seen(wrapper), gloo_threads()

    return function()


def gloo_threads() -> int:
    """Return how many threads gloo and its groups have in this process."""
    count = 0
    for path in Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            count += "gloo" in path.read_text()
    return count


def in_init(make_group: Callable[[inprocess.CallWrapper, int, int], None]) -> Any:
    """Rank 0 raises while the others wait for it in init_process_group; say how long it took."""
    entered: list[float] = []

    @inprocess.Wrapper(**QUICK)
    def function(wrapper: inprocess.CallWrapper | None = None) -> Any:
        assert wrapper is not None
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        entered.append(time.monotonic())
        if wrapper.iteration == 0 and rank == 0:
            meet(f"init{len(results)}", WORLD)
            time.sleep(0.3)  # until they wait; earlier is no fault
            raise RuntimeError("before the group")
        if wrapper.iteration == 0:
            (FOLDER / f"init{len(results)}.{INITIAL_RANK}").touch()
        make_group(wrapper, rank, size)
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        dist.barrier()
        dist.destroy_process_group()
        return tensor.item()

    total = function()
    return total, len(entered), entered[-1] - entered[0]


@call
def in_init_by_store() -> Any:
    """They wait in a store that the program keeps over iterations."""
    kept: list[Any] = []

    def make_group(wrapper: inprocess.CallWrapper, rank: int, size: int) -> None:
        kept.append(wrapper.store)
        store = dist.PrefixStore(f"group/{wrapper.iteration}", kept[0])
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)

    return in_init(make_group)


@call
def in_init_by_port() -> Any:
    """They wait for rank 0 to host the store of `env://`."""
    return in_init(lambda *_: dist.init_process_group("gloo"))


@call
def in_init_as_host() -> Any:
    """Rank 0 hosts the store of `env://` and waits for rank 1, which raises."""
    number = len(results)

    @inprocess.Wrapper(**QUICK)
    def function(wrapper: inprocess.CallWrapper | None = None) -> Any:
        assert wrapper is not None
        if wrapper.iteration == 0 and INITIAL_RANK == 1:
            meet(f"host{number}", WORLD)
            time.sleep(0.3)
            raise RuntimeError("before the group")
        if wrapper.iteration == 0:
            (FOLDER / f"host{number}.{INITIAL_RANK}").touch()
        start = time.monotonic()
        port = int(os.environ["MASTER_PORT"]) + wrapper.iteration
        os.environ["MASTER_PORT"] = str(port)
        dist.init_process_group("gloo")
        dist.barrier()
        dist.destroy_process_group()
        os.environ["MASTER_PORT"] = str(port - wrapper.iteration)
        return time.monotonic() - start

    return function()


@call
def no_group() -> Any:
    """The groups of the first two iterations cannot be made."""

    @inprocess.Wrapper(**QUICK)
    def function(wrapper: inprocess.CallWrapper | None = None) -> int:
        assert wrapper is not None
        if wrapper.iteration < 2:
            dist.init_process_group("gloo", rank=0, world_size=-2)
        return wrapper.iteration

    return function()


@call
def in_atomic() -> Any:
    """An interruption waits for the end of an atomic block; progress is reported by hand."""

    @inprocess.Wrapper(**QUICK)
    def function(wrapper: inprocess.CallWrapper | None = None) -> Any:
        assert wrapper is not None
        path = FOLDER / f"atomic{len(results)}.{INITIAL_RANK}"
        if wrapper.iteration == 0:
            mark = f"atomics{len(results)}"
            if INITIAL_RANK == 0:
                meet(mark, WORLD)
                raise RuntimeError("while others write")
            with wrapper.atomic():
                meet(mark, WORLD)
                path.write_text("be")
                end = time.monotonic() + 0.3
                while time.monotonic() < end:
                    wrapper.ping()
                path.write_text("begin and end")
            time.sleep(WAIT_S)
        return seen(wrapper), path.read_text() if path.exists() else ""

    return function()


@call
def group_after_abort() -> Any:
    """Two make a group when their abort is over, and one waits in it for the other."""
    number = len(results)
    aborted, is_there = threading.Event(), threading.Event()

    class Late(inprocess.abort.Abort):
        def __call__(self, state: inprocess.FrozenState) -> inprocess.FrozenState:
            aborted.set()
            if INITIAL_RANK > 0:
                is_there.wait(WAIT_S)
                time.sleep(0.3)  # until it waits; earlier is no fault
            return state

    abort = inprocess.Compose(Late(), inprocess.abort.AbortTorchDistributed())

    @inprocess.Wrapper(abort=abort, **QUICK)
    def function(wrapper: inprocess.CallWrapper | None = None) -> Any:
        assert wrapper is not None
        if wrapper.iteration == 0:
            meet(f"late{number}", WORLD)
            if INITIAL_RANK == 0:
                raise RuntimeError("before the group")
            aborted.wait(WAIT_S)
            name, rank = FOLDER / f"latest{number}", INITIAL_RANK - 1
            dist.init_process_group(
                "gloo", init_method=f"file://{name}", rank=rank, world_size=WORLD - 1
            )
            PINNED.append(dist.new_group())
            is_there.set()
            if rank == 0:
                dist.barrier(group=PINNED[-1])
            time.sleep(WAIT_S)
        return seen(wrapper)

    return function()


@call
def gives_up() -> Any:
    """The number of restarts is limited: all leave with the same exception."""
    terminated: list[int] = []

    class Note(inprocess.terminate.Terminate):
        def __call__(self, state: inprocess.FrozenState) -> inprocess.FrozenState:
            terminated.append(state.iteration)
            return state

    @inprocess.Wrapper(
        initialize=inprocess.initialize.RetryController(max_iterations=2), terminate=Note(), **QUICK
    )
    def function() -> None:
        raise RuntimeError("always")

    try:
        function()
    except inprocess.exception.RestartAbort as error:
        return str(error), terminated
    return "no exception", terminated


@call
def losses() -> Any:
    """The last rank is killed, then the first; then another leaves; one returns."""

    @inprocess.Wrapper(**QUICK)
    def function(wrapper: inprocess.CallWrapper | None = None) -> Any:
        assert wrapper is not None
        iteration = wrapper.iteration
        meet(f"losses{len(results)}.{iteration}", WORLD - iteration)
        if (iteration, INITIAL_RANK) in ((0, WORLD - 1), (1, 0)):
            os.kill(os.getpid(), signal.SIGKILL)
        if (iteration, INITIAL_RANK) == (2, 1):
            sys.exit(7)
        if iteration < WORLD - 1:
            time.sleep(WAIT_S)
        reports = wrapper.restart_reports
        return seen(wrapper), [each.terminated for each in reports], sorted(reports[0].seconds)

    return function()


@call
def monitor_killed() -> Any:
    """The monitor of the node is killed: nobody restarts."""

    @inprocess.Wrapper(
        monitor_process_pidfile=str(FOLDER / "monitor{rank}.pid"),
        **{**QUICK, "heartbeat_interval": seconds(0.2)},
    )
    def function(wrapper: inprocess.CallWrapper | None = None) -> Any:
        assert wrapper is not None
        meet(f"before{len(results)}", WORLD)
        path = FOLDER / f"monitor{INITIAL_RANK}.pid"
        before = int(path.read_text())
        if INITIAL_RANK == 0:
            os.kill(before, signal.SIGKILL)
        deadline = time.monotonic() + WAIT_S
        while not path.exists() or path.read_text() in ("", str(before)):
            assert time.monotonic() < deadline, "there is no other monitor"
            time.sleep(0.01)
        meet(f"after{len(results)}", WORLD)
        return seen(wrapper)

    return function()


@call
def forks() -> Any:
    """Children that are forked in the function return from it, or raise: nobody restarts."""
    parent = os.getpid()

    @inprocess.Wrapper(**QUICK)
    def function(wrapper: inprocess.CallWrapper | None = None) -> Any:
        assert wrapper is not None
        children = []
        for number in range(2):
            child = os.fork()
            if child == 0 and number:
                raise RuntimeError("of a child")
            if child == 0:
                return "of a child"
            children.append(child)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        return seen(wrapper), codes

    try:
        value = function()
    except RuntimeError as error:
        value = str(error)
    if os.getpid() != parent:
        os._exit(4 if value == "of a child" else 5)
    return value


@call
def nested() -> Any:
    """A wrapped function calls another one; a restart of the outer one ends the inner one."""

    @inprocess.Wrapper(**QUICK)
    def inner(wrapper: inprocess.CallWrapper | None = None) -> Any:
        assert wrapper is not None
        meet(f"inner{len(results)}.{outer_iteration[-1]}", WORLD)
        if outer_iteration[-1] == 0:
            if INITIAL_RANK == 0:
                raise Leave
            time.sleep(WAIT_S)
        return wrapper.iteration

    @inprocess.Wrapper(**QUICK)
    def outer(wrapper: inprocess.CallWrapper | None = None) -> Any:
        assert wrapper is not None
        outer_iteration.append(wrapper.iteration)
        try:
            return wrapper.iteration, inner()
        except Leave:
            raise RuntimeError("the inner call was left") from None

    class Leave(BaseException):
        """Goes out of the inner call, whose other ranks go on."""

    outer_iteration: list[int] = []
    return outer()


@call
def monitor_gone() -> Any:
    """The last rank finds no monitor any more: it leaves and says so; the others go on."""
    last = INITIAL_RANK == WORLD - 1

    @inprocess.Wrapper(
        monitor_process_pidfile=str(FOLDER / "monitor{rank}.pid"),
        **{**QUICK, "heartbeat_interval": seconds(0.2)},
    )
    def function(wrapper: inprocess.CallWrapper | None = None) -> Any:
        assert wrapper is not None
        meet(f"gone{len(results)}.{wrapper.iteration}", WORLD - wrapper.iteration)
        if wrapper.iteration == 0:
            if last:
                os.kill(int((FOLDER / f"monitor{INITIAL_RANK}.pid").read_text()), signal.SIGKILL)
            time.sleep(WAIT_S)
        return seen(wrapper), wrapper.restart_reports[0].cause

    most, client._MOST_LOSSES = client._MOST_LOSSES, 0 if last else 8
    try:
        return function()
    except inprocess.exception.InternalError as error:
        return str(error)
    finally:
        client._MOST_LOSSES = most


def trained(faults: int) -> list[float]:
    """Train a small model with DDP, with so many faults; return its weights."""
    saved = FOLDER / f"saved{len(results)}.pt"
    steps, every = 4 + 3 * FAULTS, 2

    @inprocess.Wrapper(**QUICK)
    def train(wrapper: inprocess.CallWrapper | None = None) -> list[float]:
        assert wrapper is not None
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        name = FOLDER / f"ddp{len(results)}.{wrapper.iteration}"
        dist.init_process_group("gloo", init_method=f"file://{name}", rank=rank, world_size=size)
        torch.manual_seed(7)
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 1, bias=False))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        step = 0
        if saved.exists():
            state = torch.load(saved, weights_only=True)
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            step = state["step"]
        while step < steps:
            inputs = torch.randn(24, 8, generator=torch.Generator().manual_seed(step))
            mine = inputs[rank::size]
            optimizer.zero_grad()
            loss = (model(mine).sum(dim=1) - mine.sum(dim=1)).square().mean()
            loss.backward()
            if wrapper.iteration < faults and step == 2 + 3 * wrapper.iteration:
                if rank == wrapper.iteration % size:
                    raise RuntimeError("in the middle of a step")
                dist.barrier()
            optimizer.step()
            step += 1
            if step % every == 0 and rank == 0:
                with wrapper.atomic():
                    both = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                    torch.save({**both, "step": step}, saved.with_suffix(".part"))
                    saved.with_suffix(".part").replace(saved)
        weights = [float(value) for each in model.parameters() for value in each.flatten()]
        dist.barrier()
        dist.destroy_process_group()
        return [wrapper.iteration, *weights]

    return train()


FAULTS = 4  # one of each rank, and one of the first again


@call
def trains_in_peace() -> Any:
    """Train without a fault."""
    return trained(0)


@call
def trains() -> Any:
    """Train with restarts."""
    return trained(FAULTS)


def find_no_store(*_args: Any) -> Any:
    """Do as where the store is not there in time."""
    raise StoreLostError("not there yet")


@call
def tries_again() -> Any:
    """One rank finds no store at first, and calls again when the others have given up twice."""
    tries = 0

    @inprocess.Wrapper(
        barrier_timeout=seconds(6), completion_timeout=seconds(6), heartbeat_timeout=seconds(4),
        soft_timeout=seconds(3), hard_timeout=seconds(5),
        **{**QUICK, "heartbeat_interval": seconds(0.5), "monitor_process_interval": seconds(0.5)},
    )  # fmt: skip
    def function(wrapper: inprocess.CallWrapper | None = None) -> str:
        assert wrapper is not None
        return os.environ["WORLD_SIZE"]

    connect = rendezvous._connect
    if INITIAL_RANK == 1:
        rendezvous._connect = find_no_store
    while True:
        tries += 1
        try:
            return tries, function()
        except (inprocess.store.BarrierTimeout, StoreLostError):
            if tries == 8:
                raise
        if INITIAL_RANK == 1:
            rendezvous._connect = connect
            time.sleep(13)


@call
def without_collector() -> Any:
    """Call three times without a garbage collection; return descriptors before and after."""

    @inprocess.Wrapper(**QUICK)
    def function(wrapper: inprocess.CallWrapper | None = None) -> None:
        assert wrapper is not None

    function()
    gc.collect()
    gc.disable()
    try:
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(3):
            function()
        stores = [o for o in gc.get_objects() if type(o) in (dist.TCPStore, rendezvous.CallStore)]
        return before, len(os.listdir("/proc/self/fd")), len(stores)
    finally:
        gc.enable()


def resources() -> tuple[int, int, float]:
    """Return how many threads and descriptors this process has, and its memory in MiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    fds = len(os.listdir("/proc/self/fd"))
    return threading.active_count(), fds, pages * os.sysconf("SC_PAGE_SIZE") / 2**20


@call
def many_restarts() -> Any:
    """Restart again and again; return resources early and late."""
    early, late = 20, 50
    found: list[tuple[int, int, float]] = []

    @inprocess.Wrapper(**QUICK)
    def function(wrapper: inprocess.CallWrapper | None = None) -> None:
        assert wrapper is not None
        # An iteration in which another rank raises at once may end before this one has looked.
        is_early = wrapper.iteration >= early and not found
        if is_early:
            found.append(resources())
        elif wrapper.iteration == late:
            # What has stopped the last iteration, and has done that, may not have ended yet.
            deadline = time.monotonic() + WAIT_S / 2
            while any(now > then for now, then in zip(resources()[:2], found[0][:2], strict=True)):
                if time.monotonic() > deadline:
                    break
                time.sleep(0.01)
            found.append(resources())
        if wrapper.iteration < late:
            if wrapper.iteration % WORLD == INITIAL_RANK:
                raise RuntimeError("again")
            time.sleep(WAIT_S)

    function()
    return found


@call
def left_over() -> Any:
    """Return what calls have left behind in this process."""
    threads = other_threads()
    gc.collect()
    stores = [o for o in gc.get_objects() if isinstance(o, dist.TCPStore)]
    return len(stores), threads, os.environ["RANK"], os.environ["WORLD_SIZE"]


results: list[Any] = []


def main() -> None:
    """Make the calls; a line of JSON for each."""
    for name in sys.argv[2:]:
        results.append(CALLS[name]())
        print("RESULT", json.dumps(results[-1]), flush=True)


if __name__ == "__main__":
    main()
