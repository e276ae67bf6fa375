# SPDX-License-Identifier: Apache-2.0
"""A rank of two that ends in the way of its pair, with a whole interpreter.

Arguments: a folder, and the ways: that of the ranks 0 and 1, that of 2 and 3, and so on.
"""

import atexit
import logging
import os
import sys
import time

import torch
import torch.distributed as dist

from nvidia_resiliency_ext.attribution.straggler import Detector


def main() -> None:
    """Report with the other rank; then rank 0 reports once more while rank 1 ends or dies."""
    pair, rank = divmod(int(os.environ["RANK"]), 2)
    way = sys.argv[2 + pair]
    store = os.path.join(sys.argv[1], f"store-{way}")
    torch.set_num_threads(1)
    logging.basicConfig(format="%(message)s")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    timeout = 0.5 if way not in ("killed", "too_late") else 600.0
    Detector.initialize(cuda_profiling="off", control=False, exchange_timeout=timeout)
    if way == "too_late":  # called when the exchange is parked already
        atexit.register(Detector.generate_report)
    if way != "at_exit":
        Detector.generate_report()
    elif rank == 0:
        atexit.register(Detector.generate_report)
    if rank == 1:
        if way == "killed":
            os.kill(os.getpid(), 9)
        while not os.path.exists(store + "-waited"):
            time.sleep(0.001)
        return
    if way not in ("at_exit", "too_late"):
        Detector.generate_report()
    with open(store + "-waited", "w"):  # both end now
        pass
    if way == "destroyed":
        dist.destroy_process_group()
    if way == "exit":
        sys.exit(7)


if __name__ == "__main__":
    main()
