# SPDX-License-Identifier: Apache-2.0
"""One rank that synchronises measured times, group by group, and prints what came out as JSON.

The argument of its number is a list with what it brings to each group; None where it is no member
of one.
"""

import json
import os
import sys

import torch.distributed as dist

from nvidia_resiliency_ext.fault_tolerance.timeouts_calc import TimeoutsCalc, TimeoutsCalcError


def synchronize(order, store):
    """Bring times to a group; return what is known afterwards."""
    if "fake" in order["backend"]:
        # A backend without a device: whatever is sent to it stays what it was.
        import torch.testing._internal.distributed.fake_pg  # noqa: F401 - registers it
    dist.init_process_group(
        order["backend"],
        init_method=f"file://{store}",
        rank=int(os.environ["RANK"]),
        world_size=order["world_size"],
    )
    calc = TimeoutsCalc(order["sections"])
    calc.initial_max_time, calc.subsequent_max_time, calc.out_of_section_max_time = order["times"]
    calc.section_to_max_time.update(order["sections"])
    error = ""
    try:
        calc.synchronize_all()
    except TimeoutsCalcError as refused:
        error = str(refused)
    dist.barrier()
    dist.destroy_process_group()
    times = [calc.initial_max_time, calc.subsequent_max_time, calc.out_of_section_max_time]
    return {"error": error, "times": times, "sections": calc.section_to_max_time}


results = [
    order and synchronize(order, f"{os.environ['NVRX_TEST_STORE']}{number}")
    for number, order in enumerate(json.loads(sys.argv[1 + int(os.environ["RANK"])]))
]
print(json.dumps(results))
