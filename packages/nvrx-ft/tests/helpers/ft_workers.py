# SPDX-License-Identifier: Apache-2.0
"""Groups of real torch.distributed ranks, each an interpreter of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

PROGRAMS = Path(__file__).parents[1] / "programs"


def run_ranks(program: str, arguments: list[str], directory: Path, timeout_s: float = 180.0):
    """Run `programs/<program> <arguments[rank]>` for every rank; return each rank's JSON output.

    Ranks meet in a file below `directory`. A rank that fails fails the caller, with its output.
    """
    environment = {
        **os.environ,
        "NVRX_TEST_STORE": str(directory / "store"),
        "OMP_NUM_THREADS": "1",
    }
    children = [
        subprocess.Popen(
            [sys.executable, str(PROGRAMS / program), argument],
            env={**environment, "RANK": str(rank), "WORLD_SIZE": str(len(arguments))},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, argument in enumerate(arguments)
    ]
    try:
        outputs = [child.communicate(timeout=timeout_s) for child in children]
    finally:
        for child in children:
            child.kill()
            child.wait()
            child.stdout.close()
            child.stderr.close()
    for rank, (child, output) in enumerate(zip(children, outputs, strict=True)):
        assert child.returncode == 0, f"rank {rank}: {output[1]}"
    return [json.loads(output[0]) for output in outputs]
