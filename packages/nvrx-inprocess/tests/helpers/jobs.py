# SPDX-License-Identifier: Apache-2.0
"""Jobs of real processes that make wrapped calls."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import ports

PROGRAMS = Path(__file__).parents[1] / "programs"
DEADLINE_S = 150
_PORTS = 3  # from MASTER_PORT on, that the programs use


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


def run_calls(folder: Path, world: int, *calls: str) -> list[Ended]:
    """Let `world` ranks make calls, by their names in `programs/calls.py`; return their ends."""
    return run_program(folder, world, "calls.py", *calls)


def run_program(folder: Path, world: int, program: str, *words: str) -> list[Ended]:
    """Run a program as `world` ranks of one node, and return how each has ended.

    Args:
        folder: A directory of the test's own; its part `shared` is the program's first argument.
        world: How many ranks.
        program: In `programs`.
        words: Further arguments.
    """
    base = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "NVRX", "TORCH"))}
    base.pop("LOCAL_RANK", None)
    shared = folder / "shared"
    shared.mkdir()
    with contextlib.ExitStack() as stack:
        port = stack.enter_context(ports.claimed(_PORTS))
        base |= {
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world),
            "RES_OPTIONS": "timeout:1 attempts:1", "TORCH_CPP_LOG_LEVEL": "ERROR",
            "TMPDIR": str(folder),
        }  # fmt: skip
        started = []
        for rank in range(world):
            file = stack.enter_context((folder / f"rank{rank}.log").open("w"))
            process = subprocess.Popen(
                [sys.executable, str(PROGRAMS / program), str(shared), *words],
                env={**base, "RANK": str(rank)}, stdout=file, stderr=file,
            )  # fmt: skip
            stack.callback(process.wait)
            stack.callback(process.kill)
            started.append(process)
        codes = [process.wait(DEADLINE_S) for process in started]
    return [
        Ended(code, (folder / f"rank{rank}.log").read_text()) for rank, code in enumerate(codes)
    ]
