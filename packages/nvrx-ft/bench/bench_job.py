# SPDX-License-Identifier: Apache-2.0
"""Measures a whole job of four ranks and one trivial step, from the command to its end.

python bench_job.py [--python PY] [--against PY2] [--launcher torchrun]
"""

from __future__ import annotations

import time

import _bench

RANKS = 4


def main() -> None:
    """Measure."""
    options = _bench.parser(__doc__, repeats=5).parse_args()

    def once(candidate: _bench.Candidate) -> dict[str, float]:
        seconds = {}
        for mode in ("bare", "ddp"):
            with _bench.folder() as out:
                command = candidate.command(RANKS, 0, options.flags.split())
                began = time.monotonic()
                _bench.run([*command, *_bench.rank(mode, out)], out)
                seconds[f"whole job, {mode}"] = time.monotonic() - began
        return seconds

    _bench.measure(options, once)


if __name__ == "__main__":
    main()
