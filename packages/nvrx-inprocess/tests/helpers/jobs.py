# SPDX-License-Identifier: Apache-2.0
"""Jobs of real processes that make wrapped calls."""

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ports
import ranks_of_node
from fork_server import ForkServer

PROGRAMS = Path(__file__).parents[1] / "programs"
DEADLINE_S = 150
TORCH = ("torch.distributed",)
# What DistributedDataParallel imports at its first use, too.
TORCH_WITH_DDP = (*TORCH, "torch._dynamo.utils")
_PORTS = 3  # from MASTER_PORT on, that the programs use


@contextlib.contextmanager
def server_of(modules: tuple[str, ...]) -> Iterator[ForkServer]:
    """Give what forks ranks that have imported modules; torch writes errors only."""
    environ = {**os.environ, "TORCH_CPP_LOG_LEVEL": "ERROR"}
    with contextlib.closing(ForkServer(modules, environ)) as server:
        yield server


class Ended:
    """How a rank has ended: its exit code, and what each call came to."""

    def __init__(self, code: int, text: str) -> None:
        self.code = code
        self.text = text

    @property
    def results(self) -> list[Any]:
        """What the calls returned."""
        lines = (line for line in self.text.splitlines() if line.startswith("RESULT "))
        return [json.loads(line.removeprefix("RESULT ")) for line in lines]


def run_calls(server: ForkServer, folder: Path, world: int, *calls: str) -> list[Ended]:
    """Let `world` ranks make calls, by their names in `programs/calls.py`; return their ends."""
    return run_program(server, folder, world, "calls.py", *calls)


def run_program(
    server: ForkServer, folder: Path, world: int, program: str, *words: str
) -> list[Ended]:
    """Run a program as `world` ranks of one node, and return how each has ended.

    Args:
        server: What forks the ranks.
        folder: A directory of the test's own; its part `shared` is the program's first argument.
        world: How many ranks.
        program: In `programs`.
        words: Further arguments.
    """
    base = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "NVRX", "TORCH"))}
    base.pop("LOCAL_RANK", None)
    shared = folder / "shared"
    shared.mkdir()
    with ports.claimed(_PORTS) as port:
        base |= {
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world),
            "RES_OPTIONS": "timeout:1 attempts:1", "TMPDIR": str(folder),
        }  # fmt: skip
        with ranks_of_node.started_by(
            server, folder, world, PROGRAMS / program, [str(shared), *words], base
        ) as ranks:
            codes = ranks.wait(DEADLINE_S)
    return [
        Ended(code, (folder / f"rank{rank}.log").read_text()) for rank, code in enumerate(codes)
    ]
