# SPDX-License-Identifier: Apache-2.0
"""Chaos: random faults in one job on four hosts made of namespaces, three working and one spare.

    python tests-integration/bench/chaos_nodes.py --faults 300 --per-job 20

Prints a JSON line for each fault (seed, kind, victim, recovery, restarts) and one with medians by
kind in the end. Odd seeds keep the store under `nvrx-control`, even ones in the first launcher.
A failure leaves with 1 and says how to make that job again; its folder is kept.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "helpers"))

from chaos import Campaign, Outcome, hosts_needed
from chaos_plan import CONTROL_KINDS, KINDS, plan
from hosts import Network, why_not
from many_nodes import NodesJob


def say(**fields: object) -> None:
    """Print one JSON line."""
    print(json.dumps(fields), flush=True)


def one_job(seed: int, count: int, options: argparse.Namespace) -> list[Outcome]:
    """Run one job with its faults; keep its folder when something is wrong."""
    control = bool(seed % 2)
    only = tuple(options.only)
    if not control:
        only = tuple(kind for kind in only if kind not in CONTROL_KINDS)
    faults = plan(seed, count, control=control, only=only)
    folder = Path(tempfile.mkdtemp(prefix="nvrx-chaos-"))
    with Network(hosts_needed(control=control), keep=[folder], clocks_apart=True) as network:
        job = NodesJob(network, folder)
        campaign = Campaign(network, job, control=control, report=lambda text: told(options, text))
        try:
            outcomes = campaign.run(faults)
        except BaseException:
            made = len(campaign.outcomes)
            again = f"--seed {seed} --faults {count} --per-job {count}"
            again += "".join(f" --only {kind}" for kind in options.only)
            say(failed_in=made, fault=asdict(faults[min(made, count - 1)]), again=again,
                folder=str(folder))  # fmt: skip
            raise
        finally:
            for outcome in campaign.outcomes:
                shown = {name: value for name, value in asdict(outcome).items() if name != "fault"}
                say(seed=seed, number=outcome.fault.number, kind=outcome.fault.kind, **shown)
    shutil.rmtree(folder)
    return outcomes


def told(options: argparse.Namespace, text: str) -> None:
    """Print what is about to happen, if that is wanted."""
    if options.verbose:
        print(text, file=sys.stderr, flush=True)


def main() -> int:
    """Run the campaign."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--seed", type=int, default=1, help="of the first job")
    parser.add_argument("--faults", type=int, default=300)
    parser.add_argument("--per-job", type=int, default=20)
    parser.add_argument("--only", action="append", default=[], choices=[*KINDS, *CONTROL_KINDS])
    parser.add_argument("--limit-s", type=float, help="begin no further job after this time")
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    if reason := why_not():
        print(reason, file=sys.stderr)
        return 2
    began, outcomes, seed = time.monotonic(), [], options.seed
    failed = []
    while len(outcomes) < options.faults and not failed:
        if options.limit_s is not None and time.monotonic() - began > options.limit_s:
            break
        count = min(options.per_job, options.faults - len(outcomes))
        try:
            outcomes += one_job(seed, count, options)
        except AssertionError as error:
            print(error, file=sys.stderr)
            failed.append(seed)
        seed += 1
    times = collections.defaultdict(list)
    for outcome in outcomes:
        if outcome.recovery_s is not None:
            times[outcome.fault.kind].append(outcome.recovery_s)
    say(
        summary=True,
        faults=len(outcomes),
        restarts=sum(outcome.restarts for outcome in outcomes),
        failed_seeds=failed,
        next_seed=seed,
        median_s={kind: round(statistics.median(times[kind]), 3) for kind in sorted(times)},
        longest_s={kind: max(times[kind]) for kind in sorted(times)},
        counted={kind: len(times[kind]) for kind in sorted(times)},
        seconds=round(time.monotonic() - began),
        load=round(os.getloadavg()[0], 2),
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
