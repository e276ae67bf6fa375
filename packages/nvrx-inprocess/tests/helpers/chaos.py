# SPDX-License-Identifier: Apache-2.0
"""Runs jobs with random faults, and says which trials did not end as they must."""

from __future__ import annotations

import sys
from pathlib import Path

import jobs

sys.path.insert(0, str(jobs.PROGRAMS))
from chaos_plan import plan

RANKS = 4


def failures(folder: Path, seed: int, trials: int) -> tuple[list[str], list[float]]:
    """Run the trials of a seed; return what went wrong, and how long each trial took."""
    planned = plan(seed, trials, RANKS)
    ended = jobs.run_program(folder, RANKS, "chaos_rank.py", str(seed), str(trials))
    wrong: list[str] = []
    took: list[float] = []
    for rank, end in enumerate(ended):
        killed = rank in planned[-1].victims
        if end.code != (-9 if killed else 0):
            wrong.append(f"seed {seed} rank {rank}: exit code {end.code}\n{end.text[-2000:]}")
        for trial, result in zip(planned, end.results, strict=False):
            took.append(result["s"])
            value = result["value"]
            is_right = value is None or value[0] == value[1]
            if not is_right or result["iteration"] < 1:
                wrong.append(f"seed {seed} rank {rank}: {trial} ended with {result}")
        missing = trials - (1 if killed else 0) - len(end.results)
        if missing > 0:
            wrong.append(f"seed {seed} rank {rank}: {missing} trials without an end")
    return wrong, took
