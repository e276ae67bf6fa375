# SPDX-License-Identifier: Apache-2.0
"""Measures cycle logs of one launcher that has one core; the workers have the others.

flood: MB/s from the first write to the last byte in the file, and how much the launcher's memory
grew. last words: bytes that are missing of 1 MiB written right before SIGKILL. fill: bytes that a
worker can write while the launcher is stopped. talk: delay from a line's write to the file, and
what the launcher's core is busy with a line per millisecond.

python bench_cycle_logs.py [--python PY] [--against PY2] [--megabytes N] [--only NAME]
"""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
import subprocess
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import _bench
from _bench_log_worker import BLOCK, LINE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

WORKER = _bench.HERE / "_bench_log_worker.py"
LIMIT_S = 200.0
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Job:
    """A launcher pinned to core 0 whose ranks wait for `go`."""

    def __init__(
        self, candidate: _bench.Candidate, out: Path, ranks: int, mode: str, megabytes: float
    ) -> None:
        self.out = out
        self.log = out / "job_cycle0.log"
        command = [
            *candidate.command(ranks, 0, ("--ft-prewarm", "off")),
            *("--ft-per-cycle-applog-prefix", str(out / "job.log")),
            *(str(WORKER), str(out), mode, str(megabytes)),
        ]
        with (out / "log").open("wb") as log:
            self.process = subprocess.Popen(
                ["taskset", "-c", "0", *command],
                env=_bench.environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self.wait_until(lambda: len(list(out.glob("ready_*"))) == ranks)

    def wait_until(self, condition: Callable[[], object]) -> None:
        """Wait until a condition holds."""
        deadline = time.monotonic() + LIMIT_S
        while not condition():
            if time.monotonic() > deadline or self.process.poll() is not None:
                self.process.kill()
                raise SystemExit(f"it did not happen\n{(self.out / 'log').read_text()[-3000:]}")
            threading.Event().wait(0.002)

    def memory_mib(self, field: str) -> float:
        """Return a memory figure of the launcher from /proc."""
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(text.split(f"{field}:")[1].split()[0]) / 1024

    def cpu_s(self) -> float:
        """Return how long the launcher has had the core."""
        words = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(words[11]) + int(words[12])) / TICKS_PER_S

    def go(self) -> float:
        """Let the ranks begin and return the time."""
        (self.out / "go").touch()
        return time.monotonic()


@contextlib.contextmanager
def job(candidate: _bench.Candidate, ranks: int, mode: str, megabytes: float) -> Iterator[Job]:
    """Run a job; it is over when the block is left."""
    with _bench.folder() as out:
        made = Job(candidate, out, ranks, mode, megabytes)
        try:
            yield made
            made.process.wait(LIMIT_S)
        finally:
            made.process.kill()
            made.process.wait()


def flood(candidate: _bench.Candidate, ranks: int, megabytes: float) -> dict[str, float]:
    """Measure throughput and memory."""
    blocks = round(megabytes / ranks * 1e6 / len(BLOCK)) * ranks
    size = blocks * 640 * (len(LINE) + len("0: "))
    with job(candidate, ranks, "flood", megabytes / ranks) as one:
        before, cpu_before = one.memory_mib("VmRSS"), one.cpu_s()
        began = one.go()
        one.wait_until(lambda: one.log.stat().st_size >= size)
        took_s = time.monotonic() - began
        return {
            f"flood of {ranks}, MB/s": size / 1e6 / took_s,
            f"flood of {ranks}, MB per CPU second": size / 1e6 / (one.cpu_s() - cpu_before),
            f"flood of {ranks}, memory growth, MiB": one.memory_mib("VmHWM") - before,
        }


def last_words(candidate: _bench.Candidate) -> dict[str, float]:
    """Count what is missing of the last words of a killed rank."""
    lines = (1 << 20) // len(LINE)
    with job(candidate, 1, "die", 0) as one:
        one.go()
        one.process.wait(LIMIT_S)
        found = one.log.read_bytes().count(LINE) * len(LINE)
        return {"last words, bytes missing": lines * len(LINE) - found}


def fill(candidate: _bench.Candidate) -> dict[str, float]:
    """Count what a worker can write while its launcher is stopped."""
    with job(candidate, 1, "fill", 0) as one:
        os.kill(one.process.pid, signal.SIGSTOP)
        one.go()
        deadline = time.monotonic() + LIMIT_S
        while not (one.out / "taken").exists() and time.monotonic() < deadline:
            threading.Event().wait(0.002)
        taken = int((one.out / "taken").read_text())
        os.kill(one.process.pid, signal.SIGCONT)
        (one.out / "leave").touch()
        return {"fill, KiB written to a stopped launcher": taken / 1024}


def talk(candidate: _bench.Candidate) -> dict[str, float]:
    """Measure a worker that writes a line per millisecond."""
    delays: list[float] = []
    with job(candidate, 1, "talk", 2000) as one:
        cpu_before, began = one.cpu_s(), one.go()
        rest = b""
        with one.log.open("rb") as log:
            while not (one.out / "done_0").exists():
                data = log.read()
                now = time.time()
                *lines, rest = (rest + data).split(b"\n")
                delays += [now - float(line.split()[-1]) for line in lines]
                threading.Event().wait(0.0005)
        busy = (one.cpu_s() - cpu_before) / (time.monotonic() - began)
    delays.sort()
    return {
        "talk, line to file p50, ms": statistics.median(delays) * 1e3,
        "talk, line to file p99, ms": delays[int(len(delays) * 0.99)] * 1e3,
        "talk, core busy, %": busy * 100,
    }


def main() -> None:
    """Measure."""
    parser = _bench.parser(__doc__, repeats=3)
    parser.add_argument("--megabytes", type=float, default=1000.0)
    parser.add_argument("--only", choices=["flood", "last", "fill", "talk"])
    options = parser.parse_args()
    chosen = options.only

    def once(candidate: _bench.Candidate) -> dict[str, float]:
        figures: dict[str, float] = {}
        if chosen in (None, "flood"):
            for ranks in (1, 8):
                figures |= flood(candidate, ranks, options.megabytes)
        if chosen in (None, "last"):
            figures |= last_words(candidate)
        if chosen in (None, "fill"):
            figures |= fill(candidate)
        if chosen in (None, "talk"):
            figures |= talk(candidate)
        return figures

    _bench.measure(options, once, unit="as named")


if __name__ == "__main__":
    main()
