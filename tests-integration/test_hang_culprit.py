# SPDX-License-Identifier: Apache-2.0
"""Scenarios: a rank hangs in one of many ways while the others wait; the right one is blamed.

A bounded form of `bench/chaos_hangs.py`, with real DDP over gloo.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from fault_jobs import LAUNCHER
from hang_trials import KINDS, PROGRAM, plan, run_on_hosts, run_on_one_node

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hang_trials import Trial, Verdict

RANKS = 3
# Kinds that are tried on several hosts; the others are tried on one.
ON_HOSTS = ("stop", "deadlock", "exit-slowly")
LIMIT_S = 480.0


@pytest.fixture
def folder() -> Iterator[Path]:
    """Give an empty folder with a short path."""
    made = Path(tempfile.mkdtemp(prefix="nvrx-it-"))
    yield made
    shutil.rmtree(made, ignore_errors=True)


def check(run: Callable[[Path, list[Trial], int], list[Verdict]], *args: object) -> None:
    """Run trials and show all verdicts when one is wrong."""
    found = run(*args)  # type: ignore[arg-type]
    assert all(verdict.is_right for verdict in found), "\n".join(map(str, found))


@pytest.mark.timeout(LIMIT_S)
def test_the_rank_that_hangs_is_blamed_and_not_one_that_waits(folder: Path) -> None:
    """Each of these kinds once, in random ranks and places: one fault, with the right rank."""
    kinds = [kind for kind in KINDS if kind not in ON_HOSTS]
    check(run_on_one_node, folder, plan(9, len(kinds), RANKS, kinds), RANKS)


def test_the_rank_that_hangs_before_all_meet_is_blamed(folder: Path) -> None:
    """A rank without a client has broken no limit: those that wait for its store have, and wait."""
    log = folder / "log"
    command = [
        *(sys.executable, "-m", LAUNCHER, "--standalone", "--nproc-per-node", str(RANKS)),
        *("--max-restarts", "1", "--log-dir", str(folder), "--ft-prewarm", "off"),
        *("--ft-rank-section-timeouts", "setup:15", str(PROGRAM.with_name("hanging_start.py"))),
    ]
    with log.open("wb") as output:
        ended = subprocess.run(
            command, stdout=output, stderr=output, timeout=LIMIT_S / 2, check=False
        )
    record = json.loads((folder / "failures.jsonl").read_text().splitlines()[0])
    assert (ended.returncode, record["rank"]) == (0, 0), log.read_text()


@pytest.mark.netns
@pytest.mark.timeout(LIMIT_S)
def test_the_rank_of_another_host_is_blamed_by_all(folder: Path) -> None:
    """With a rank on each of three hosts every host's record blames the one that hangs."""
    trials = plan(11, len(ON_HOSTS), RANKS, ON_HOSTS)
    check(run_on_hosts, folder, trials, RANKS)
