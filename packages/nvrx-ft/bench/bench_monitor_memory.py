# SPDX-License-Identifier: Apache-2.0
"""Measures the monitoring of eight ranks: memory (PSS), start, and processor time at 1 kHz.

python bench_monitor_memory.py [--python PY] [--against PY2] [--repeats 3]
"""

from __future__ import annotations

from pathlib import Path

import _bench

NODE = Path(__file__).with_name("_bench_monitor.py")


def main() -> None:
    """Measure."""
    options = _bench.parser(__doc__, repeats=3).parse_args()

    def once(candidate: _bench.Candidate) -> dict[str, float]:
        return _bench.figures_of(candidate, NODE)

    _bench.measure(options, once, unit="see figure", prefix="monitoring of 8 ranks: ")


if __name__ == "__main__":
    main()
