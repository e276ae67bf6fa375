# SPDX-License-Identifier: Apache-2.0
"""Groups of real torch.distributed ranks, each a process of its own."""

import json
import os
from pathlib import Path

import ranks_of_node

PROGRAMS = Path(__file__).parents[1] / "programs"


def run_ranks(program: str, arguments: list[str], directory: Path, timeout_s: float = 180.0):
    """Run `programs/<program> <arguments>` for every rank; return each rank's JSON output.

    A rank's argument is the one of its number. Ranks meet in a file below `directory`. A rank that
    fails fails the caller, with its output.
    """
    environment = {
        **os.environ,
        "NVRX_TEST_STORE": str(directory / "store"),
        "OMP_NUM_THREADS": "1",
        "WORLD_SIZE": str(len(arguments)),
    }
    path = PROGRAMS / program
    with ranks_of_node.started(directory, len(arguments), path, arguments, environment) as ranks:
        codes = ranks.wait(timeout_s)
    said = [(directory / f"rank{rank}.log").read_text() for rank in range(len(arguments))]
    for rank, code in enumerate(codes):
        assert code == 0, f"rank {rank}: {said[rank]}"
    return [json.loads(output.splitlines()[-1]) for output in said]
