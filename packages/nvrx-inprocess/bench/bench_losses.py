# SPDX-License-Identifier: Apache-2.0
"""Measures what is lost, and what restarts leave behind: a node, rank 0, a monitor; 200 restarts.

Four ranks. A node is lost when its ranks and its monitor are killed at once; others must be in the
function again, and return. Of a monitor that is killed nobody may notice anything. After 20 and
after 200 restarts each rank says what it and its monitor hold.

    python bench_losses.py [--python PY] [--case node] [--repeats 5]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

from bench_restart import restart_s, run

RANKS = 4
NODE = {
    "nodes": 2,
    "with": [2],
    "pid_files": True,
    "faults": {"0": {"3": "lose node"}},
}
WATCHFUL = {"heartbeat_interval": 0.1, "heartbeat_timeout": 0.8, "monitor_process_interval": 0.1}
LOSSES: dict[str, dict[str, Any]] = {
    "node, found after 0.8 s, no last call": {**NODE, "times": {**WATCHFUL, "last_call_wait": 0.0}},
    "node, defaults (30 s)": NODE,
    "process of rank 0, defaults": {"faults": {"0": {"0": "kill"}}, "active": 3},
}
MONITOR: dict[str, Any] = {"pid_files": True, "faults": {"0": {"all": "lose monitor"}}}
MANY: dict[str, Any] = {
    "pid_files": True,
    "restarts": 200,
    "sampled": [20, 200],
    "times": {"last_call_wait": 0.0},
}


def say(figure: str, **values: Any) -> None:
    """Print one line."""
    load = round(os.getloadavg()[0], 2)
    print(json.dumps({"figure": figure, **values, "load": load}), flush=True)


def losses(python: Path, name: str, scenario: dict[str, Any], repeats: int) -> None:
    """Say how long it takes until all who are left are in the function again."""
    values = []
    for _ in range(repeats):
        events = run(python, RANKS, scenario)
        lost = {3, *scenario["with"]} if "with" in scenario else {0}
        for rank in set(range(RANKS)) - lost:
            if not any(event["what"] == "returned" for event in events[rank]):
                raise SystemExit(f"rank {rank} has not returned")
        values.append(round(restart_s(events), 4))
    median = statistics.median(values)
    say(f"lost: {name}", median=median, max=max(values), unit="s", repeats=repeats)


def monitor(python: Path, repeats: int) -> None:
    """Say how long ranks are without a monitor, and how often anybody restarts for it."""
    values, restarts = [], 0
    for _ in range(repeats):
        events = run(python, RANKS, MONITOR)
        every = [event for rank in events.values() for event in rank]
        fault = min(event["t"] for event in every if event["what"] == "fault")
        served = max(event["t"] for event in every if event["what"] == "served")
        values.append(round(served - fault, 4))
        restarts += sum(e["what"] == "entered" and e["iteration"] > 0 for e in every)
    median = statistics.median(values)
    say("lost: monitor, until another one serves", median=median, unit="s", restarts=restarts)


def flat(python: Path) -> None:
    """Say what the ranks of a job hold after some restarts, and after many."""
    events = run(python, RANKS, MANY)
    early, late = (
        [e for rank in events.values() for e in rank if e.get("iteration") == n and "keys" in e]
        for n in MANY["sampled"]
    )
    took_s = late[0]["t"] - early[0]["t"]
    for name in ("rank_mb", "monitor_mb", "threads", "fds", "monitor_fds", "keys"):
        first, last = (max(held[name] for held in sample) for sample in (early, late))
        say(f"200 restarts: {name}", after_20=round(first, 2), after_200=round(last, 2))
    between = MANY["sampled"][1] - MANY["sampled"][0]
    say("200 restarts: each", s=round(took_s / between, 4))


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", type=Path, default=Path(sys.executable))
    parser.add_argument("--case", default="", help="only what contains this")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    for name, scenario in LOSSES.items():
        if options.case in name:
            losses(options.python, name, scenario, options.repeats)
    if options.case in "monitor":
        monitor(options.python, options.repeats)
    if options.case in "200 restarts":
        flat(options.python)


if __name__ == "__main__":
    main()
