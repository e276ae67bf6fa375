# SPDX-License-Identifier: Apache-2.0
"""Rank processes over gloo that run one function after another, and what they run."""

import contextlib
import importlib.util
import os
import socket
import sys
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path

import ports
import torch
import torch.distributed as dist
from results import no_second_try

from nvidia_resiliency_ext.checkpointing.local.basic_state_dict import BasicTensorAwareStateDict
from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager import (
    LocalCheckpointManager,
)

PROGRAM = Path(__file__).parents[1] / "programs" / "local_rank.py"
STOP_S = 20
ANSWER_S = 100


def serve(rank, world, port, connection):
    """Run what is asked for over a connection, as one of the ranks."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), LOCAL_WORLD_SIZE="1")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world)
    while True:
        call = connection.recv()
        if call is None:
            break
        path, name, args = call
        try:
            connection.send(("value", getattr(_module_at(path), name)(rank, world, *args)))
        # Whatever it is, the test process must hear of it.
        except BaseException as error:  # noqa: BLE001
            connection.send(("error", f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))
    dist.destroy_process_group()


def _module_at(path):
    """Return the module of a file: its name in the test process cannot be imported everywhere."""
    name = Path(path).stem
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]


class Ranks:
    """Processes of one job; `run` calls a function on all of them."""

    def __init__(self, fork_server, world, port):
        self._fork_server = fork_server
        self.connections, self.pids = [], []
        self.broken = False
        for rank in range(world):
            ours, theirs = socket.socketpair()
            with theirs:
                command = (PROGRAM, rank, world, port)
                self.pids.append(fork_server.start(command, [theirs.fileno(), 1, 2]))
            self.connections.append(Connection(ours.detach()))

    def start(self, function, *args):
        for connection in self.connections:
            connection.send((function.__code__.co_filename, function.__name__, args))

    def results(self, timeout=ANSWER_S):
        found = []
        deadline = time.monotonic() + timeout
        for connection in self.connections:
            if not connection.poll(max(0, deadline - time.monotonic())):
                found.append(("error", "no answer"))
                continue
            try:
                found.append(connection.recv())
            except EOFError:
                found.append(("error", "the process is gone"))
        return found

    def run(self, function, *args, timeout=ANSWER_S):
        assert not self.broken, "a rank did not answer an earlier call"
        self.start(function, *args)
        found = self.results(timeout)
        self.broken = any(value == "no answer" for _, value in found)
        problems = [value for kind, value in found if kind == "error"]
        assert not problems, "\n".join(problems)
        return [value for _, value in found]

    def close(self):
        for connection in self.connections:
            with contextlib.suppress(OSError):
                connection.send(None)
        for pid in self.pids:
            try:
                self._fork_server.wait(pid, STOP_S)
            except TimeoutError:
                self._fork_server.kill(pid)
                self._fork_server.wait(pid)
        for connection in self.connections:
            connection.close()


@contextlib.contextmanager
def started(fork_server, world):
    with ports.claimed() as port:
        ranks = Ranks(fork_server, world, port)
        try:
            yield ranks
        finally:
            ranks.close()


def state_of(rank, iteration, elements=1000):
    """Return a state that differs by rank and iteration."""
    weights = torch.arange(elements, dtype=torch.float32) + 1000 * iteration + rank
    return {
        "weights": weights,
        "tied": weights,
        "view": weights[10:20],
        "scalar": torch.tensor(rank * 100 + iteration),
        "empty": torch.empty(0, 3),
        "layers": [
            {"b": torch.full((3,), iteration, dtype=torch.bfloat16)},
            (torch.ones(2, 2).t(),),
        ],
        "step": iteration,
    }


def is_state(found, rank, iteration, elements=1000):
    """Tell whether a loaded state is that of a rank and iteration, bit for bit."""
    wanted = list(BasicTensorAwareStateDict(state_of(rank, iteration, elements)).tensors)
    tensors = list(found.tensors)
    return len(wanted) == len(tensors) and all(
        a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
        for a, b in zip(wanted, tensors, strict=True)
    )


@no_second_try()
def assert_state(found, rank, iteration, elements=1000):
    """Check that a loaded state is that of a rank and iteration, bit for bit."""
    assert is_state(found, rank, iteration, elements)


def manager(root, repl=False, **options):
    from nvidia_resiliency_ext.checkpointing.local.replication.strategies import (
        CliqueReplicationStrategy,
    )

    strategy = CliqueReplicationStrategy.from_replication_params(1, 2) if repl else None
    return LocalCheckpointManager(root, repl_strategy=strategy, **options)


def save_all(rank, world, root, iterations, repl=False, options=None):
    m = manager(root, repl, **(options or {}))
    for iteration in iterations:
        m.save(BasicTensorAwareStateDict(state_of(rank, iteration)), iteration)
    return sorted(os.listdir(m.local_ckpt_dir))


def find_and_load(rank, world, root, repl=False, options=None):
    """Return (found, loaded iteration or error, right)."""
    m = manager(root, repl, **(options or {}))
    found = m.find_latest()
    if found == -1:
        return found, None, True
    try:
        state, (iteration, owner, _) = m.load()
    except Exception as error:  # noqa: BLE001 - the test compares what it is on all ranks
        return found, type(error).__name__, True
    return found, iteration, owner == rank and is_state(state, rank, iteration)


def damage(path, kind):
    path = Path(path)
    data = bytearray(path.read_bytes())
    if kind == "missing":
        path.unlink()
    elif kind == "zero length":
        os.truncate(path, 0)
    elif kind == "truncated":
        os.truncate(path, len(data) // 2)
    elif kind == "bit flip":
        # In the bytes of the first tensor.
        data[len(data) // 3] ^= 0x40
        path.write_bytes(data)
