# SPDX-License-Identifier: Apache-2.0
"""The rank that the benchmarks start: calls a wrapped function and writes when it did what.

It uses public names only, so that it runs with any install of these import names. Argument: a
scenario as JSON. Times are those of the monotonic clock, which all processes of a machine share.
"""

from __future__ import annotations

import datetime as dt
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from nvidia_resiliency_ext import inprocess

SCENARIO: dict[str, Any] = json.loads(sys.argv[1])
OUT = Path(SCENARIO["out"])
RANK = int(os.environ["RANK"])
WAIT_S = 60.0


def event(name: str, iteration: int = -1) -> None:
    """Write one event."""
    with (OUT / f"events_{RANK}").open("a") as file:
        file.write(json.dumps({"t": time.monotonic(), "what": name, "iteration": iteration}) + "\n")


def wrapper() -> inprocess.Wrapper:
    """Return the wrapper that the scenario asks for."""
    given: dict[str, Any] = {
        name: dt.timedelta(seconds=value) for name, value in SCENARIO.get("times", {}).items()
    }
    if "active" in SCENARIO:
        assignment = inprocess.rank_assignment
        given["rank_assignment"] = inprocess.Compose(
            assignment.MaxActiveWorldSize(SCENARIO["active"]), assignment.ShiftRanks()
        )
    return inprocess.Wrapper(store_kwargs={"port": int(os.environ["MASTER_PORT"]) + 1}, **given)


def all_there(iteration: int) -> None:
    """Wait until every rank that works is in this iteration; files serve every install alike."""
    world = int(os.environ["WORLD_SIZE"])
    mark = OUT / f"there_{iteration}_{os.environ['RANK']}"
    mark.touch()
    deadline = time.monotonic() + WAIT_S
    while len(list(OUT.glob(f"there_{iteration}_*"))) < world:
        if time.monotonic() > deadline:
            raise RuntimeError("the others do not come")
        time.sleep(0.002)


def function(call: inprocess.CallWrapper = None) -> str:  # type: ignore[assignment]
    """Do what the scenario says in this iteration."""
    event("entered", call.iteration)
    faults = SCENARIO.get("faults", {}).get(str(call.iteration), {})
    if SCENARIO.get("meets", True):
        all_there(call.iteration)
    fault = faults.get(str(RANK)) or faults.get("all")
    if fault == "raise":
        event("fault", call.iteration)
        raise RuntimeError("a fault of the benchmark")
    if fault == "kill":
        event("fault", call.iteration)
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "sleep" or (faults and fault is None):
        if fault == "sleep":
            event("fault", call.iteration)
        time.sleep(WAIT_S)
    return "done"


def main() -> None:
    """Call the function as often as the scenario says."""
    wrapped = wrapper()(function)
    for number in range(SCENARIO.get("calls", 1)):
        event("called", number)
        wrapped()
        event("returned", number)


if __name__ == "__main__":
    main()
