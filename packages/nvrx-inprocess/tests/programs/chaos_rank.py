# SPDX-License-Identifier: Apache-2.0
"""A rank of a job in which faults happen: what, when and to whom follows from the seed alone.

Each trial is a call of the same function; the last one loses ranks. Arguments: a directory that all
ranks share, the seed, which job of the campaign, and how many trials.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime as dt
import faulthandler
import json
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch._dynamo.utils  # as DDP does at its first use: a restart would leave half of it
import torch.distributed as dist
from chaos_plan import ACTIVE, IN_RESTART, Trial, plan
from other_threads import other_threads

from nvidia_resiliency_ext import inprocess
from nvidia_resiliency_ext.inprocess import rank_assignment as ranks
from nvidia_resiliency_ext.inprocess.monitor_thread import RankShouldRestart

FOLDER = Path(sys.argv[1])
SEED, JOB, TRIALS = (int(word) for word in sys.argv[2:5])
ME = int(os.environ["RANK"])
STEPS = 4
ASLEEP_S = 60.0
IN_ABORT_S = 6.0  # longer than the soft timeout, shorter than the hard one
MEET_S = 30.0
SETTLE_S = 0.03
LEFT = 3  # exit code of who leaves with an exception
DEATHS = (signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT)
CHANCE = random.Random(f"{SEED}.{JOB}.{ME}")


class Scene:
    """What goes on in this rank's present call."""

    trial: Trial
    iteration = 0
    fired = False
    is_live = False
    place = ""

    @property
    def _is_due(self) -> bool:
        if self.fired or ME not in self.trial.victims:
            return False
        return self.iteration == 0 or self.trial.cell.moment in IN_RESTART

    def at(self, moment: str) -> None:
        """Let happen what is to happen here."""
        self.place = moment
        if self.iteration == 0 and moment == "collective" and self.trial.first == ME:
            raise RuntimeError("the fault before the fault")
        if moment == self.trial.cell.moment and self._is_due:
            self.fired = True
            if self.trial.cell.loses_ranks and moment not in IN_RESTART:
                # The end of one victim would keep the other one from coming here.
                self._mark(ME).touch()
                self._await_victims()
            self._act(self.trial.cell.kind, moment)

    def soon(self, moment: str) -> None:
        """Let it happen from outside, a moment from now, when none of our code runs."""
        self.place = moment
        if moment == self.trial.cell.moment and self._is_due:
            self.fired = True
            threading.Thread(target=self._strike_from_outside, args=(moment,), daemon=True).start()

    def wait_for_victims(self, moment: str) -> None:
        """Keep the moment from being over before it has happened."""
        if moment != self.trial.cell.moment or ME in self.trial.victims:
            return
        if self.iteration and moment not in IN_RESTART:
            return
        self._await_victims()
        # It follows the mark, and nobody can say when it has happened.
        time.sleep(SETTLE_S)

    def _await_victims(self) -> None:
        deadline = time.monotonic() + MEET_S
        while not all(self._mark(rank).exists() for rank in self.trial.victims):
            if time.monotonic() > deadline:
                raise RuntimeError("nothing happens")
            time.sleep(0.002)

    def from_signal(self, _number: int, _frame: FrameType | None) -> None:
        """Do in the main thread what only it can do."""
        cell = self.trial.cell
        # One that comes late, when a peer has begun a restart, would be another cell's.
        if self.is_live and (cell.loses_ranks or self.place == cell.moment):
            self._act(cell.kind, cell.moment)

    def _mark(self, rank: int) -> Path:
        return FOLDER / f"struck{self.trial.number}.{rank}"

    def _strike_from_outside(self, moment: str) -> None:
        time.sleep(CHANCE.uniform(0.005, 0.03))
        kind = self.trial.cell.kind
        self._mark(ME).touch()
        if kind in ("kill", "stop", "monitor"):
            self._act(kind, moment)
        else:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

    def _act(self, kind: str, moment: str) -> None:
        if kind == "kill":
            os.kill(os.getpid(), CHANCE.choice(DEATHS))
            time.sleep(ASLEEP_S)
        if kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
            return
        if kind == "monitor":
            kill_monitor()
            return
        if kind == "gil":
            # A signal, such as the one that asks for stacks, would end the sleep.
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
            ctypes.PyDLL(None).sleep(int(ASLEEP_S))
        if kind == "sleep":
            time.sleep(IN_ABORT_S if moment == "abort" else ASLEEP_S)
            return
        if kind == "restart":
            raise RankShouldRestart("chaos")
        if kind == "exit":
            sys.exit(LEFT)
        raise RuntimeError(f"chaos at {moment}")


