# SPDX-License-Identifier: Apache-2.0
"""Random faults in jobs of four ranks: every kind, in every moment of a call, to every rank.

A campaign goes through all cells of kind x moment x rank that can be, in an order that follows from
the seed. Of the trials of a job only the last one loses ranks. `--from-job` goes on with one, and
`--kind`, `--moment` and `--who` run only those jobs of it that end with such a cell.

    python chaos_calls.py [--trials 500] [--seed 1] [--per-job 3] [--from-job 0]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))
sys.path.insert(0, str(Path(__file__).parents[3] / "tests-support"))

import chaos
import jobs
from chaos_plan import cells, plan


def main() -> int:
    """Run the campaign; exit code 1 when a trial did not end as it must."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--per-job", type=int, default=3, help="trials in one set of processes")
    parser.add_argument("--from-job", type=int, default=0)
    for name in ("kind", "moment", "who"):
        parser.add_argument(f"--{name}", help="only jobs that end with such a cell")
    options = parser.parse_args()
    begun = time.monotonic()
    wrong: list[str] = []
    took: dict[str, list[float]] = {}
    tried: Counter[Any] = Counter()
    job = options.from_job
    while sum(tried.values()) < options.trials:
        last = plan(options.seed, job, options.per_job)[-1].cell
        wanted = ((options.kind, last.kind), (options.moment, last.moment), (options.who, last.who))
        if all(asked in (None, found) for asked, found in wanted):
            # A short name: Unix sockets lie below it.
            with (
                tempfile.TemporaryDirectory(prefix="nvrx-chaos-") as folder,
                jobs.server_of(jobs.TORCH_WITH_DDP) as server,
            ):
                report = chaos.run_job(server, Path(folder), options.seed, job, options.per_job)
            tried += report.cells
            wrong += report.wrong
            for kind, seconds in report.seconds.items():
                took.setdefault(kind, []).extend(seconds)
            for text in report.wrong:
                print(text, flush=True)
        job += 1
        if job > options.from_job + 10 * options.trials:
            break
    summary = {
        "trials": sum(tried.values()),
        "wrong": len(wrong),
        "cells": f"{len(tried)} of {len(cells())}",
        "next_job": job,
        "median_s": {kind: round(statistics.median(all_), 3) for kind, all_ in took.items()},
        "longest_s": {kind: max(all_) for kind, all_ in took.items()},
        "seconds": round(time.monotonic() - begun),
        "load": round(os.getloadavg()[0], 2),
    }
    print(json.dumps(summary), flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
