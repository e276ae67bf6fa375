# SPDX-License-Identifier: Apache-2.0
"""The rank that the benchmarks start: calls a wrapped function and writes when it did what.

It uses public names only, so that it runs with any install of these import names. Argument: a
scenario as JSON. Times are those of the monotonic clock, which all processes of a machine share.
Annotations are no texts here: not every install reads those.
"""

import datetime as dt
import json
import os
import signal
import sys
import threading
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
    if SCENARIO.get("pid_files"):
        given["monitor_process_pidfile"] = str(OUT / "monitor_{rank}")
    return inprocess.Wrapper(store_kwargs={"port": int(os.environ["MASTER_PORT"]) + 1}, **given)


def monitor_pid() -> int:
    """Return the process of this rank's monitor, 0 for none."""
    try:
        return int((OUT / f"monitor_{RANK}").read_text())
    except (OSError, ValueError):
        return 0


def lose_node() -> None:
    """Kill the monitor, the other ranks that are said to be on this node, and this one."""
    others = [int((OUT / f"pid_{rank}").read_text()) for rank in SCENARIO["with"]]
    for pid in (monitor_pid(), *others, os.getpid()):
        os.kill(pid, signal.SIGKILL)


def lose_monitor(iteration: int) -> None:
    """Kill the monitor, and wait for another one."""
    lost = monitor_pid()
    os.kill(lost, signal.SIGKILL)
    deadline = time.monotonic() + WAIT_S
    while monitor_pid() in (0, lost):
        if time.monotonic() > deadline:
            raise RuntimeError("there is no other monitor")
        time.sleep(0.002)
    event("served", iteration)


def resources(call: inprocess.CallWrapper) -> dict[str, Any]:
    """Return what this process and its monitor hold, and how many keys the store."""
    held: dict[str, Any] = {"threads": threading.active_count()}
    held["fds"] = len(os.listdir("/proc/self/fd"))
    for name, pid in (("rank_mb", os.getpid()), ("monitor_mb", monitor_pid())):
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        held[name] = pages * os.sysconf("SC_PAGE_SIZE") / 1e6
    held["monitor_fds"] = len(os.listdir(f"/proc/{monitor_pid()}/fd"))
    held["keys"] = call.base_store.num_keys()
    return held


def often(call: inprocess.CallWrapper) -> str:
    """Restart as often as the scenario says; the ranks raise in turn."""
    iteration, world = call.iteration, int(os.environ["WORLD_SIZE"])
    if iteration in SCENARIO["sampled"]:
        all_there(iteration)
        held = {"t": time.monotonic(), "what": "held", "iteration": iteration, **resources(call)}
        with (OUT / f"events_{RANK}").open("a") as file:
            file.write(json.dumps(held) + "\n")
        all_there(iteration + 1_000_000)
    if iteration >= SCENARIO["restarts"]:
        return "done"
    if iteration % world == RANK:
        raise RuntimeError("again")
    time.sleep(WAIT_S)
    return "late"


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
    if "restarts" in SCENARIO:
        return often(call)
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
    if fault == "lose node":
        event("fault", call.iteration)
        lose_node()
    if fault == "lose monitor":
        event("fault", call.iteration)
        lose_monitor(call.iteration)
        return "done"
    if fault == "sleep":
        event("fault", call.iteration)
        time.sleep(WAIT_S)
    elif faults and fault is None:
        work()
    return "done"


def work() -> None:
    """Be busy in short steps, between which every install can interrupt."""
    end = time.monotonic() + WAIT_S
    while time.monotonic() < end:
        time.sleep(0.002)


def main() -> None:
    """Call the function as often as the scenario says."""
    (OUT / f"pid_{RANK}").write_text(str(os.getpid()))
    wrapped = wrapper()(function)
    for number in range(SCENARIO.get("calls", 1)):
        event("called", number)
        wrapped()
        event("returned", number)


if __name__ == "__main__":
    main()
