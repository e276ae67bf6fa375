# SPDX-License-Identifier: Apache-2.0
"""A rank of a job in which faults happen: what, when and to whom follows from the seed alone.

Each trial is a call of the same function, with one fault or two at once; the last call has faults
that kill. Arguments: a directory that all ranks share, the seed, and how many trials.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from chaos_plan import IN_RESTART, Trial, plan

from nvidia_resiliency_ext import inprocess
from nvidia_resiliency_ext.inprocess import rank_assignment as ranks
from nvidia_resiliency_ext.inprocess.monitor_thread import RankShouldRestart

FOLDER, SEED, TRIALS = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
ME = int(os.environ["RANK"])
WORLD = int(os.environ["WORLD_SIZE"])
ACTIVE = WORLD - 1
STEPS = 4
ASLEEP_S = 60.0


class Scene:
    """What goes on in this rank's present call."""

    trial: Trial
    iteration = 0
    fired = False

    def at(self, moment: str) -> None:
        """Let happen what is to happen here."""
        trial = self.trial
        if self.iteration == 0 and moment == "collective" and trial.first(ACTIVE) == ME:
            raise RuntimeError("the fault before the fault")
        due = self.iteration == 0 or moment in IN_RESTART
        if self.fired or not due or moment != trial.moment or ME not in trial.victims:
            return
        self.fired = True
        if trial.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if trial.kind == "sleep":
            time.sleep(ASLEEP_S)
        if trial.kind == "restart":
            raise RankShouldRestart("chaos")
        raise RuntimeError(f"chaos at {moment}")


SCENE = Scene()


class AtStart(inprocess.initialize.Initialize):
    """A moment."""

    def __call__(self, state: inprocess.FrozenState) -> inprocess.FrozenState:
        """Be it."""
        SCENE.iteration = state.iteration
        SCENE.at("initialize")
        return state


class AtAbort(inprocess.abort.Abort):
    """A moment."""

    def __call__(self, state: inprocess.FrozenState) -> inprocess.FrozenState:
        """Be it."""
        SCENE.at("abort")
        return state


class AtFinalize(inprocess.finalize.Finalize):
    """A moment."""

    def __call__(self, state: inprocess.FrozenState) -> inprocess.FrozenState:
        """Be it."""
        SCENE.at("finalize")
        return state


class AtAssignment(ranks.RankAssignment):
    """A moment; not the first assignment of a call."""

    def __call__(self, ctx: ranks.RankAssignmentCtx) -> ranks.RankAssignmentCtx:
        """Be it."""
        if ctx.state.mode is not inprocess.Mode.INITIALIZED:
            SCENE.at("rank_assignment")
        return ctx


def seconds(value: float) -> dt.timedelta:
    """Return a time."""
    return dt.timedelta(seconds=value)


@inprocess.Wrapper(
    store_kwargs={"port": int(os.environ["MASTER_PORT"]) + 1},
    monitor_process_logfile=str(FOLDER / "monitor.log"),
    initialize=AtStart(),
    abort=inprocess.Compose(inprocess.abort.AbortTorchDistributed(), AtAbort()),
    finalize=AtFinalize(),
    rank_assignment=inprocess.Compose(
        ranks.MaxActiveWorldSize(ACTIVE), ranks.ShiftRanks(), AtAssignment()
    ),
    last_call_wait=seconds(0),
    soft_timeout=seconds(1.5),
    hard_timeout=seconds(8),
    heartbeat_timeout=seconds(8),
    barrier_timeout=seconds(25),
    completion_timeout=seconds(25),
    monitor_process_interval=seconds(0.1),
    monitor_thread_interval=seconds(0.1),
    progress_watchdog_interval=seconds(0.1),
    heartbeat_interval=seconds(0.2),
)
def work(trial: Trial, call: inprocess.CallWrapper) -> list[Any]:
    """Add up over the active ranks; return the sum, what it must be, and the iteration."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    SCENE.at("start")
    name = FOLDER / f"group{trial.number}.{call.iteration}"
    # Nothing interrupts a wait inside torch's stores, which is where a rank waits for its peers.
    dist.init_process_group(
        "gloo", init_method=f"file://{name}", rank=rank, world_size=size, timeout=seconds(1)
    )
    total = 0.0
    for step in range(STEPS):
        call.ping()
        SCENE.at("ping")
        with call.atomic():
            SCENE.at("atomic")
        SCENE.at("collective")
        tensor = torch.full((4,), float(step + 1))
        dist.all_reduce(tensor)
        total += float(tensor[0])
    dist.barrier()
    dist.destroy_process_group()
    SCENE.at("end")
    return [total, size * STEPS * (STEPS + 1) / 2, call.iteration]


def main() -> None:
    """Go through the trials; a line of JSON for each."""
    for trial in plan(SEED, TRIALS, WORLD):
        SCENE.trial, SCENE.fired, SCENE.iteration = trial, False, 0
        begun = time.monotonic()
        value = work(trial, None)  # type: ignore[arg-type]
        took = round(time.monotonic() - begun, 3)
        line = {"number": trial.number, "value": value, "iteration": SCENE.iteration, "s": took}
        with contextlib.suppress(BrokenPipeError):
            print("RESULT", json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
