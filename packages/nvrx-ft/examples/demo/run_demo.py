# SPDX-License-Identifier: Apache-2.0
"""Show a training job that loses one rank, then hangs in another, and ends with the right weights.

    python run_demo.py [--output DIR]

Two runs of ``train.py`` under ``ft_launcher``, four ranks each, on CPU: one in peace, one in which
this program kills one rank with SIGKILL and later stops another with SIGSTOP, from outside, like a
crash and a hang. It then compares the weights of both runs, and prints what was noticed by whom
and how long each part of the recovery took. It takes about half a minute on two cores and ends
with an exit code other than zero when the weights differ or a recovery is missing.

Standard library only; run it with an interpreter that has nvrx-ft.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RANKS = 4
STEPS = 600
CHECKPOINT_EVERY = 20
STEP_TIMEOUT_S = 2
DEVICE_MS = 15  # a real job leaves the CPU to others while its devices compute
LIMIT_S = 240
LAUNCHER = "nvidia_resiliency_ext.fault_tolerance.launcher"
REPORT = "nvidia_resiliency_ext.shared_utils.report"
READY = f"all {RANKS} standbys are ready".encode()


class DemoError(Exception):
    """The demo did not show what it is meant to show."""


@dataclass(frozen=True)
class Disturbance:
    """What is done to which rank, and in which window of steps.

    It happens at the first step of the window at which every rank has its standby ready. At the
    window's last step the training waits for that: a real job has hours between two faults.
    """

    what: str
    signal: signal.Signals
    rank: int
    from_step: int
    to_step: int
    cause: str


DISTURBANCES = (
    Disturbance("killed", signal.SIGKILL, 2, 90, 350, "killed"),
    Disturbance("stopped", signal.SIGSTOP, 1, 390, 570, "hang_section"),
)


@dataclass(frozen=True)
class Progress:
    """One line that a rank wrote at the beginning of a step."""

    cycle: int
    rank: int
    step: int
    pid: int


@dataclass
class RunLog:
    """What this program did and saw in one run; times are monotonic seconds."""

    started: float
    training: dict[int, set[int]] = field(default_factory=dict)
    done: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)

    def say(self, text: str) -> None:
        """Print a line of the timeline."""
        print(f"  {time.monotonic() - self.started:6.2f} s  {text}", flush=True)


class Job:
    """One run of the training program under the launcher, with its folder, pipe and log."""

    def __init__(self, folder: Path, device_ms: float) -> None:
        """Start the launcher."""
        folder.mkdir(parents=True)
        self.folder = folder
        self.events = folder / "events"
        self.events.mkdir()
        pipe = folder / "progress"
        os.mkfifo(pipe, 0o600)
        # Open for both, so that it never looks closed between two cycles.
        self._pipe = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
        self._rest = b""
        self._words = b""
        self.standbys_ready = False
        self._pause = folder / "pause"
        command = [
            *(sys.executable, "-m", LAUNCHER, "--standalone"),
            *("--nproc-per-node", str(RANKS), "--max-restarts", "3"),
            *("--ft-rank-section-timeouts", f"setup:60,step:{STEP_TIMEOUT_S},checkpoint:30"),
            *("--ft-initial-rank-heartbeat-timeout", "90"),
            *("--ft-rank-heartbeat-timeout", str(LIMIT_S)),
            *(str(HERE / "train.py"), "--output", str(folder), "--progress", str(pipe)),
            *("--steps", str(STEPS), "--checkpoint-every", str(CHECKPOINT_EVERY)),
            *("--device-ms", str(device_ms), "--pause", str(self._pause)),
        ]
        environment = dict(os.environ, OMP_NUM_THREADS="1", NVRX_EVENT_DIR=str(self.events))
        self._log = (folder / "launcher.log").open("wb")
        self._process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def wait(self, seconds: float) -> list[Progress] | None:
        """Wait until something happens; return the new progress, or None when the job is over."""
        output = self._process.stdout
        assert output is not None
        ready, _, _ = select.select([self._pipe, output.fileno()], [], [], max(seconds, 0))
        if not ready:
            raise DemoError(f"the job is not over after {LIMIT_S} s")
        if output.fileno() in ready:
            data = os.read(output.fileno(), 65536)
            self._log.write(data)
            self._words = (self._words + data)[-4096:]
            self.standbys_ready = self.standbys_ready or READY in self._words
            if not data and self._pipe not in ready:
                return None
        if self._pipe not in ready:
            return []
        *lines, self._rest = (self._rest + os.read(self._pipe, 65536)).split(b"\n")
        return [Progress(*(int(part) for part in line.split())) for line in lines]

    def exit_code(self) -> int:
        """Return the launcher's exit code."""
        return self._process.wait(timeout=30)

    def records(self) -> list[dict[str, Any]]:
        """Return the events recorded so far."""
        found = []
        for path in sorted(self.events.glob("*.jsonl")):
            for line in path.read_text(encoding="utf-8").splitlines():
                with contextlib.suppress(ValueError):  # the last line may be half written
                    found.append(json.loads(line))
        return found

    def pause(self) -> None:
        """Let the ranks wait before their next checkpoint."""
        self._pause.touch()

    def go_on(self) -> None:
        """Let the ranks train on."""
        self._pause.unlink()

    def forget_standbys(self) -> None:
        """Take note that the standbys become workers: those of the next cycle are others."""
        self._words, self.standbys_ready = b"", False

    @property
    def is_paused(self) -> bool:
        """Whether the ranks were told to wait."""
        return self._pause.exists()

    def result(self) -> dict[str, Any]:
        """Return what the training program wrote at its end."""
        try:
            return dict(json.loads((self.folder / "result.json").read_text(encoding="utf-8")))
        except OSError as error:
            raise DemoError(f"the job wrote no result\n{self.tail()}") from error

    def tail(self) -> str:
        """Return the end of the launcher's log."""
        self._log.flush()
        lines = (self.folder / "launcher.log").read_text(errors="replace").splitlines()
        return "\n".join(
            ["  last lines of launcher.log:", *(f"  | {line}" for line in lines[-25:])]
        )

    def close(self) -> None:
        """End the launcher, if it still runs, and give everything back."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        os.close(self._pipe)
        self._log.close()


def note_progress(log: RunLog, progress: Progress) -> None:
    """Tell the timeline when a cycle has begun to train on all ranks."""
    ranks = log.training.setdefault(progress.cycle, set())
    if len(ranks) == RANKS:
        return
    ranks.add(progress.rank)
    if len(ranks) < RANKS:
        return
    if progress.cycle == 0:
        log.say(f"all {RANKS} ranks train")
        return
    log.gaps_s.append(time.monotonic() - log.done[progress.cycle - 1])
    waited = ""
    if DISTURBANCES[progress.cycle - 1].signal is signal.SIGSTOP:
        waited = f", {STEP_TIMEOUT_S} s of them the timeout of a step"
    log.say(
        f"all {RANKS} ranks train again, from step {progress.step}: "
        f"{log.gaps_s[-1]:.2f} s without training{waited}"
    )


def disturb(job: Job, log: RunLog, progress: Progress) -> None:
    """Do the next disturbance if this is its rank, its cycle and its time."""
    place = len(log.done)
    if place == len(DISTURBANCES) or progress.cycle != place:
        return
    plan = DISTURBANCES[place]
    if progress.rank != plan.rank or progress.step < plan.from_step:
        return
    if not job.standbys_ready:
        if progress.step >= plan.to_step and not job.is_paused:
            job.pause()
            log.say(f"the training waits until each of the {RANKS} ranks has a standby ready")
        return
    os.kill(progress.pid, plan.signal)
    log.done.append(time.monotonic())
    job.forget_standbys()
    log.say(
        f"rank {plan.rank} (pid {progress.pid}) is {plan.what} with {plan.signal.name} "
        f"in step {progress.step}"
    )


def run(folder: Path, *, disturbed: bool) -> tuple[Job, RunLog, dict[str, Any]]:
    """Run the job to its end and return what came of it."""
    log = RunLog(started=time.monotonic())
    job = Job(folder, DEVICE_MS if disturbed else 0)
    try:
        while True:
            lines = job.wait(log.started + LIMIT_S - time.monotonic())
            if lines is None:
                break
            for progress in lines:
                note_progress(log, progress)
                if disturbed:
                    disturb(job, log, progress)
            if job.is_paused and job.standbys_ready:
                job.go_on()
        code = job.exit_code()
        log.say(f"the launcher has left with exit code {code}")
        if code != 0:
            raise DemoError(f"the job failed\n{job.tail()}")
        return job, log, job.result()
    finally:
        job.close()


def check_recoveries(job: Job, log: RunLog) -> None:
    """Complain unless each disturbance was noticed as what it was and recovered from."""
    if len(log.gaps_s) < len(DISTURBANCES):
        raise DemoError(
            f"{len(DISTURBANCES)} recoveries expected, {len(log.gaps_s)} seen\n{job.tail()}"
        )
    faults = [record for record in job.records() if record.get("kind") == "fault"]
    for cycle, plan in enumerate(DISTURBANCES):
        found = [fault for fault in faults if fault.get("cycle") == cycle]
        if not any(f.get("rank") == plan.rank and f.get("cause") == plan.cause for f in found):
            raise DemoError(f"the record of cycle {cycle} does not say {plan.cause}: {found}")


def show_report(job: Job) -> Path:
    """Print the report of a job, write it as a page too, and return the page's path."""
    page = job.folder / "report.html"
    command = [sys.executable, "-m", REPORT, str(job.events)]
    columns = str(min(shutil.get_terminal_size((100, 24)).columns, 120))
    subprocess.run([*command, "--width", columns], check=True)
    subprocess.run([*command, "--html", str(page)], check=True, stdout=subprocess.DEVNULL)
    return page


