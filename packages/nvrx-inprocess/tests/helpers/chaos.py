# SPDX-License-Identifier: Apache-2.0
"""Runs jobs with random faults, and says which trials did not end as they must."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import jobs

RANKS = 4
_PROGRAM = jobs.PROGRAMS / "chaos_rank.py"


def load_plan(folder: Path, seed: int, trials: int) -> list[Any]:
    """Return the trials of a seed, as the ranks draw them."""
    spec = importlib.util.spec_from_file_location("chaos_rank", _PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    module: ModuleType = importlib.util.module_from_spec(spec)
    environ = {"RANK": "0", "WORLD_SIZE": str(RANKS), "MASTER_PORT": "1"}
    words = [str(_PROGRAM), str(folder), str(seed), str(trials)]
    with mock.patch.dict(os.environ, environ), mock.patch.object(sys, "argv", words):
        sys.modules["chaos_rank"] = module
        spec.loader.exec_module(module)
        planned: list[Any] = module.plan(seed, trials)
    return planned


def failures(folder: Path, seed: int, trials: int) -> tuple[list[str], list[float]]:
    """Run the trials of a seed; return what went wrong, and how long each trial took."""
    planned = load_plan(folder, seed, trials)
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
