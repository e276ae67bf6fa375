# SPDX-License-Identifier: Apache-2.0
"""Measures what heartbeats and sections cost a rank, and what they cost its monitor.

Latencies are in microseconds, one-way (the default of the product) and answered; each run is an
interpreter and a monitor of its own. Linux only.

    python bench_client.py [--python PY] [--against PY2] [--repeats 3]
"""

from __future__ import annotations

from pathlib import Path

import _bench

RANK = Path(__file__).with_name("_bench_client.py")


def main() -> None:
    """Measure."""
    options = _bench.parser(__doc__, repeats=3).parse_args()

    def once(candidate: _bench.Candidate) -> dict[str, float]:
        return _bench.figures_of(candidate, RANK)

    _bench.measure(options, once, unit="see figure", prefix="client: ")


if __name__ == "__main__":
    main()
