# SPDX-License-Identifier: Apache-2.0
"""Measures the per-node log aggregator: idle cost, throughput, and time from a line to the file.

Each figure is a JSON line: the median over repetitions, each in an interpreter of its own. An
install without the switch `NVRX_FORCE_NO_INOTIFY` is measured the same way in both idle cases.

usage: bench_aggregator.py [--python PY] [--against PY] [--seconds 5] [--repeats 3]
"""

from __future__ import annotations

import _measure

_PROGRAM = r"""
import json, os, statistics, sys, tempfile, threading, time
case, seconds = sys.argv[1], float(sys.argv[2])
if case == "idle_no_inotify":
    os.environ["NVRX_FORCE_NO_INOTIFY"] = "1"
from nvidia_resiliency_ext.shared_utils.log_node_local_tmp import NodeLogAggregator
HEAD = "2026-01-02 03:04:05,%03d [INFO] [n1] [workload:%d(0) infra:0(0)] a.py:1 "
pause = threading.Event().wait

def used():
    times = os.times()
    return times.user + times.system

def size(path):
    return os.stat(path).st_size if os.path.exists(path) else 0

with tempfile.TemporaryDirectory() as root:
    temp, out = root + "/temp", root + "/log/all.log"
    os.mkdir(temp, 0o700)
    ranks = 64 if case.startswith("idle") else 8
    paths = [f"{temp}/rank_{rank}_p.msg.1" for rank in range(ranks)]
    count = {"merge": 40_000, "merge_ordered": 20_000}.get(case, 1)
    total = 0
    for rank, path in enumerate(paths):
        data = "".join(HEAD % (n % 1000, rank) + "x" * 100 + "\n" for n in range(count)).encode()
        total += len(data)
        with open(path, "wb") as file:
            file.write(data)
    aggregator = NodeLogAggregator(root + "/log", temp, "all.log", 1 << 30, case == "merge_ordered")
    start = time.perf_counter()
    aggregator.start_aggregator()
    while size(out) < total and time.perf_counter() - start < 100:
        pause(0.002)
    taken = time.perf_counter() - start
    if case.startswith("merge"):
        found = {"records_per_s": ranks * count / taken, "mb_per_s": total / taken / 1e6}
    elif case.startswith("idle"):
        pause(1)
        before = used()
        pause(seconds)
        found = {"cpu_percent": (used() - before) / seconds * 100}
    else:
        waits = []
        with open(paths[0], "ab", 0) as file:
            for n in range(int(seconds * 10)):
                before = size(out)
                start = time.perf_counter()
                file.write((HEAD % (n % 1000, 0) + "x" * 100 + "\n").encode())
                while size(out) == before and time.perf_counter() - start < 10:
                    pause(0.0005)
                waits.append((time.perf_counter() - start) * 1e3)
                pause(0.08)
        found = {"p50_ms": statistics.median(waits), "max_ms": max(waits)}
    aggregator.shutdown()
print(json.dumps(found))
"""
_CASES = {
    "idle": "cpu_percent",
    "idle_no_inotify": "cpu_percent",
    "merge": "mb_per_s",
    "merge_ordered": "mb_per_s",
    "line_to_file": "p50_ms",
}


def main() -> None:
    """Print one line per case and interpreter."""
    parser = _measure.parser(__doc__, repeats=3)
    parser.add_argument("--seconds", type=float, default=5.0)
    options = parser.parse_args()
    calls = {case: [case, str(options.seconds)] for case in _CASES}
    for name, python in _measure.interpreters(options):
        found = _measure.medians(python, _PROGRAM, calls, options.repeats)
        for case, key in _CASES.items():
            _measure.show("log_aggregator", name, case, found[case], key=key)


if __name__ == "__main__":
    main()
