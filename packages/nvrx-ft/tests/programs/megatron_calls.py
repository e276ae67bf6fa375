# SPDX-License-Identifier: Apache-2.0
"""Calls what Megatron-LM's fault-tolerance integration calls, in its order; ours, not its source.

The client is set up before the process group exists, state goes to `<dir>/ft_state.json`.
"""

import json
import os
import sys
import types
from pathlib import Path

import torch.distributed as dist

from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient

directory = Path(sys.argv[1])
state_file = directory / "ft_state.json"
module = types.ModuleType("megatron.training.global_vars")
module._GLOBAL_ARGS = types.SimpleNamespace()
sys.modules[module.__name__] = module

client = RankMonitorClient()
client.init_workload_monitoring(num_warmup_iters=3)
client.start_section("setup")
if state_file.exists():
    client.load_state_dict(json.loads(state_file.read_text()))
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
client.end_section("setup")
for iteration in range(5):
    module._GLOBAL_ARGS.curr_iteration = iteration
    client.start_section("step")
    client.end_section("step")
client.start_section("checkpointing")
client.end_section("checkpointing")
assert client.section_timeouts.out_of_section is not None
selected = ["setup", "step", "checkpointing"]
client.calculate_and_set_section_timeouts(selected_sections=selected, calc_out_of_section=True)
state_file.write_text(json.dumps(client.state_dict()))
client.shutdown_workload_monitoring()
dist.destroy_process_group()
os._exit(0)
