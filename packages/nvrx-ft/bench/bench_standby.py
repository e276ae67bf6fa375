# SPDX-License-Identifier: Apache-2.0
"""Measures what standby workers save: start to the end of the first DDP step, warm and cold.

    python packages/nvrx-ft/bench/bench_standby.py [--ranks 4] [--repeat 5]

One JSON line per figure, medians over the repetitions: seconds from "go" (or from the start of
fresh processes) to the end of the first step of the last rank, seconds of warm-up with all at
once, private memory of a waiting standby.
"""

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "helpers"))

import standby_crew


def last_step(results: list[dict[str, float]]) -> float:
    """Return when the slowest rank had done its first step."""
    return max(rank["first_step_at"] for rank in results)


def measure(folder: Path, ranks: int) -> dict[str, float]:
    """Return the figures of one repetition."""
    cold_at, cold = standby_crew.train_cold(folder / "cold", ranks)
    crew, ready = standby_crew.hold(folder / "warm", ranks)
    go_at, warm = standby_crew.train_warm(folder / "warm", crew)
    early, _ = standby_crew.hold(folder / "early", ranks, wait=False)
    early_at, overtaken = standby_crew.train_warm(folder / "early", early)
    return {
        "cold_first_step_s": last_step(cold) - cold_at,
        "warm_first_step_s": last_step(warm) - go_at,
        "go_at_once_first_step_s": last_step(overtaken) - early_at,
        "warm_up_s": max(news.seconds for news in ready),
        "private_mb": max((news.private_bytes or 0) / 1e6 for news in ready),
    }


def main() -> None:
    """Repeat, and print medians."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()
    runs = []
    for _ in range(options.repeat):
        with tempfile.TemporaryDirectory() as folder:
            runs.append(measure(Path(folder), options.ranks))
    for name in runs[0]:
        values = [run[name] for run in runs]
        line = {
            "figure": name,
            "median": round(statistics.median(values), 4),
            "worst": round(max(values), 4),
            "ranks": options.ranks,
            "repeat": options.repeat,
        }
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
