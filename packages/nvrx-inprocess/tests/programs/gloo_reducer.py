# SPDX-License-Identifier: Apache-2.0
"""Ends a group while a reducer waits, and frees the reducer in the moment in which gloo fails.

By an abort, or as a function does that destroys its group. Two ranks in one process. Prints how
many rounds it has gone through, and what was left of them.
"""

import contextlib
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from nvidia_resiliency_ext.inprocess import abort as aborts
from nvidia_resiliency_ext.inprocess._unblock import gloo, groups
from nvidia_resiliency_ext.inprocess._unblock import groups as destroyed
from nvidia_resiliency_ext.inprocess.abort import AbortTorchDistributed
from nvidia_resiliency_ext.inprocess.state import State

ROUNDS = 20
TIMEOUT = timedelta(seconds=30)
REGISTERED: list[dist.ProcessGroup] = []


def make_group(store: dist.Store, rank: int) -> dist.ProcessGroup:
    """Make a group of two that torch does not register."""
    kind = dist.ProcessGroup.BackendType.GLOO
    group = dist.ProcessGroup(store, rank, 2)
    group._register_backend(
        torch.device("cpu"), kind, dist.ProcessGroupGloo(store, rank, 2, TIMEOUT)
    )
    group._set_default_backend(kind)
    return group


def make_groups() -> list[dist.ProcessGroup]:
    """Make one for each rank; they wait for each other."""
    store, made = dist.HashStore(), []
    other = threading.Thread(target=lambda: made.append(make_group(store, 1)))
    other.start()
    made.append(make_group(store, 0))
    other.join()
    return made


def begin(group: dist.ProcessGroup) -> None:
    """Begin an operation which holds an object of Python's, as those of a backward pass do."""
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        group.allreduce([torch.ones(4)])
    time.sleep(0.01)  # until it waits for the other rank; earlier is no fault


def play(abort: bool) -> None:
    """End the group, and free the reducer before gloo's worker has failed."""
    both = make_groups()
    mine = next(group for group in both if group.rank() == 0)
    both.remove(mine)
    model = [dist.Reducer([torch.nn.Parameter(torch.ones(4))], [[0]], [1 << 20], mine)]
    begin(mine)
    REGISTERED.append(mine)
    del mine

    def end_and_free() -> int:
        ended = gloo.end_gloo_connections()
        REGISTERED.clear()
        # What the function does in the main thread when its collective fails.
        model.clear()
        return ended

    if abort:
        aborts.end_gloo_connections = end_and_free
        AbortTorchDistributed()(State(0, 2).freeze())
        return
    dist.destroy_process_group = end_and_free
    with destroyed.patient_destruction():
        dist.destroy_process_group()


def workers() -> int:
    """Return how many worker threads gloo has here."""
    names = []
    for path in Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            names.append(path.read_text())
    return names.count("pt_gloo_runloop\n")


def main() -> None:
    """Go through the rounds."""
    groups.all_groups = lambda: list(REGISTERED)
    # Who has the interpreter's lock keeps it: so the reducer is freed first.
    sys.setswitchinterval(1.0)
    for _ in range(ROUNDS):
        play(abort="abort" in sys.argv)
    print(ROUNDS, destroyed.destroyed_groups.release(10.0), workers())


if __name__ == "__main__":
    main()
