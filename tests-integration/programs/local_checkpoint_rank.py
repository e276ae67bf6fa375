# SPDX-License-Identifier: Apache-2.0
"""A rank that keeps local checkpoints with a copy on another host.

    local_checkpoint_rank.py SHARED ROOT save|load

"save" saves iteration 1, then iteration 2, in which it says that it is ready and waits for the file
SHARED/go before anything is written. "load" finds and loads the newest iteration. Prints results.
"""

from __future__ import annotations

import logging
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from nvidia_resiliency_ext.checkpointing.local.basic_state_dict import BasicTensorAwareStateDict
from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager import (
    LocalCheckpointManager,
)
from nvidia_resiliency_ext.checkpointing.local.replication.strategies import (
    CliqueReplicationStrategy,
)

GROUP_TIMEOUT_S = 20
PEER_TIMEOUT_S = 3.0


class Waiting(BasicTensorAwareStateDict):
    """A state that is not copied before a file is there."""

    def copy_tensors_to_cpu(self, non_blocking: bool = False) -> None:
        """Say that this rank has begun to save, and wait."""
        (shared / f"ready{rank}").touch()
        while not (shared / "go").exists():
            time.sleep(0.02)
        super().copy_tensors_to_cpu(non_blocking)


def state_of(iteration: int) -> dict[str, torch.Tensor]:
    """Return a state that differs by rank and iteration."""
    return {"w": torch.full((100_000,), 10.0 * iteration + rank)}


logging.basicConfig(stream=sys.stdout)
shared, root, action = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", timeout=timedelta(seconds=GROUP_TIMEOUT_S))
rank = dist.get_rank()
strategy = CliqueReplicationStrategy.from_replication_params(1, 2)
manager = LocalCheckpointManager(
    root, repl_strategy=strategy, peer_timeout_s=PEER_TIMEOUT_S, allow_same_machine=False
)
if action == "load":
    found = manager.find_latest()
    state, (iteration, _, _) = manager.load()
    right = torch.equal(state.state_dict["w"], state_of(iteration)["w"])  # type: ignore[attr-defined]
    print("LOADED", found, iteration, right, flush=True)
    dist.barrier()
    dist.destroy_process_group()
else:
    manager.save(BasicTensorAwareStateDict(state_of(1)), 1)
    try:
        manager.save(Waiting(state_of(2)), 2)
    except Exception as error:  # noqa: BLE001 - the test reads what it is
        print("FAILED", type(error).__name__, str(error).replace("\n", " "), flush=True)
