# SPDX-License-Identifier: Apache-2.0
"""Measures what the main thread pays for being interruptible, and how soon it is interrupted.

One JSON line per figure: an atomic block (us), entering and leaving the interrupter (us), from the
request until the main thread is out of a Python loop, `time.sleep` and `queue.get` (ms, median and
worst), and the CPU time of a watchdog (percent of a core) that stamps once per second. All are
parts of this package, so there is nothing to compare with; `--python` chooses the install.

    python bench_interrupt.py [--python PY] [--repeats 5] [--watchdog-seconds 10]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from typing import Any

PROGRAM = r"""
import json, queue, statistics, sys, threading, time, timeit
from nvidia_resiliency_ext.inprocess._call.interrupt import AtomicLock, MainThreadInterrupter
from nvidia_resiliency_ext.inprocess._call.interrupt import RankShouldRestart
from nvidia_resiliency_ext.inprocess._call.watchdog import Watchdog

interrupter, lock = MainThreadInterrupter(), AtomicLock()
number = 200_000
empty = min(timeit.repeat("pass", number=number, repeat=3))
block = min(timeit.repeat("with atomic(): pass", number=number, repeat=3,
                          globals={"atomic": lambda: lock}))
print(json.dumps({"case": "atomic block", "us": (block - empty) / number * 1e6}))

def stay():
    with interrupter:
        pass

stays = min(timeit.repeat(stay, number=500)) / 500
print(json.dumps({"case": "enter and leave", "us": stays * 1e6}))

def spin():
    while True:
        pass

never = queue.Queue()
cases = {"loop": spin, "sleep": lambda: time.sleep(600), "queue": never.get}
for name, function in cases.items():
    taken = []
    for _ in range(50):
        begun = []
        def interrupt():
            threading.Event().wait(0.02)
            begun.append(time.perf_counter())
            with lock:
                interruption = interrupter.begin("")
            interruption.see_out(60, lock)
        thread = threading.Thread(target=interrupt)
        thread.start()
        try:
            with interrupter:
                function()
        except RankShouldRestart:
            taken.append(time.perf_counter() - begun[0])
        thread.join()
    print(json.dumps({"case": "interrupt " + name, "ms": statistics.median(taken) * 1e3,
                      "worst_ms": max(taken) * 1e3}))

class Target:
    count = 0
    def stamp_auto(self):
        self.count += 1

seconds = float(sys.argv[1])
target = Target()
def cpu_of_waiting(seconds):
    start = time.process_time()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(0.2)
    return time.process_time() - start
without = cpu_of_waiting(seconds)
watchdog = Watchdog(target.stamp_auto, 1.0)
watchdog.start()
with_it = cpu_of_waiting(seconds)
watchdog.stop()
print(json.dumps({"case": "watchdog", "percent": max(0.0, with_it - without) / seconds * 100,
                  "stamps": float(target.count)}))
"""


def main() -> None:
    """Print one line per case."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", default=sys.executable, help="interpreter under test")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--watchdog-seconds", type=float, default=10.0)
    options = parser.parse_args()
    runs: dict[str, list[dict[str, Any]]] = {}
    for _ in range(options.repeats):
        for line in _run(options.python, str(options.watchdog_seconds)):
            found = json.loads(line)
            runs.setdefault(found.pop("case"), []).append(found)
    for case, figures in runs.items():
        medians = {
            name: round(statistics.median(run[name] for run in figures), 4) for name in figures[0]
        }
        print(json.dumps({"bench": "interrupt", "case": case, **medians}), flush=True)


def _run(python: str, *arguments: str) -> list[str]:
    with tempfile.TemporaryDirectory() as directory:
        done = subprocess.run(
            [python, "-c", PROGRAM, *arguments],
            capture_output=True,
            text=True,
            timeout=300,
            cwd=directory,
            check=False,
        )
    if done.returncode:
        sys.exit(done.stderr)
    return done.stdout.splitlines()


if __name__ == "__main__":
    main()
