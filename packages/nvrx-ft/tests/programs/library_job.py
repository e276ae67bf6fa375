# SPDX-License-Identifier: Apache-2.0
"""A program that runs functions through `elastic_launch` and prints what each rank returned."""

import json
import logging
import os
import sys

from nvidia_resiliency_ext.fault_tolerance.launcher import LaunchConfig, elastic_launch


def work(word: str) -> str:
    """Return a text on rank 0; leave with 0 in other ways elsewhere."""
    rank = int(os.environ["RANK"])
    if rank == 1:
        sys.exit(0)
    if rank == 2:
        os._exit(0)
    return f"{word} of {os.environ['WORLD_SIZE']}"


if __name__ == "__main__":
    logging.basicConfig(stream=sys.stdout, format="LOG %(message)s")
    config = LaunchConfig(1, 1, 3, None, max_restarts=0)
    print("RESULT", json.dumps(elastic_launch(config, work)("hello")))
