# SPDX-License-Identifier: Apache-2.0
"""Random faults in jobs of four ranks, in every moment of a call; 20 trials a job.

Needs the tests of this package beside it.

    python chaos_calls.py [--trials 500] [--seed 1]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))

import chaos as campaign

PER_JOB = 20


def main() -> int:
    """Run the campaign; exit code 1 when a trial did not end as it must."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1, help="of the first job")
    options = parser.parse_args()
    begun = time.monotonic()
    wrong: list[str] = []
    took: list[float] = []
    done = 0
    for number in range(-(-options.trials // PER_JOB)):
        with tempfile.TemporaryDirectory(prefix="nvrx-chaos-") as folder:
            found, seconds = campaign.failures(Path(folder), options.seed + number, PER_JOB)
        done += PER_JOB
        wrong += found
        took += seconds
        for text in found:
            print(text, flush=True)
    summary = {
        "trials": done,
        "wrong": len(wrong),
        "median_s": round(statistics.median(took), 3),
        "longest_s": max(took),
        "seconds": round(time.monotonic() - begun),
        "load": round(os.getloadavg()[0], 2),
    }
    print(json.dumps(summary), flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
