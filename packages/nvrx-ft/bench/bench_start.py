# SPDX-License-Identifier: Apache-2.0
"""Measures a launch: start of the launcher until all of four ranks have done a first DDP step.

A worker that starts as a standby imports torch before its first line, one that starts cold after
it: the time at which its imports are done says which is sooner.

python bench_start.py [--python PY] [--against PY2] [--launcher torchrun]
"""

from __future__ import annotations

import time

import _bench

RANKS = 4


def main() -> None:
    """Measure."""
    options = _bench.parser(__doc__, repeats=5).parse_args()

    def once(candidate: _bench.Candidate) -> dict[str, float]:
        with _bench.folder() as out:
            command = candidate.command(RANKS, 0, options.flags.split())
            began = time.monotonic()
            events = _bench.run([*command, *_bench.rank("ddp", out)], out)
            return {
                "first line": _bench.last(events, 0, "first_line") - began,
                "imports done": _bench.last(events, 0, "imported") - began,
                "first DDP step": _bench.last(events, 0, "first_step") - began,
            }

    _bench.measure(options, once, prefix="start to ")


if __name__ == "__main__":
    main()
