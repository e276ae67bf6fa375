# SPDX-License-Identifier: Apache-2.0
"""A rank of a DDP job of which one rank hangs in each cycle, as a file of plans says.

    hanging_rank.py FOLDER

FOLDER has `plans.json`, a list with an entry for each cycle: `victim` (global rank), `kind`,
`place` (`load`, outside all sections, or `step`) and `step`. The shape is that of the guide's
example: data is loaded outside the section `step`.
"""

import ctypes
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import no_compiler  # noqa: F401 - before torch
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel

from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient

STEPS = 6
FOR_EVER_S = 100_000


def stop():
    """Be stopped."""
    os.kill(os.getpid(), signal.SIGSTOP)


def loop():
    """Compute for ever in Python."""
    while True:
        pass


def sleep_in_c():
    """Sleep in C, with the GIL held; a signal ends a sleep, so another one follows."""
    sleep = ctypes.PyDLL(None).sleep
    while True:
        sleep(FOR_EVER_S)


def deadlock():
    """Wait for a lock that this thread holds."""
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def read_pipe():
    """Read from a pipe into which nobody writes."""
    reading, _writing = os.pipe()
    os.read(reading, 1)


def read_file():
    """Open a file whose writer never comes: a named pipe."""
    path = f"/tmp/nvrx-hang-{os.getpid()}"
    os.mkfifo(path)
    try:
        Path(path).read_bytes()
    finally:
        Path(path).unlink()


class SlowExitError(RuntimeError):
    """Raised by a rank that then takes long to exit."""


def exit_slowly():
    """Fail with an exception, and hang in the exit."""
    sys.excepthook = lambda *_: time.sleep(FOR_EVER_S)
    raise SlowExitError("this rank falls and does not exit")


KINDS = {
    "stop": stop,
    "loop": loop,
    "sleep": sleep_in_c,
    "deadlock": deadlock,
    "read-pipe": read_pipe,
    "read-file": read_file,
    "exit-slowly": exit_slowly,
}


def plan_of_this_cycle(folder):
    """Return this cycle's entry."""
    plans = json.loads((Path(folder) / "plans.json").read_text(encoding="utf-8"))
    return plans[int(os.environ["TORCHELASTIC_RESTART_COUNT"])]


def load(step, rank):
    """Load the data of a step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    inputs = torch.randn(8, 4, generator=generator)
    return inputs, inputs.sum(1, keepdim=True)


def train_step(model, inputs, targets):
    """Do one step."""
    loss = nn.functional.mse_loss(model(inputs), targets)
    torch.autograd.backward(loss)


@record
def main():
    """Train."""
    torch.set_num_threads(1)
    plan = plan_of_this_cycle(sys.argv[1])
    client = RankMonitorClient()
    client.init_workload_monitoring()
    with client.section("setup"):
        dist.init_process_group("gloo")
        rank = dist.get_rank()
        model = DistributedDataParallel(nn.Linear(4, 1))
        train_step(model, *load(0, rank))  # what is imported late is imported here

    def hang_here(step, place):
        if plan["victim"] == rank and (plan["step"], plan["place"]) == (step, place):
            KINDS[plan["kind"]]()

    for step in range(STEPS):
        inputs, targets = load(step, rank)
        hang_here(step, "load")
        with client.section("step"):
            hang_here(step, "step")
            train_step(model, inputs, targets)
    dist.barrier()
    dist.barrier()
    client.shutdown_workload_monitoring()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
