# SPDX-License-Identifier: Apache-2.0
"""A rank of the small real training, restarted inside its process as well as by the launcher.

    layered_rank.py SHARED --steps N [--active N] [--min N] [--client] [--peace] [DEED ...]

A deed is CYCLE:ITERATION:RANK:STEP:WHAT with the rank's number at the start of the process; step
0 is before the process group is made. The record tells who entered the function, and with what.
With `--peace` cycle 0 first trains without deeds, into a folder of that name: what the result of
the disturbed training must be.
"""

from __future__ import annotations

import argparse
import datetime as dt
import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import no_compiler  # noqa: F401 - before torch
import torch
import torch.distributed as dist
from ddp_rank import CHECKPOINT, RESULT, Trainer
from shared_record import Monitor, Record

from nvidia_resiliency_ext import inprocess
from nvidia_resiliency_ext.inprocess import nested_restarter as restarter
from nvidia_resiliency_ext.inprocess import rank_assignment as ranks

if TYPE_CHECKING:
    from collections.abc import Callable

INITIAL_RANK = int(os.environ["RANK"])
CYCLE = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
LONG_S = 300.0


def fail() -> None:
    """Raise an exception."""
    raise RuntimeError("a deed of the test")


def die() -> None:
    """Die by SIGKILL."""
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    """Be stopped."""
    os.kill(os.getpid(), signal.SIGSTOP)


def sleep() -> None:
    """Hang where the wrapper can get us out."""
    time.sleep(LONG_S)


def leave() -> None:
    """End with a code of our own."""
    sys.exit(7)


DEEDS: dict[str, Callable[[], None]] = {
    deed.__name__: deed for deed in (fail, die, stop, sleep, leave)
}


def seconds(value: float) -> dt.timedelta:
    """Return a time."""
    return dt.timedelta(seconds=value)


def wrapper(options: argparse.Namespace) -> inprocess.Wrapper:
    """Return the wrapper, with the callbacks that tell of layered restarts."""
    # On a host of its own every port is free.
    port = os.environ.get("WRAPPER_STORE_PORT") or int(os.environ["MASTER_PORT"]) + 2
    return inprocess.Wrapper(
        store_kwargs={"port": int(port)},
        initialize=inprocess.Compose(
            inprocess.initialize.RetryController(min_world_size=options.min),
            restarter.NestedRestarterHandlingCompleted(),
        ),
        abort=inprocess.Compose(
            inprocess.abort.AbortTorchDistributed(),
            restarter.NestedRestarterHandlingStarting(),
        ),
        completion=restarter.NestedRestarterFinalized(),
        terminate=restarter.NestedRestarterAborted(),
        rank_assignment=inprocess.Compose(
            ranks.MaxActiveWorldSize(options.active or None), ranks.ShiftRanks()
        ),
        soft_timeout=seconds(options.soft),
        hard_timeout=seconds(options.soft + 1),
        termination_grace_time=seconds(0.2),
        monitor_process_interval=seconds(0.2),
        progress_watchdog_interval=seconds(0.2),
        heartbeat_interval=seconds(0.5),
        heartbeat_timeout=seconds(10),
        last_call_wait=seconds(0.1),
    )


def deed(options: argparse.Namespace, iteration: int, step: int) -> None:
    """Do what is to be done now, if anything."""
    for text in options.deeds:
        *when, what = text.split(":")
        if [int(word) for word in when] == [CYCLE, iteration, INITIAL_RANK, step]:
            DEEDS[what]()


def keys_of(store: Any) -> list[str]:
    """Return the keys of the job's store, if this torch can tell them."""
    while not hasattr(store, "port"):
        store = store.underlying_store
    return store.list_keys() if hasattr(store, "list_keys") else []


def train(
    options: argparse.Namespace, record: Record, monitor: Monitor, call_wrapper: Any = None
) -> None:
    """Train to the last step from wherever the last checkpoint is, and write the result."""
    iteration = call_wrapper.iteration
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = call_wrapper.store
    record.say("enter", iteration=iteration, as_rank=rank, of=world, keys=keys_of(store))
    deed(options, iteration, 0)
    # The wrapper's store outlives every rank; a prefix of its own for each iteration.
    store = dist.PrefixStore(f"training/{iteration}", store)
    with monitor.section("setup"):
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
        trainer = Trainer(options.shared)
    record.say("resume", step=trainer.step)
    while trainer.step < options.steps:
        with monitor.section("step"):
            time.sleep(options.step_ms / 1000)
            deed(options, iteration, trainer.step)
            trainer.train_step()
        record.say("step", step=trainer.step)
        monitor.beat()
        at_end = trainer.step == options.steps
        if rank == 0 and (trainer.step % options.save_every == 0 or at_end):
            record.save(CHECKPOINT, trainer.checkpoint(), step=trainer.step)
    if rank == 0:
        record.save(RESULT, trainer.result(), step=trainer.step)
    del trainer
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Run one rank."""
    parser = argparse.ArgumentParser()
    parser.add_argument("shared", type=Path)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--step-ms", type=float, default=10)
    parser.add_argument("--save-every", type=int, default=5)
    parser.add_argument("--active", type=int, default=0, help="ranks that train; all by default")
    parser.add_argument("--min", type=int, default=1, help="ranks that must be left")
    parser.add_argument("--soft", type=float, default=10.0, help="the soft timeout in seconds")
    parser.add_argument("--peace", action="store_true", help="train undisturbed first")
    parser.add_argument("--client", action="store_true", help="sections and heartbeats")
    parser.add_argument("deeds", nargs="*")
    options = parser.parse_intermixed_args()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(mode=True)
    call = wrapper(options)(train)
    record = Record(options.shared)
    monitor = Monitor(options.client)
    if options.peace and CYCLE == 0:
        folder = options.shared / "peace"
        folder.mkdir(exist_ok=True)
        in_peace = argparse.Namespace(**{**vars(options), "shared": folder, "deeds": []})
        call(in_peace, Record(folder), monitor)
    call(options, record, monitor)
    monitor.close()
    record.say("end")


if __name__ == "__main__":
    main()
