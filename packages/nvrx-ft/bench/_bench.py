# SPDX-License-Identifier: Apache-2.0
"""Shared parts of the launcher's benchmarks: candidates, jobs, events, JSON lines.

A benchmark measures one thing for each candidate in turn, over and over, so that a busy moment of
the machine hits all of them alike, and prints one JSON object per candidate and figure.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

HERE = Path(__file__).resolve().parent
WORKERS = {"bare": HERE / "_bench_worker.py", "ddp": HERE / "_bench_worker_torch.py"}
JOB_LIMIT_S = 240.0
PROGRAM_LIMIT_S = 120.0

Events = dict[tuple[int, int], dict[str, float]]


@dataclass(frozen=True)
class Candidate:
    """A launcher under measurement."""

    name: str
    python: Path
    program: str

    def command(self, nproc: int, max_restarts: int, extra: Sequence[str] = ()) -> list[str]:
        """Return the launcher's command line up to the script."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        flags = extra if self.program == "ft_launcher" else ()
        return [
            *(str(self.python.parent / self.program), "--nnodes=1:1"),
            *(f"--nproc-per-node={nproc}", f"--max-restarts={max_restarts}"),
            *("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=bench"),
            *flags,
        ]


def parser(description: str | None, repeats: int) -> argparse.ArgumentParser:
    """Return a parser with the options that all benchmarks have."""
    made = argparse.ArgumentParser(description=(description or "").split("\n", 1)[0])
    made.add_argument("--python", type=Path, default=Path(sys.executable), help="ours")
    made.add_argument("--against", type=Path, help="an interpreter with another ft_launcher")
    made.add_argument(
        "--launcher",
        action="append",
        choices=["torchrun"],
        default=[],
        help="measure this launcher of --python too",
    )
    made.add_argument("--repeats", type=int, default=repeats)
    made.add_argument("--flags", default="", help="further flags of ft_launcher, as one word")
    return made


def candidates(options: argparse.Namespace) -> list[Candidate]:
    """Return what is to be measured; ours comes first."""
    found = [Candidate("ours", options.python, "ft_launcher")]
    if options.against is not None:
        found.append(Candidate("against", options.against, "ft_launcher"))
    return [*found, *(Candidate(name, options.python, name) for name in options.launcher)]


def rank(mode: str, out: Path) -> list[str]:
    """Return the script of a rank and its first arguments; the mode is `bare` or `ddp`."""
    return [str(WORKERS[mode]), mode, str(out)]


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    """Give a temporary folder."""
    path = Path(tempfile.mkdtemp(prefix="nvrx-bench-"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def environment() -> dict[str, str]:
    """Return the environment of a job: nothing of a surrounding Slurm job, one thread each."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("SLURM") and k != "GROUP_RANK"}
    # Without the last one torchrun of torch 2.13 hangs when gloo starts again after a restart.
    return {
        **kept,
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }


def start(command: Sequence[str], out: Path) -> subprocess.Popen[bytes]:
    """Start a job whose output goes to a file in ``out``."""
    with (out / "log").open("wb") as log:
        return subprocess.Popen(
            command,
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def run(command: Sequence[str], out: Path) -> Events:
    """Run a job to its end and return what its workers wrote."""
    process = start(command, out)
    try:
        code = process.wait(timeout=JOB_LIMIT_S)
    except subprocess.TimeoutExpired:
        process.terminate()
        process.wait()
        raise
    if code != 0:
        raise SystemExit(f"exit code {code} of {' '.join(command)}\n{(out / 'log').read_text()}")
    return read_events(out)


def figures_of(candidate: Candidate, program: Path) -> dict[str, float]:
    """Run a program that prints its figures as one JSON object in its last line."""
    done = subprocess.run(
        [candidate.python, "-W", "ignore", program],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=PROGRAM_LIMIT_S,
        check=False,
    )
    if done.returncode != 0:
        raise SystemExit(f"exit code {done.returncode} of {program.name}\n{done.stderr}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def read_events(out: Path) -> Events:
    """Return the monotonic times that workers wrote, by cycle and rank."""
    events: Events = {}
    for path in out.glob("events_*"):
        _, cycle, rank = path.name.split("_")
        lines = (line.split() for line in path.read_text().splitlines())
        events[int(cycle), int(rank)] = {name: float(at) for at, name in lines}
    return events


def last(events: Events, cycle: int, name: str) -> float:
    """Return when the last rank of a cycle wrote an event."""
    return max(times[name] for (of, _), times in events.items() if of == cycle)


def measure(
    options: argparse.Namespace,
    once: Callable[[Candidate], Mapping[str, float]],
    unit: str = "s",
    prefix: str = "",
) -> None:
    """Measure all candidates in turn and print a JSON line per candidate and figure."""
    found = candidates(options)
    values: dict[str, dict[str, list[float]]] = {candidate.name: {} for candidate in found}
    load_before = os.getloadavg()[0]
    for _ in range(options.repeats):
        for candidate in found:
            for name, value in once(candidate).items():
                values[candidate.name].setdefault(name, []).append(value)
    loads = [round(load_before, 2), round(os.getloadavg()[0], 2)]
    for name in values["ours"]:
        ours = statistics.median(values["ours"][name])
        for candidate in found:
            row = values[candidate.name].get(name)
            if not row:
                continue
            median = statistics.median(row)
            line = {
                "figure": prefix + name,
                "candidate": candidate.name,
                "launcher": candidate.program,
                "median": round(median, 4),
                "min": round(min(row), 4),
                "max": round(max(row), 4),
                "unit": unit,
                "repeats": len(row),
                "ratio_to_ours": round(median / ours, 3) if ours else None,
                "load": loads,
            }
            print(json.dumps(line), flush=True)
