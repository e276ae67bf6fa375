# SPDX-License-Identifier: Apache-2.0
"""One rank that synchronises the measured times it is given and prints what came out as JSON."""

import json
import os
import sys

import torch.distributed as dist

from nvidia_resiliency_ext.fault_tolerance.timeouts_calc import TimeoutsCalc, TimeoutsCalcError

order = json.loads(sys.argv[1])
if "fake" in order["backend"]:
    # A backend without a device: whatever is sent to it stays what it was.
    import torch.testing._internal.distributed.fake_pg  # noqa: F401 - registers it
dist.init_process_group(
    order["backend"],
    init_method=f"file://{os.environ['NVRX_TEST_STORE']}",
    rank=int(os.environ["RANK"]),
    world_size=int(os.environ["WORLD_SIZE"]),
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
print(json.dumps({"error": error, "times": times, "sections": calc.section_to_max_time}))
