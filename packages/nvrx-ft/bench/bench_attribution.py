# SPDX-License-Identifier: Apache-2.0
"""Measures restarts beside an attribution service: two that answer, and eight that do not.

    python bench_attribution.py [--python PY] [--repeats 6] [--restarts 15]

Each job has two ranks without standbys and cycle logs; from SIGKILL of a rank to the first line of
the last new one. `off` is the same job without a service, and `again` is `off` once more: what it
differs by is what the machine differs by. All jobs take turns in an order that rotates, and each
turn has another time from the first step to SIGKILL, so that it hits a client in all of its states.

    answers      the service is asked, and says that a restart is useful
    unreachable  nobody listens at its address
    hangs        it takes connections and requests and never answers
    silent       its machine drops every packet (an address without a route back)
    slow         its answers are right and come after 1.5 s
    garbage      it answers what is no JSON
    types        it answers JSON of wrong types
    huge         it answers 200 MB
    dies         it closes the connection in the middle of an answer
    fails        it answers status 500
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
from pathlib import Path

import _bench

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "helpers"))

from attribution_service import NOBODY, attribution_service

RANKS = 2
# Of the block for documentation (RFC 5737): nothing answers there.
SILENT = "http://192.0.2.1:50050"
KILL_AFTER_S = (0.1, 0.3, 0.5)
MODES = ("slow", "hangs", "garbage", "types", "huge", "dies", "fails")
WITHOUT = ("off", "again")
CASES = ("answers", "unreachable", "silent", *MODES)


def one_job(options: argparse.Namespace, case: str, kill_after_s: float) -> list[float]:
    """Return the seconds of each restart of one job."""
    with contextlib.ExitStack() as stack:
        out = stack.enter_context(_bench.folder())
        flags = ["--ft-prewarm", "off"]
        flags += ["--ft-per-cycle-applog-prefix", str(out / "job.log")]
        if case not in WITHOUT:
            service = stack.enter_context(attribution_service())
            service.decides({"action": "RESTART", "reason": "a rank was killed"})
            service.mode = case if case in MODES else "well"
            url = {"unreachable": NOBODY, "silent": SILENT}.get(case, service.url)
            flags += ["--ft-attribution-endpoint", url]
            flags += ["--ft-attribution-stop-action", "no-restart"]
        candidate = _bench.Candidate(case, options.python, "ft_launcher")
        command = candidate.command(RANKS, options.restarts + 1, flags)
        command += [*_bench.rank("bare", out), "--kill-rank", "0"]
        command += ["--kill-after-s", str(kill_after_s), "--kill-cycles", str(options.restarts)]
        command += ["--steps", "1", "--step-s", str(kill_after_s + 0.4)]
        events = _bench.run(command, out)
        killed = [events[cycle, 0]["killed"] for cycle in range(options.restarts)]
        back = [_bench.last(events, cycle + 1, "first_line") for cycle in range(options.restarts)]
        # The first restart loads code.
        return [after - before for before, after in zip(killed, back, strict=True)][1:]


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--python", type=Path, default=Path(sys.executable))
    parser.add_argument("--repeats", type=int, default=6)
    parser.add_argument("--restarts", type=int, default=15)
    parser.add_argument("--case", action="append", choices=CASES)
    options = parser.parse_args()
    cases = (*WITHOUT, *(options.case or CASES))
    seconds: dict[str, list[float]] = {case: [] for case in cases}
    load_before = os.getloadavg()[0]
    for turn in range(options.repeats):
        first = turn // len(KILL_AFTER_S) % len(cases)
        for case in cases[first:] + cases[:first]:
            seconds[case] += one_job(options, case, KILL_AFTER_S[turn % len(KILL_AFTER_S)])
    loads = [round(load_before, 2), round(os.getloadavg()[0], 2)]
    without = statistics.median(seconds["off"])
    for case, row in seconds.items():
        median = statistics.median(row)
        line = {
            "figure": f"restart beside attribution: {case}",
            "median": round(median, 4),
            "min": round(min(row), 4),
            "max": round(max(row), 4),
            "unit": "s",
            "repeats": len(row),
            "ratio_to_off": round(median / without, 3),
            "load": loads,
        }
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
