# SPDX-License-Identifier: Apache-2.0
"""A rank that trains with sections and, in cycle 0, hangs in a step once timeouts are calculated.

Arguments: the source file of the integration to drive, and a directory for its state. Prints one
JSON line after setup and one at the end.
"""

import argparse
import importlib.util
import json
import os
import sys
import threading
import time
import types
from pathlib import Path

import torch.distributed as dist

WARMUP_STEPS = 1
STEPS = 20
# A hundred times this is a limit: more than a rank may stand still on a busy machine.
STEP_S = 0.03

source, directory = Path(sys.argv[1]), sys.argv[2]
cycle = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
args = argparse.Namespace(
    enable_ft_package=True,
    save=directory,
    async_save=False,
    calc_ft_timeouts=True,
    ft_num_warmup_iters=WARMUP_STEPS,
    curr_iteration=0,
)


def stand_in(name, **attributes):
    """Make a module of the framework that has just these names."""
    module = types.ModuleType(name)
    vars(module).update(attributes)
    sys.modules[name] = module


# What the framework's module imports from its own package, and the client reads the iteration from.
stand_in("megatron", __path__=[])
stand_in("megatron.training", __path__=[])
stand_in("megatron.training.arguments", parse_args=lambda **_: args)
stand_in(
    "megatron.training.global_vars",
    _GLOBAL_ARGS=args,
    _ensure_var_is_not_initialized=lambda *_: None,
)
stand_in(
    "megatron.training.utils",
    is_rank0=lambda: dist.get_rank() == 0,
    print_rank_0=lambda text: print(text, file=sys.stderr),
)
spec = importlib.util.spec_from_file_location("megatron.training.ft_integration", source)
integration = importlib.util.module_from_spec(spec)
spec.loader.exec_module(integration)


def say(what, client):
    """Print, in one write, what this rank knows."""
    timeouts = client.section_timeouts
    line = {
        "what": what,
        "cycle": cycle,
        "rank": int(os.environ["RANK"]),
        "section": timeouts.section,
        "out_of_section": timeouts.out_of_section,
        "calculated_sections": sorted(timeouts.calculated_sections),
        "is_out_of_section_calculated": timeouts.is_out_of_section_calculated,
    }
    sys.stdout.write(json.dumps(line) + "\n")


integration.setup(args) if integration.setup.__code__.co_argcount else integration.setup()
dist.init_process_group("gloo")
say("set up", integration.get_rank_monitor_client())
if cycle > 0:
    integration.on_checkpoint_loaded(is_local_chkpt=False)
for step in range(STEPS + 2):
    integration.on_training_step_start()
    args.curr_iteration = step
    time.sleep(STEP_S)
    if cycle == 0 and step > STEPS and dist.get_rank() == 1:
        threading.Event().wait()  # until the monitor ends it
    dist.barrier()
    integration.on_training_step_end()
    if step == STEPS:
        integration.on_checkpointing_start()
        time.sleep(STEP_S)
        integration.on_checkpointing_end(is_async_finalization=False)
client = integration.get_rank_monitor_client()
integration.shutdown()
say("done", client)
dist.destroy_process_group()
