# SPDX-License-Identifier: Apache-2.0
"""One node of jobs under torch's elastic agent, or ours; nodes meet through our handler.

Arguments: number of this node, nodes that work, and for each job a word
WHICH:COUNT:PORT:DIRECTORY, with which agent, how many nodes with the spares, where the store is,
and a directory for what the job leaves.
"""

import os
import sys
from pathlib import Path


def serve_node(which: str, count: str, port: str, directory: str, number: str, nodes: str) -> None:
    """Run this node's agent of one job; write its result."""
    from torch.distributed import TCPStore
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.rendezvous.api import RendezvousParameters

    min_healthy = which == "min-healthy"
    if which == "legacy" or min_healthy:
        from nvidia_resiliency_ext.fault_tolerance._ft_rendezvous import create_handler
    else:
        from nvidia_resiliency_ext.fault_tolerance.ft_rendezvous_barrier import create_handler

    is_host = number == "0"
    store = TCPStore("127.0.0.1", int(port), is_master=is_host, wait_for_workers=False)
    params = RendezvousParameters(
        "c10d", f"127.0.0.1:{port}", "torch", 1 if min_healthy else int(nodes), int(nodes),
        local_addr=f"127.0.0.{2 + int(number)}", is_store_host=is_host, nproc_per_node=2,
        join_timeout=100, last_call_timeout=100 if min_healthy else 0,
    )  # fmt: skip
    handler = create_handler(store, None, params)
    spec = WorkerSpec(
        role="default",
        local_world_size=2,
        rdzv_handler=handler,
        entrypoint=half if min_healthy else sys.executable,
        args=() if min_healthy else ("-S", __file__, "worker", directory, count),
        max_restarts=2,
        monitor_interval=0.05,
    )
    logs = DefaultLogsSpecs(log_dir=f"{directory}/{number}")
    if which == "ours" or min_healthy:
        from nvidia_resiliency_ext.fault_tolerance.config import FaultToleranceConfig
        from nvidia_resiliency_ext.fault_tolerance.launcher import LocalElasticAgent

        agent = LocalElasticAgent(
            spec, FaultToleranceConfig(), logs, workers_stop_timeout=5,
            restart_policy="min-healthy" if min_healthy else "any-failed",
        )  # fmt: skip
    else:
        from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

        agent = LocalElasticAgent(spec, logs)
    Path(directory, f"here{number}").touch()
    try:
        result = agent.run()
    finally:
        handler.shutdown()
    state = "standby" if result is None else result.state.name
    values = getattr(result, "return_values", None) if min_healthy else handler.get_run_id()
    if isinstance(values, dict):
        values = dict(sorted(values.items()))  # torch has them in the order in which ranks ended
    Path(directory, f"result{number}").write_text(f"{state} {values}")


def half() -> bool:
    """Fail on the second node; elsewhere return whether the rank's sockets are told."""
    if int(os.environ["RANK"]) >= 2:
        sys.exit(3)
    names = ("FT_RANK_MONITOR_IPC_SOCKET", "FT_LAUNCHER_IPC_SOCKET")
    return all(Path(os.environ[name]).is_socket() for name in names)


def work(directory: str, count: int) -> int:
    """Be a worker: rank 1 of the first cycle fails, its peers wait to be stopped."""
    import contextlib
    import signal

    rank, port = os.environ["RANK"], os.environ["MASTER_PORT"]
    first = Path(directory, "first")
    # Each cycle has a port of its own; who comes first leaves that of the first cycle.
    with contextlib.suppress(FileExistsError):
        first.symlink_to(port)
    if str(first.readlink()) == port:
        if rank == "1":
            # A node that comes when the job is over would look for its store in vain.
            wait_for_nodes(Path(directory), count)
            return 3
        # Its agent may be killed: then nobody stops it.
        signal.sigtimedwait([signal.SIGTERM], 120)
        return 1
    monitor = os.environ.get("FT_RANK_MONITOR_IPC_SOCKET", "")
    Path(directory, f"watched{rank}").write_text(str(Path(monitor).is_socket()))
    text = " ".join((rank, os.environ["WORLD_SIZE"], os.environ["MASTER_ADDR"]))
    Path(directory, f"rank{rank}").write_text(text)
    return 0


def wait_for_nodes(directory: Path, count: int) -> None:
    """Wait until so many agents run."""
    import time

    deadline = time.monotonic() + 100
    while len(list(directory.glob("here*"))) < count and time.monotonic() < deadline:
        time.sleep(0.02)  # a file gives no event here


if __name__ == "__main__":
    if sys.argv[1] == "worker":
        sys.exit(work(sys.argv[2], int(sys.argv[3])))
    for job in sys.argv[3:]:
        serve_node(*job.split(":", 3), *sys.argv[1:3])
