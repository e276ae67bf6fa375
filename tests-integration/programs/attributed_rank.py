# SPDX-License-Identifier: Apache-2.0
"""A rank without torch that takes three steps and then fails as a training program does.

    attributed_rank.py OUT LAUNCHER_LOG FAULT...

In cycle N rank 1 has the Nth fault, once the launcher has logged the verdict about the cycle
before; without a fault left it ends well. All others work until they are ended.
"""

import ctypes
import gzip
import math
import os
import signal
import sys
import time
from pathlib import Path


def nan(_):
    """Take an infinite loss twice, and notice what comes of it."""
    loss = math.inf - math.inf
    if math.isnan(loss):
        raise FloatingPointError("loss is NaN at step 4, aborting")


def allocation(_):
    """Ask for more memory than any machine has."""
    return bytearray(1 << 62)


def device_allocation(_):
    """Say what torch says when a device has no memory left."""
    raise RuntimeError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has 80 GiB")


def segfault(_):
    """Read at an address that nobody has."""
    ctypes.string_at(1)


def hang(_):
    """Stay in a section for ever."""
    from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient

    client = RankMonitorClient()
    client.init_workload_monitoring()
    with client.section("stuck"):
        time.sleep(600)


def killed(_):
    """Die as under the kernel's killer."""
    os.kill(os.getpid(), signal.SIGKILL)


def bad_data(out):
    """Read a shard that holds something else."""
    shard = out / "shard-00017.jsonl.gz"
    shard.write_bytes(b"these are no compressed lines")
    with gzip.open(shard) as file:
        return file.read()


def main():
    """Work, wait, fail."""
    out, launcher_log, *faults = sys.argv[1:]
    cycle, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
    Path(out, f"progress_{cycle}_{rank}").touch()
    is_last = cycle >= len(faults)
    if is_last or faults[cycle] != "device-allocation":
        for step in range(1, 4):
            print(f"iteration {step}/ 1000 | lm loss: {1 / step:.3f}", flush=True)
    deadline = time.monotonic() + 60
    while cycle and f"_cycle{cycle - 1}.log: " not in Path(launcher_log).read_text():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    if is_last:
        return
    if rank != 1:
        time.sleep(600)
    deeds = {
        "nan": nan,
        "allocation": allocation,
        "device-allocation": device_allocation,
        "segfault": segfault,
        "hang": hang,
        "killed": killed,
        "bad-data": bad_data,
        "none": lambda _: time.sleep(600),
    }
    deeds[faults[cycle]](Path(out))


if __name__ == "__main__":
    main()
