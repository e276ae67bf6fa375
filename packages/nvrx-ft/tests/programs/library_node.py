# SPDX-License-Identifier: Apache-2.0
"""One node of a job of several: runs a function and prints what each of its ranks returned.

Arguments: endpoint, fewest nodes, most nodes, and a directory for what ranks leave.
"""

import json
import os
import sys
from pathlib import Path

from nvidia_resiliency_ext.fault_tolerance.launcher import LaunchConfig, elastic_launch


def work(directory: str) -> str:
    """Fail once on rank 1; say which rank of how many, and in which cycle."""
    rank, cycle = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
    if (rank, cycle) == ("1", "0"):
        sys.exit(3)
    if cycle == "0":
        # The restart ends it, as it ends a rank that waits for its peers.
        import signal

        signal.sigwait([signal.SIGTERM])
        sys.exit(1)
    Path(directory, f"rank{rank}").touch()
    return f"{rank} of {os.environ['WORLD_SIZE']} in {cycle}"


if __name__ == "__main__":
    endpoint, least, most, directory = sys.argv[1:]
    config = LaunchConfig(
        int(least),
        int(most),
        1,
        None,
        run_id="library",
        rdzv_endpoint=endpoint,
        rdzv_backend="c10d",
        max_restarts=2,
    )
    print("RESULT", json.dumps(elastic_launch(config, work)(directory)))
