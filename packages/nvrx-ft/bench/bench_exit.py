# SPDX-License-Identifier: Apache-2.0
"""Measures the end of a job: the last line of the last worker until the launcher has left.

python bench_exit.py [--python PY] [--against PY2] [--launcher torchrun]
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
            events = _bench.run([*command, *_bench.rank("bare", out), "--step-s", "1"], out)
            return {
                "last line to launcher gone": time.monotonic() - _bench.last(events, 0, "last_line")
            }

    _bench.measure(options, once)


if __name__ == "__main__":
    main()
