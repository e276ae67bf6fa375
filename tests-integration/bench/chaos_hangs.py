# SPDX-License-Identifier: Apache-2.0
"""Chaos: random ranks hang in random ways; is the right one blamed?

    python tests-integration/bench/chaos_hangs.py --trials 50 --seed 1

Two of three trials are on one node with four ranks, the third on three nodes (hosts made of
namespaces; left out where these are not permitted) with one rank each. Prints a JSON line for each
trial and one in the end; leaves with 1 when a verdict was wrong, and keeps that job's folder.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "helpers"))

from hang_trials import KINDS, Verdict, plan, run_on_hosts, run_on_one_node
from hosts import why_not

RANKS = 4
HOSTS = 3
PER_JOB = 10


def say(**fields: object) -> None:
    """Print one JSON line."""
    print(json.dumps(fields), flush=True)


def one_job(seed: int, count: int, options: argparse.Namespace, *, hosts: int) -> list[Verdict]:
    """Run one job with a trial for each cycle; keep its folder when a verdict is wrong."""
    trials = plan(seed, count, RANKS if hosts == 1 else hosts, tuple(options.only) or KINDS)
    folder = Path(tempfile.mkdtemp(prefix="nvrx-hangs-"))
    run = run_on_one_node if hosts == 1 else run_on_hosts
    found = run(folder, trials, RANKS if hosts == 1 else hosts)
    for verdict in found:
        trial = verdict.trial
        say(seed=seed, hosts=hosts, kind=trial.kind, place=trial.place, step=trial.step,
            victim=trial.victim, right=verdict.is_right, blamed=verdict.blamed,
            confidence=verdict.confidence, faults=verdict.faults, what=verdict.what)  # fmt: skip
    if all(verdict.is_right for verdict in found):
        shutil.rmtree(folder)
    else:
        say(seed=seed, hosts=hosts, folder=str(folder))
    return found


def main() -> int:
    """Run the campaign."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--trials", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1, help="of the first job")
    parser.add_argument("--only", action="append", default=[], choices=KINDS)
    parser.add_argument("--hosts", type=int, choices=(1, HOSTS), help="this many only")
    options = parser.parse_args()
    reason = why_not()
    if reason:
        say(left_out=f"jobs on {HOSTS} hosts: {reason}")
    left, seed, found = options.trials, options.seed, []
    while left > 0:
        wanted = options.hosts or (HOSTS if seed % 3 == 0 else 1)
        count = min(PER_JOB, left)
        found += one_job(seed, count, options, hosts=1 if reason else wanted)
        left, seed = left - count, seed + 1
    right = sum(verdict.is_right for verdict in found)
    say(trials=len(found), right=right, load=os.getloadavg()[:2])
    return 0 if right == len(found) else 1


if __name__ == "__main__":
    sys.exit(main())