def kill_monitor() -> None:
    """Kill the monitor of the node, if there is one at this moment."""
    with contextlib.suppress(OSError, ValueError):
        pid = int((FOLDER / f"monitor{ME}.pid").read_text())
        # Its number may be another process's by now.
        if b"inprocess" in Path(f"/proc/{pid}/cmdline").read_bytes():
            os.kill(pid, signal.SIGKILL)


SCENE = Scene()


class AtStart(inprocess.initialize.Initialize):
    """A moment."""

    def __call__(self, state: inprocess.FrozenState) -> inprocess.FrozenState:
        """Be it."""
        SCENE.iteration = state.iteration
        if state.mode is inprocess.Mode.INACTIVE:
            SCENE.soon("completion")
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
        SCENE.soon("barrier")  # a moment later we are there
        SCENE.wait_for_victims("barrier")
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
    monitor_process_pidfile=str(FOLDER / "monitor{rank}.pid"),
    initialize=AtStart(),
    abort=inprocess.Compose(inprocess.abort.AbortTorchDistributed(), AtAbort()),
    finalize=AtFinalize(),
    rank_assignment=inprocess.Compose(
        ranks.MaxActiveWorldSize(ACTIVE), ranks.ShiftRanks(), AtAssignment()
    ),
    last_call_wait=seconds(0),
    soft_timeout=seconds(4),
    hard_timeout=seconds(10),
    heartbeat_timeout=seconds(12),
    barrier_timeout=seconds(25),
    completion_timeout=seconds(25),
    termination_grace_time=seconds(2),
    monitor_process_interval=seconds(0.1),
    monitor_thread_interval=seconds(0.1),
    progress_watchdog_interval=seconds(0.1),
    heartbeat_interval=seconds(0.2),
)
def work(trial: Trial, call: inprocess.CallWrapper) -> list[Any]:
    """Add up over the active ranks; return the sum, what it must be, the iteration, the size."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    SCENE.at("start")
    name = FOLDER / f"group{trial.number}.{call.iteration}"
    # Nothing interrupts a wait inside torch's stores, which is where a rank waits for its peers.
    dist.init_process_group(
        "gloo", init_method=f"file://{name}", rank=rank, world_size=size, timeout=seconds(3)
    )
    # But a collective would wait for ever.
    dist.distributed_c10d._set_pg_timeout(seconds(600))
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1, bias=False))
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
        loss = model(tensor).sum()
        SCENE.at("backward")
        loss.backward()
    dist.barrier()
    dist.destroy_process_group()
    SCENE.at("end")
    SCENE.soon("completion")  # a moment later we wait for the others to complete
    SCENE.wait_for_victims("completion")
    return [total, size * STEPS * (STEPS + 1) / 2, call.iteration, size]


def main() -> int:
    """Go through the trials; a line of JSON for each."""
    # After a hard timeout the log tells where a rank was; its other threads run on meanwhile, and
    # to look at them may end in a segmentation fault.
    faulthandler.register(signal.SIGTERM, all_threads=False, chain=True)
    signal.signal(signal.SIGUSR1, SCENE.from_signal)
    for trial in plan(SEED, JOB, TRIALS):
        SCENE.trial, SCENE.fired, SCENE.iteration = trial, False, 0
        begun = time.monotonic()
        line: dict[str, Any] = {"number": trial.number}
        try:
            SCENE.is_live = True
            line["value"] = work(trial, None)  # type: ignore[arg-type]
            SCENE.is_live = False
        except BaseException as error:  # noqa: BLE001 - told
            SCENE.is_live = False
            line["error"] = f"{type(error).__name__}: {error}"
        line |= {"iteration": SCENE.iteration, "s": round(time.monotonic() - begun, 3)}
        line["threads"] = other_threads()
        with contextlib.suppress(BrokenPipeError):
            print("RESULT", json.dumps(line), flush=True)
        if "error" in line:
            return LEFT
    return 0


if __name__ == "__main__":
    sys.exit(main())
