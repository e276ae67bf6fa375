# SPDX-License-Identifier: Apache-2.0
"""Measures how late a hung rank is killed: SIGSTOP of one of two ranks, for each kind of limit.

The figure is the time from the stop to the death, less the limit. Other ranks wait meanwhile.

    python bench_hang.py [--python PY] [--against PY2] [--repeats 3] [--limit-s 2]
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import _bench

if TYPE_CHECKING:
    import subprocess

WORKER = Path(__file__).with_name("_bench_hang_worker.py")
RANKS = 2
VICTIM = 1
LOOK_S = 0.002
OTHER_LIMIT_S = "600"


def flags(rule: str, limit_s: float) -> list[str]:
    """Return the launcher's flags that set one limit."""
    if rule == "section":
        return ["--ft-rank-section-timeouts", f"step:{limit_s}"]
    return [
        *("--ft-initial-rank-heartbeat-timeout", OTHER_LIMIT_S),
        *("--ft-rank-heartbeat-timeout", str(limit_s)),
    ]


def death(process: subprocess.Popen[bytes], out: Path) -> float:
    """Return when the victim died, on the monotonic clock."""
    mark = out / f"pid_{VICTIM}"
    while process.poll() is None:
        text = mark.read_text() if mark.exists() else ""
        if text and has_ended(int(text)):
            return time.monotonic()
        time.sleep(LOOK_S)
    raise SystemExit(f"the job ended first\n{(out / 'log').read_text()}")


def has_ended(pid: int) -> bool:
    """Return whether a process is gone or a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True
    return stat.rpartition(")")[2].split()[0] in "ZX"


def main() -> None:
    """Measure."""
    parser = _bench.parser(__doc__, repeats=3)
    parser.add_argument("--limit-s", type=float, default=2.0)
    options = parser.parse_args()

    def once(candidate: _bench.Candidate) -> dict[str, float]:
        found = {}
        for rule in ("section", "heartbeat"):
            with _bench.folder() as out:
                given = [*flags(rule, options.limit_s), *options.flags.split()]
                command = candidate.command(RANKS, 1, given)
                process = _bench.start([*command, str(WORKER), str(out), rule, str(VICTIM)], out)
                died = death(process, out)
                if process.wait(timeout=_bench.JOB_LIMIT_S) != 0:
                    raise SystemExit((out / "log").read_text())
                stopped = _bench.read_events(out)[0, VICTIM]["stopped"]
                found[f"{rule}: death after the limit"] = died - stopped - options.limit_s
        return found

    _bench.measure(options, once, prefix="hang: ")


if __name__ == "__main__":
    main()
