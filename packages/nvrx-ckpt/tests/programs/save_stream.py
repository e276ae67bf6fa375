# SPDX-License-Identifier: Apache-2.0
"""A trainer that saves one checkpoint after the other, until it is killed.

Arguments: a folder, and the first step. It prints the process number of its worker at each step.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))
sys.path.insert(0, str(Path(__file__).parents[4] / "tests-support"))

import torch
from dcp_saves import request_for

from nvidia_resiliency_ext.checkpointing import AsyncSaveError, publish_latest
from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncCallsQueue

folder, step = Path(sys.argv[1]), int(sys.argv[2])
state = {f"layer{i}": torch.zeros(1 << 18) for i in range(8)}
queue = AsyncCallsQueue()
while True:
    for value in state.values():
        value.fill_(step)
    name = f"{step:06d}"
    try:
        request = request_for(
            {**state, "step": step},
            folder / name,
            [lambda name=name: publish_latest(folder / "latest", name)],
        )
        queue.schedule_async_request(request)
        print(queue.persistent_caller.process.pid, flush=True)
        queue.maybe_finalize_async_calls(blocking=step % 3 == 0)
    except AsyncSaveError as error:
        print("failed", error.call_idx, flush=True)
    step += 1
