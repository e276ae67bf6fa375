# SPDX-License-Identifier: Apache-2.0
"""Calls what Megatron-LM's fault-tolerance integration calls, in its order; ours, not its source.

The client is set up before the process group exists, state goes to `<dir>/ft_state.json`. Arguments
are pairs of a monitor's socket and such a directory: runs in turn, each a process of its own.
"""

import json
import os
import sys
import types
from pathlib import Path

import torch.distributed as dist

from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient


def run(directory: Path) -> None:
    """Train for five steps and calculate the limits."""
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
    said = json.dumps(client.state_dict())
    state_file.write_text(said)
    print(said, flush=True)
    client.shutdown_workload_monitoring()
    dist.destroy_process_group()


for path, directory in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
    os.environ["FT_RANK_MONITOR_IPC_SOCKET"] = path
    child = os.fork()
    if child == 0:
        run(Path(directory))
        os._exit(0)
    if os.waitpid(child, 0)[1] != 0:
        sys.exit(1)
