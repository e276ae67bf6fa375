# SPDX-License-Identifier: Apache-2.0
"""Measures restarts in the process: from a fault until every rank is in the function again.

Cases: an exception on one of four ranks, on all of them, SIGKILL of an active rank beside a
reserve, each at default times and with 10 ms intervals and no last call; such a kill while all
other active ranks raise, as in a collective; a rank that sleeps through
a soft timeout of 2 s; calls of an empty function by one rank.

    python bench_restart.py [--python PY] [--against PY2] [--case exception] [--repeats 5]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "tests-support"))

import ports

WORKER = Path(__file__).with_name("_worker.py")
LIMIT_S = 150
SMALL = {
    "monitor_thread_interval": 0.01,
    "monitor_process_interval": 0.01,
    "heartbeat_interval": 0.01,
    "progress_watchdog_interval": 0.01,
    "last_call_wait": 0.0,
}
SOFT = {"soft_timeout": 2.0, "hard_timeout": 30.0, "last_call_wait": 0.0}

Scenario = dict[str, Any]
CASES: dict[str, tuple[int, Scenario]] = {
    "exception, defaults": (4, {"faults": {"0": {"1": "raise"}}}),
    "exception, small": (4, {"faults": {"0": {"1": "raise"}}, "times": SMALL}),
    "exception on all, defaults": (4, {"faults": {"0": {"all": "raise"}}}),
    "exception, small, 8 ranks": (8, {"faults": {"0": {"1": "raise"}}, "times": SMALL}),
    "kill with a reserve, defaults": (4, {"faults": {"0": {"1": "kill"}}, "active": 3}),
    "kill with a reserve, small": (
        4,
        {"faults": {"0": {"1": "kill"}}, "active": 3, "times": SMALL},
    ),
    "kill, the others raise, defaults": (
        4,
        {"faults": {"0": {"1": "kill", "0": "raise", "2": "raise"}}, "active": 3},
    ),
    "kill of rank 0 with a reserve, defaults": (4, {"faults": {"0": {"0": "kill"}}, "active": 3}),
    "asleep, soft timeout 2 s": (2, {"faults": {"0": {"1": "sleep"}}, "times": SOFT}),
}


def run(python: Path, ranks: int, scenario: Scenario) -> dict[int, list[dict[str, Any]]]:
    """Run a job of one node; return each rank's events."""
    # Not a port that the system gave: a connection of the job before may still hold it.
    with tempfile.TemporaryDirectory(prefix="nvrx-bench-") as folder, ports.claimed(3) as port:
        text = json.dumps({**scenario, "out": folder})
        base = {k: v for k, v in os.environ.items() if k != "LOCAL_RANK"}
        base |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
        started = []
        for rank in range(ranks):
            # Ranks that share a directory for temporary files share a monitor.
            node = Path(folder, f"n{rank * scenario.get('nodes', 1) // ranks}")
            node.mkdir(exist_ok=True)
            own = {"RANK": str(rank), "TMPDIR": str(node), "XDG_RUNTIME_DIR": str(node)}
            started.append(subprocess.Popen([python, WORKER, text], env={**base, **own}))
        try:
            codes = [process.wait(LIMIT_S) for process in started]
        finally:
            for process in started:
                process.kill()
                process.wait()
        faulty = [code for code in codes if code not in (0, -9)]
        if faulty:
            raise SystemExit(f"exit codes {codes}")
        return {
            rank: [json.loads(line) for line in path.read_text().splitlines()]
            for rank in range(ranks)
            if (path := Path(folder, f"events_{rank}")).exists()
        }


def restart_s(events: dict[int, list[dict[str, Any]]]) -> float:
    """Return the seconds from the last fault to the last entry into iteration 1."""
    every = [event for rank in events.values() for event in rank]
    fault = max(event["t"] for event in every if event["what"] == "fault")
    entered = [e["t"] for e in every if e["what"] == "entered" and e["iteration"] == 1]
    return max(entered) - fault


def calls_s(events: dict[int, list[dict[str, Any]]]) -> list[float]:
    """Return how long each call took."""
    called = [event["t"] for event in events[0] if event["what"] == "called"]
    returned = [event["t"] for event in events[0] if event["what"] == "returned"]
    return [end - start for start, end in zip(called, returned, strict=True)]


def say(figure: str, python: Path, values: list[float]) -> None:
    """Print one figure."""
    load = round(os.getloadavg()[0], 2)
    line = {
        "figure": figure,
        "python": str(python),
        "median": round(statistics.median(values), 4),
        "min": round(min(values), 4),
        "max": round(max(values), 4),
        "unit": "s",
        "repeats": len(values),
        "load": load,
    }
    print(json.dumps(line), flush=True)


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", type=Path, default=Path(sys.executable))
    parser.add_argument("--against", type=Path)
    parser.add_argument("--case", help="only cases that contain this")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    pythons = [options.python, *([options.against] if options.against else [])]
    for name, (ranks, scenario) in CASES.items():
        if options.case and options.case not in name:
            continue
        values: dict[Path, list[float]] = {python: [] for python in pythons}
        for _ in range(options.repeats):
            for python in pythons:
                values[python].append(restart_s(run(python, ranks, scenario)))
        for python in pythons:
            say(f"restart: {name}", python, values[python])
    if not options.case or options.case in "empty call":
        for python in pythons:
            events = run(python, 1, {"calls": options.repeats + 1, "meets": False})
            first, *later = calls_s(events)
            say("empty call: the first", python, [first])
            say("empty call: from the second on", python, later)


if __name__ == "__main__":
    main()
