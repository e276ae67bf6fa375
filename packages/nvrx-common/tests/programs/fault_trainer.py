# SPDX-License-Identifier: Apache-2.0
"""Uses faults as Megatron-LM does: a plan goes from rank 0 to all as numbers, and comes back.

Two ranks are threads' stand-ins here: the plan is packed and unpacked as 64-bit floats, as a
broadcast of a tensor would, and each step of the training asks for the workload's exception.

usage: fault_trainer.py FAULT DELAY
"""

import math
import random
import struct
import sys
import time

from nvidia_resiliency_ext.shared_utils.inject_fault import (
    Fault,
    clear_workload_exception,
    dispatch_fault_injection,
    maybe_raise_workload_exception,
    register_fault,
)

WORLD_SIZE, RANK = 4, 2


def planned(names, delay):
    """Return what rank 0 broadcasts: one fault's number or NaN per rank, and the delay."""
    choices = [Fault[name.upper()] for name in names.split(",")]
    fault = random.Random(5).choices(choices, [1.0] * len(choices), k=1)[0]
    numbers = [math.nan] * WORLD_SIZE + [delay]
    numbers[RANK] = float(fault.value)
    return struct.pack(f"{WORLD_SIZE + 1}d", *numbers)


def arm(data):
    """Dispatch this rank's part of the plan."""
    clear_workload_exception()
    numbers = struct.unpack(f"{WORLD_SIZE + 1}d", data)
    if not math.isnan(numbers[RANK]):
        fault = Fault(int(numbers[RANK]))
        print(f"armed {fault.name}", flush=True)
        dispatch_fault_injection(fault=fault, delay=numbers[WORLD_SIZE], callback=None)


def leave(delay, callback):
    time.sleep(delay)
    print("left", flush=True)
    import os

    os._exit(77)


register_fault("EXIT_77", leave)
arm(planned(sys.argv[1], float(sys.argv[2])))
end = time.monotonic() + 20
while time.monotonic() < end:
    maybe_raise_workload_exception()
    time.sleep(0.005)
