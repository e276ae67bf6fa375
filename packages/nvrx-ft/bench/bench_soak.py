# SPDX-License-Identifier: Apache-2.0
"""Measures what fifty restarts in a row leave in the launcher: memory, files, threads, children.

Each cycle of two bare ranks ends with the death of one. The launcher is looked at after the fifth
cycle and after the last one.

    python bench_soak.py [--python PY] [--restarts 50] [--flags="--ft-prewarm off"]
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import _bench

RANKS = 2
FIRST_LOOK = 5


def look(pid: int) -> dict[str, int]:
    """Return the launcher's resident memory in KiB and the number of what it holds."""
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    rss = next(int(line.split()[1]) for line in status if line.startswith("VmRSS:"))
    threads = list(Path(f"/proc/{pid}/task").iterdir())
    return {
        "rss_kib": rss,
        "fds": len(os.listdir(f"/proc/{pid}/fd")),
        "threads": len(threads),
        "children": sum(len((task / "children").read_text().split()) for task in threads),
    }


def wait_for_cycle(out: Path, cycle: int, deadline: float) -> None:
    """Wait until all ranks of a cycle have begun."""
    while len(list(out.glob(f"events_{cycle}_*"))) < RANKS:
        if time.monotonic() > deadline:
            raise SystemExit(f"cycle {cycle} did not begin\n{(out / 'log').read_text()[-4000:]}")
        time.sleep(0.01)
    time.sleep(0.2)


def main() -> None:
    """Measure."""
    parser = _bench.parser(__doc__, repeats=1)
    parser.add_argument("--restarts", type=int, default=50)
    options = parser.parse_args()
    candidate = _bench.candidates(options)[0]
    with _bench.folder() as out:
        command = candidate.command(RANKS, options.restarts, options.flags.split())
        command += [*_bench.rank("bare", out), "--step-s", "3", "--kill-rank", "1"]
        command += ["--kill-after-s", "0.5", "--kill-cycles", str(options.restarts)]
        began = time.monotonic()
        process = _bench.start(command, out)
        try:
            deadline = began + 60 + 5 * options.restarts
            wait_for_cycle(out, FIRST_LOOK, deadline)
            first = look(process.pid)
            wait_for_cycle(out, options.restarts, deadline)
            final = look(process.pid)
            code = process.wait(timeout=60)
        finally:
            process.terminate()
            process.wait()
    line = {
        "figure": f"launcher after {options.restarts} restarts",
        "candidate": candidate.name,
        "after_5": first,
        "at_end": final,
        "growth": {name: final[name] - first[name] for name in first},
        "exit_code": code,
        "seconds": round(time.monotonic() - began, 1),
        "load": round(os.getloadavg()[0], 2),
    }
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
