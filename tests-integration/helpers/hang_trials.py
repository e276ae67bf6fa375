# SPDX-License-Identifier: Apache-2.0
"""Random hangs in one job, a hang for each cycle, the last too: whom does the record blame?

The ranks are `hanging_rank.py`: real DDP over gloo, with the data loaded outside the section
`step` and a limit outside sections that is longer than that of the step, so that the limit of a
rank that waits passes first. A trial is right when the record of its cycle blames the rank that
hangs, on every node, as one fault.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fault_jobs import LAUNCHER
from hosts import Network
from many_nodes import NodesJob

if TYPE_CHECKING:
    from collections.abc import Sequence

PROGRAM = Path(__file__).resolve().parent.parent / "programs" / "hanging_rank.py"
KINDS = ("stop", "loop", "sleep", "deadlock", "read-pipe", "read-file", "exit-slowly")
PLACES = ("load", "step")
LAST_STEP = 5
STEP_LIMIT_S = 2
OUTSIDE_LIMIT_S = 60
SETUP_LIMIT_S = 300
CYCLE_S = 60.0


@dataclass(frozen=True, slots=True)
class Trial:
    """One hang: which rank (global), how, in which part of which step."""

    victim: int
    kind: str
    place: str
    step: int


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the records say of one trial."""

    trial: Trial
    is_right: bool
    blamed: tuple[int | None, ...]
    confidence: str
    faults: int
    what: str


def plan(seed: int, count: int, ranks: int, kinds: Sequence[str] = KINDS) -> list[Trial]:
    """Return random trials; each kind comes as often as any other, give or take one."""
    chance = random.Random(seed)
    shuffled = [kind for _ in range(-(-count // len(kinds))) for kind in kinds][:count]
    chance.shuffle(shuffled)
    return [
        Trial(chance.randrange(ranks), kind, chance.choice(PLACES), chance.randint(1, LAST_STEP))
        for kind in shuffled
    ]


def flags() -> list[str]:
    """Return the launcher's flags: the limits, no standbys, and no end for lack of progress."""
    return [
        *("--ft-prewarm", "off"),
        *("--ft-rank-section-timeouts", f"setup:{SETUP_LIMIT_S},step:{STEP_LIMIT_S}"),
        *("--ft-rank-out-of-section-timeout", str(OUTSIDE_LIMIT_S)),
        *("--ft-max-no-progress-cycles", "0", "--workers-stop-timeout", "5"),
    ]


def write_plans(folder: Path, trials: Sequence[Trial]) -> None:
    """Tell the ranks what to do in which cycle."""
    (folder / "plans.json").write_text(json.dumps([asdict(trial) for trial in trials]))


def run_on_one_node(folder: Path, trials: Sequence[Trial], ranks: int) -> list[Verdict]:
    """Run one job of one launcher, and return what its record says.

    Args:
        folder: An empty folder; it has the log and the record afterwards.
        trials: One for each cycle.
        ranks: How many.
    """
    write_plans(folder, trials)
    command = [
        *(sys.executable, "-m", LAUNCHER, "--standalone", "--nproc-per-node", str(ranks)),
        *("--max-restarts", str(len(trials) - 1), "--log-dir", str(folder), *flags()),
        *(str(PROGRAM), str(folder)),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        try:
            process.wait(CYCLE_S * (len(trials) + 1))
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait(CYCLE_S)
    return verdicts(folder, trials)


def run_on_hosts(folder: Path, trials: Sequence[Trial], hosts: int) -> list[Verdict]:
    """Run one job with a launcher and a rank on each of some hosts; as `run_on_one_node`."""
    with Network(hosts, keep=[folder], clocks_apart=True) as network:
        job = NodesJob(network, folder)
        write_plans(job.shared, trials)
        more = ["--max-restarts", str(len(trials) - 1)]
        job.start(program=PROGRAM, flags=[*flags(), *more])
        job.wait(CYCLE_S * (len(trials) + 1))
        return verdicts(job.events_folder, trials)


def verdicts(folder: Path, trials: Sequence[Trial]) -> list[Verdict]:
    """Return what the records in a folder say of each trial."""
    failures = _lines(folder.glob("failures.jsonl"))
    events = _lines(folder.glob("events-*.jsonl"))
    found = []
    for cycle, trial in enumerate(trials):
        records = [f for f in failures if f["cycle"] == cycle]
        faults = [e for e in events if e.get("kind") == "fault" and e.get("cycle") == cycle]
        blamed = tuple(record["rank"] for record in records)
        is_right = bool(records) and set(blamed) == {trial.victim} and len(faults) == 1
        details = [record["detail"] for record in records]
        confidence = next((d["confidence"] for d in details if "confidence" in d), "")
        what = records[0]["what"] if records else "nothing is recorded"
        found.append(Verdict(trial, is_right, blamed, confidence, len(faults), what))
    return found


def _lines(paths: Any) -> list[dict[str, Any]]:
    return [json.loads(line) for path in sorted(paths) for line in path.read_text().splitlines()]
