# SPDX-License-Identifier: Apache-2.0
"""The benchmarks' rank as most programs are written: torch is imported at the top of the file.

That is what a launcher can see from outside, and what lets it start the imports early.
"""

from __future__ import annotations

import time

import _bench_worker  # before torch, for the time of its first line
import torch

IMPORTED = time.monotonic()

if __name__ == "__main__":
    torch.set_num_threads(1)
    _bench_worker.main(IMPORTED)
