# SPDX-License-Identifier: Apache-2.0
"""Measures the memory of launcher, monitors and standbys with eight sleeping ranks.

PSS: each page shared by n processes counts for 1/n in each. Linux only.

    python bench_memory.py [--python PY] [--against PY2] [--launcher torchrun]
"""

from __future__ import annotations

import time
from pathlib import Path

import _bench

RANKS = 8
SETTLE_S = 12.0
MIB = 2**20


def children(pid: int) -> list[int]:
    """Return all processes below a process."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            found += [int(child), *children(int(child))]
    return found


def pss_mib(pid: int) -> float:
    """Return the PSS of a process in MiB, 0 when it has gone."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0.0
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) * 1024 / MIB


def role(pid: int, ranks: set[int], environ: bytes) -> str:
    """Return what a process below the launcher is."""
    if pid in ranks:
        return "ranks"
    command = Path(f"/proc/{pid}/cmdline").read_bytes()
    if b"_bench_worker" in command and b"_launcher" not in command:
        return "standbys"
    return "standbys" if b"NVRX_STANDBY" in environ else "monitors and others"


def look(launcher: int, ranks: set[int]) -> dict[str, float]:
    """Return the memory of a running job by role."""
    sums = {"launcher": pss_mib(launcher), "monitors and others": 0.0, "standbys": 0.0}
    for pid in children(launcher):
        try:
            name = role(pid, ranks, Path(f"/proc/{pid}/environ").read_bytes())
        except OSError:
            continue
        if name != "ranks":
            sums[name] += pss_mib(pid)
    return sums


def main() -> None:
    """Measure."""
    parser = _bench.parser(__doc__, repeats=1)
    parser.add_argument("--mode", choices=["bare", "ddp"], default="bare", help="ddp: with torch")
    options = parser.parse_args()

    def once(candidate: _bench.Candidate) -> dict[str, float]:
        with _bench.folder() as out:
            command = candidate.command(RANKS, 0, options.flags.split())
            command += [*_bench.rank(options.mode, out), "--step-s", str(SETTLE_S + 8)]
            process = _bench.start(command, out)
            while len(list(out.glob("events_*"))) < RANKS and process.poll() is None:
                time.sleep(0.05)
            time.sleep(SETTLE_S)
            ranks = {int(path.read_text()) for path in out.glob("pid_*")}
            found = look(process.pid, ranks)
            process.wait(timeout=_bench.JOB_LIMIT_S)
            return found

    _bench.measure(options, once, unit="MiB", prefix="memory of ")


if __name__ == "__main__":
    main()
