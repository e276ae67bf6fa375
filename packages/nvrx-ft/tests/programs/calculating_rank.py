# SPDX-License-Identifier: Apache-2.0
"""One of several ranks that calculates its timeouts and prints what came out as JSON."""

import json
import os
import sys
import time

import torch.distributed as dist

from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient, RankMonitorClientError

order = json.loads(sys.argv[1 + int(os.environ["RANK"])])
os.environ["FT_RANK_MONITOR_IPC_SOCKET"] = order["socket"]
dist.init_process_group(
    "gloo",
    init_method=f"file://{os.environ['NVRX_TEST_STORE']}",
    rank=int(os.environ["RANK"]),
    world_size=int(os.environ["WORLD_SIZE"]),
)
client = RankMonitorClient()
client.init_workload_monitoring()
for _ in range(2):
    with client.section("step"):
        time.sleep(order["step_s"])
not_ready = [client.calculate_and_set_section_timeouts(skip_if_not_ready=True)]
try:
    client.calculate_and_set_section_timeouts()
except RankMonitorClientError as refused:
    not_ready.append(str(refused))
assert client.calculate_and_set_section_timeouts(selected_sections=["step"])
state = client.state_dict()
client.shutdown_workload_monitoring()
client.init_workload_monitoring()
cfg = client.cfg
client.shutdown_workload_monitoring()
dist.destroy_process_group()
limits = [cfg.rank_section_timeouts, cfg.rank_out_of_section_timeout]
print(json.dumps({"state": state, "not_ready": not_ready, "monitor": limits}))
