# SPDX-License-Identifier: Apache-2.0
"""One node of a job of several: runs a function and prints what each of its ranks returned.

Arguments: endpoint, fewest nodes, most nodes, and a directory for what ranks leave.
"""

import json
import os
import sys
import threading
import time
from pathlib import Path

from nvidia_resiliency_ext.fault_tolerance.launcher import LaunchConfig, elastic_launch
from nvidia_resiliency_ext.shared_utils import store_sockets


def wait_for_nodes(directory: str, count: int) -> None:
    """Wait until so many nodes are connected: one that comes after the end has no job."""
    deadline = time.monotonic() + 100
    while len(list(Path(directory).glob("here*"))) < count and time.monotonic() < deadline:
        time.sleep(0.02)  # a file gives no event here


def tell_when_connected(port: int, directory: str) -> None:
    """Leave a file when this node has found the store."""
    is_there = False
    while not is_there:
        time.sleep(0.02)  # nobody tells of a connection
        for _, sock in store_sockets.tcp_sockets():
            with sock:
                is_there = is_there or store_sockets.is_connected_to(sock, port)
    Path(directory, f"here{os.getpid()}").touch()


def work(directory: str, nodes: int) -> str:
    """Fail once on rank 1; say which rank of how many, and in which cycle."""
    rank, cycle = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
    if (rank, cycle) == ("1", "0"):
        wait_for_nodes(directory, nodes)
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
    port = int(endpoint.rpartition(":")[2])
    threading.Thread(target=tell_when_connected, args=(port, directory), daemon=True).start()
    print("RESULT", json.dumps(elastic_launch(config, work)(directory, int(most))))
