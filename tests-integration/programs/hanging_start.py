# SPDX-License-Identifier: Apache-2.0
"""Ranks that only meet; in the first cycle rank 0 hangs before its imports.

The others wait for the store that rank 0 would serve.
"""

import os
import time

if (os.environ["RANK"], os.environ["NVRX_CYCLE"]) == ("0", "0"):
    time.sleep(100_000)

import torch.distributed as dist

from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient

client = RankMonitorClient()
client.init_workload_monitoring()
with client.section("setup"):
    dist.init_process_group("gloo")
dist.barrier()
client.shutdown_workload_monitoring()
dist.destroy_process_group()