def default_output() -> Path:
    """Return the folder ``.demo`` of the checkout, or of this folder when there is no checkout."""
    root = next((folder for folder in HERE.parents if (folder / ".git").exists()), HERE)
    return root / ".demo"


def demonstrate(output: Path) -> None:
    """Do both runs, compare them and print the report."""
    began = time.monotonic()
    print(f"A network learns to read handwritten digits: {RANKS} ranks on CPU, {STEPS} steps.")
    print("\n1. Undisturbed", flush=True)
    _, _, peaceful = run(output / "undisturbed", disturbed=False)
    print("\n2. The same job; one rank is killed, another one stops answering", flush=True)
    job, log, disturbed = run(output / "disturbed", disturbed=True)
    print("\n3. What the record says\n", flush=True)
    page = show_report(job)
    check_recoveries(job, log)
    print("\n4. The results\n")
    for name, result in (("undisturbed", peaceful), ("disturbed", disturbed)):
        print(
            f"  {name:12s} step {result['step']}  loss {result['loss']:.6f}  "
            f"accuracy {result['accuracy']:.1%}  weights sha256 {result['weights_sha256']}"
        )
    if peaceful["weights_sha256"] != disturbed["weights_sha256"]:
        raise DemoError("the weights differ")
    print("\n  The weights are the same, bit for bit.")
    print(f"  Report: {page}")
    print(f"  The demo took {time.monotonic() - began:.0f} s.")


def main() -> int:
    """Run the demo."""
    parser = argparse.ArgumentParser(description="a training job that survives a crash and a hang")
    parser.add_argument("--output", type=Path, help="folder for all files (default: .demo)")
    output = parser.parse_args().output or default_output()
    for name in ("undisturbed", "disturbed"):
        shutil.rmtree(output / name, ignore_errors=True)
    try:
        demonstrate(output)
    except DemoError as error:
        print(f"\nThe demo failed: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
