# SPDX-License-Identifier: Apache-2.0
"""Write the example set `tests/cases`: labelled logs, histories and flight-recorder dumps.

`python packages/nvrx-attribution/tests/helpers/attribution_cases.py [FOLDER]`

`logs/NAME.log` has its label in `logs/NAME.json`: code, domain, actions that are right, ranks,
nodes and line of the first fault. `histories/NAME` has the logs of four cycles of one job, and the
actions that are right in turn; `traces/NAME` the dumps of 16 ranks, and the guilty ones.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import attribution_logs
import attribution_traces

from nvidia_resiliency_ext.attribution import engine

FOLDER = Path(__file__).parents[1] / "cases"
MOST_LINES = 200
TWISTS = {
    **dict.fromkeys(("illegal", "nan", "segfault", "io_error"), "recovered"),
    **dict.fromkeys(("ecc", "device_assert", "corrupt_data"), "late"),
    **dict.fromkeys(("cuda_oom", "memory_error"), "twice"),
}
TRACES = ("host_stuck", "device_stuck", "p2p_host", "wrong_size", "missing_dump", "healthy")
FAULT = "[rank1]: RuntimeError: CUDA error: an illegal memory access was encountered\n"
STEP = "[rank1]: iteration {:8d}/ 500000 | consumed samples: 64 | lm loss: 2.1E+00 |\n"
# Last step of each cycle, and the actions that are right about the same fault in each.
HISTORIES = {
    "without_progress": ((7, 7, 7, 7), ("RESTART", "STOP", "STOP", "STOP")),
    "with_progress": ((7, 9, 12, 20), ("RESTART",) * 4),
}


def logs() -> Iterator[tuple[str, str, attribution_logs.Case]]:
    """Yield name, twist and case of each log."""
    for kind in (*attribution_logs.FAULTS, *attribution_logs.HEALTHY[:2]):
        twist = TWISTS.get(kind, "")
        cases = (
            attribution_logs.make_case(kind, seed, is_small=True, twist=twist)
            for seed in range(5000, 6000)
        )
        yield kind, twist, next(case for case in cases if case.text.count("\n") <= MOST_LINES)
    whole = attribution_logs.make_case("link_down", 5000, is_small=True)
    lines = whole.text.splitlines(keepends=True)
    whole.text = "".join(lines[: whole.line])[:-1] + "\n" + lines[whole.line][:9]
    yield "truncated", "truncated", whole


def write(folder: Path) -> None:
    """Write the whole set in the place of what is there."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "logs").mkdir(parents=True)
    codes = engine.load_registry().codes
    for name, twist, case in logs():
        label = {
            "code": case.code,
            "domain": codes[case.code].domain,
            "actions": case.actions,
            "ranks": [] if case.rank is None else [case.rank],
            "nodes": [case.node] if case.has_node else [],
            "line": case.line,
            "twist": twist,
        }
        (folder / "logs" / f"{name}.log").write_text(case.text)
        (folder / "logs" / f"{name}.json").write_text(json.dumps(label) + "\n")
    for name, (steps, actions) in HISTORIES.items():
        (folder / "histories" / name).mkdir(parents=True)
        for cycle, last in enumerate(steps):
            text = "".join(STEP.format(step) for step in range(1, last + 1)) + FAULT
            (folder / "histories" / name / f"cycle{cycle}.log").write_text(text)
        (folder / "histories" / name / "label.json").write_text(json.dumps(actions) + "\n")
    for kind in TRACES:
        job = attribution_traces.make_job(kind, 16, 5000, steps=2)
        attribution_traces.write(job, folder / "traces" / kind, as_json=True)
        label = {"kind": attribution_traces.EXPECTED_KIND[kind], "guilty_ranks": job.guilty}
        (folder / "traces" / kind / "label.json").write_text(json.dumps(label) + "\n")


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
