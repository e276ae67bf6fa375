# SPDX-License-Identifier: Apache-2.0
"""Print every figure that nvrx-attribution must reach, with its limit: one JSON line each.

`python packages/nvrx-attribution/bench/figures.py [--quick] [--first SEED]`

Speed comes from `bench_speed.py`, shares of right answers from `score.py`; both run alone, too.
The exit code is 1 when a figure misses its limit.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
# (figure, other values that it must have, key, least or most, limit)
LIMITS: tuple[tuple[str, dict[str, Any], str, str, float], ...] = (
    ("scan_plain", {}, "mb_per_cpu_s", "least", 200),
    ("scan_dense", {}, "mb_per_cpu_s", "least", 40),
    ("scan_plain", {}, "mib", "most", 64),
    ("scan_dense", {}, "mib", "most", 64),
    ("traces", {"ranks": 4096}, "load_and_analyse_s", "most", 8),
    ("traces", {"ranks": 4096}, "analyse_s", "most", 2),
    ("traces", {"ranks": 4096}, "mib", "most", 1536),
    ("traces", {"ranks": 1024}, "load_and_analyse_s", "most", 2),
    ("traces", {}, "right", "least", True),
    ("traces_growth", {}, "cpu_s_for_twice_the_ranks", "most", 2.3),
    ("snapshot", {}, "p99_ms", "most", 50),
    ("follow", {}, "verdict_s", "most", 1),
    ("import", {}, "ms", "most", 60),
    ("help", {}, "ms", "most", 150),
    ("logs", {}, "code", "least", 0.95),
    ("logs", {}, "rank", "least", 0.95),
    ("logs", {}, "action", "least", 0.98),
    ("logs", {}, "node", "least", 0.85),
    ("logs", {}, "line", "least", 0.85),
    ("logs", {}, "false_stop", "most", 0),
    ("logs", {}, "missed_stop_share", "most", 0.05),
    ("traces_right", {}, "exact", "least", 0.95),
    ("traces_right", {}, "accused_healthy", "most", 0),
    ("traces_recorded", {}, "exact", "least", 1),
    ("histories", {}, "exact", "least", 1),
    ("written_failures", {}, "code", "least", 0.95),
    ("written_failures", {}, "action", "least", 0.98),
    ("written_failures", {}, "rank", "least", 0.95),
    ("written_failures", {}, "false_stop", "most", 0),
    ("unseen_failures", {}, "false_stop", "most", 0),
)


def evaluate(found: dict[str, Any]) -> dict[str, Any]:
    """Return a figure with the limits that hold for it, and whether it keeps them."""
    limits = {
        f"{word} {key}": limit
        for name, values, key, word, limit in LIMITS
        if name == found["figure"] and values.items() <= found.items()
    }
    is_kept = all(
        found[text.split()[1]] >= limit
        if text.startswith("least")
        else found[text.split()[1]] <= limit
        for text, limit in limits.items()
    )
    return {**found, "limits": limits, "reached": is_kept}


def run(arguments: list[str]) -> list[dict[str, Any]]:
    """Run a program of this folder; return the figures that it prints."""
    found = []
    command = [sys.executable, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        for line in program.stdout:
            found.append(evaluate(json.loads(line)))
            print(json.dumps(found[-1]), flush=True)
    if program.returncode:
        raise SystemExit(program.returncode)
    return found


def main() -> int:
    """Print all figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small logs, few seeds and ranks")
    parser.add_argument("--first", default="1000", help="first seed (%(default)s)")
    args = parser.parse_args()
    speed = ["--mb", "20", "--ranks", "256"] if args.quick else ["--mb", "200"]
    seeds = ["--seeds", "2", "--sizes", "16:2"] if args.quick else []
    found = run([str(HERE / "bench_speed.py"), *speed])
    found += run([str(HERE / "score.py"), "--first", args.first, *seeds])
    return 0 if all(figure["reached"] for figure in found) else 1


if __name__ == "__main__":
    sys.exit(main())
