# SPDX-License-Identifier: Apache-2.0
"""Runs jobs with random faults, and says which trials did not end as they must."""

from __future__ import annotations

import os
import signal
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jobs
from fork_server import ForkServer

from nvidia_resiliency_ext.shared_utils import procfs
from nvidia_resiliency_ext.shared_utils.children import PidHandle

sys.path.insert(0, str(jobs.PROGRAMS))
from chaos_plan import ACTIVE, WORLD, Trial, plan

LEFT = 3
_BY_HARD_TIMEOUT = (-signal.SIGTERM, -signal.SIGKILL)
_DEATHS = (-signal.SIGKILL, -signal.SIGSEGV, -signal.SIGABRT)
# Of a busy machine, where a new monitor takes long to start; the program's soft timeout is 4 s,
# its hard one 10 s with 2 s of grace.
_PATIENCE_S = 60.0
_SOFT_S, _HARD_S, _GRACE_S = 4.0, 10.0, 2.0
_LAST_S = 20.0


@dataclass
class Report:
    """What became of a job.

    Attributes:
        wrong: What did not end as it must.
        seconds: How long each trial took, on its slowest rank, by kind.
        cells: How often each cell was tried.
    """

    wrong: list[str] = field(default_factory=list)
    seconds: dict[str, list[float]] = field(default_factory=dict)
    cells: Counter[Any] = field(default_factory=Counter)


def run_job(server: ForkServer, folder: Path, seed: int, job: int, trials: int) -> Report:
    """Run one job of a campaign."""
    planned = plan(seed, job, trials)
    words = (str(seed), str(job), str(trials))
    ended = jobs.run_program(server, folder, WORLD, "chaos_rank.py", *words)
    report = Report()
    name = f"seed {seed} job {job}"
    for rank, end in enumerate(ended):
        for problem in _of_rank(rank, planned, end):
            report.wrong.append(f"{name} rank {rank}: {problem}\n{end.text[-6000:]}")
    for trial in planned:
        results = [r for end in ended for r in end.results if r["number"] == trial.number]
        report.wrong += [f"{name}: {trial} {text}" for text in _of_all(trial, results)]
        report.cells[trial.cell] += 1
        longest = max((result["s"] for result in results), default=0.0)
        report.seconds.setdefault(trial.cell.kind, []).append(longest)
    report.wrong += [f"{name}: {text}" for text in _left_behind(folder)]
    return report


def _of_rank(rank: int, planned: list[Trial], end: jobs.Ended) -> list[str]:
    """Return what is wrong with the end of one rank and its results."""
    last = planned[-1]
    problems = []
    expected = _codes(last) if rank in last.lost else (0,)
    if end.code not in expected:
        problems.append(f"exit code {end.code}, not one of {expected}; {last}")
    is_told = rank not in last.lost or end.code == LEFT
    missing = len(planned) - (0 if is_told else 1) - len(end.results)
    if missing > 0:
        problems.append(f"{missing} trials without an end")
    for trial, result in zip(planned, end.results, strict=False):
        if ("error" in result) != (rank in trial.lost):
            problems.append(f"{trial} ended with {result}")
        if result["threads"]:
            problems.append(f"{trial} left threads: {result}")
        if result["s"] > _limit_s(trial):
            problems.append(f"{trial} took {result['s']} s, more than {_limit_s(trial)}")
    return problems


def _of_all(trial: Trial, results: list[dict[str, Any]]) -> list[str]:
    """Return what is wrong with the values of all ranks that went on."""
    going = [result for result in results if "value" in result]
    values = [result["value"] for result in going if result["value"] is not None]
    size = min(ACTIVE, WORLD - len(trial.lost))
    problems = []
    if len(going) != WORLD - len(trial.lost):
        problems.append(f"has {len(going)} ends without an error: {results}")
    if any(total != expected for total, expected, *_ in values):
        problems.append(f"has wrong sums: {values}")
    iterations = {result["iteration"] for result in going}
    if trial.cell.moment == "completion" and iterations == {0}:
        # It came too late: the call was over. Who had completed was counted.
        return problems + [f"has {values}" for *_, found in values if found != ACTIVE]
    if any(found != size for *_, found in values) or len(values) != size:
        problems.append(f"has {len(values)} values, expected of {size}: {values}")
    if len(iterations) != 1 or (min(iterations) > 0) is not trial.cell.restarts:
        problems.append(f"ended in iterations {iterations}")
    return problems


def _codes(trial: Trial) -> tuple[int, ...]:
    if trial.cell.is_hang:
        return _BY_HARD_TIMEOUT
    return _DEATHS if trial.cell.kind == "kill" else (LEFT,)


def _limit_s(trial: Trial) -> float:
    if trial.cell.is_hang:
        return _HARD_S + _GRACE_S + _PATIENCE_S
    return _PATIENCE_S + (_SOFT_S if trial.cell.kind == "sleep" else 0.0)


def _left_behind(folder: Path) -> list[str]:
    """Return which processes and files are still there when all should have gone."""
    problems = []
    # Its processes and directories are known by it; store servers and monitors end after ranks.
    for process in procfs.processes_with_environ("TMPDIR", str(folder)):
        try:
            handle = PidHandle(process.pid, process.start_ticks)
        except ProcessLookupError:
            continue
        if not handle.wait(_LAST_S):
            command = Path(f"/proc/{process.pid}/cmdline").read_bytes().replace(b"\0", b" ")
            problems.append(f"process {process.pid} stays: {command!r}")
        handle.close()
    places = [name for name in os.listdir(folder) if name.startswith("nvrx-")]
    return [*problems, *(f"{name} stays" for name in places)]
