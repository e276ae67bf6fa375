# SPDX-License-Identifier: Apache-2.0
"""The environment of a worker: what torchrun gives, what this launcher adds, and MASTER_PORT."""

from __future__ import annotations

import errno
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from nvidia_resiliency_ext.fault_tolerance._core.machine import Assignment
from nvidia_resiliency_ext.fault_tolerance._env import (
    CURRENT_CYCLE_INFO,
    FT_LAUNCHER_IPC_SOCKET,
    FT_RANK_MONITOR_IPC_SOCKET,
    INPROCESS_STORE,
    RUN_ID,
)
from nvidia_resiliency_ext.shared_utils.errors import NvrxError

__all__ = ["CycleStamp", "JobEnvironment", "rank_variables", "shared_variables"]


# A launcher that is itself a rank's child must not hand these on where it sets none of its own.
OF_AN_OUTER_RANK = frozenset(
    (
        CURRENT_CYCLE_INFO,
        FT_RANK_MONITOR_IPC_SOCKET,
        "NVRX_CYCLE_START_TIME",
        "NVRX_INFRA_RANK",
    )
)


@dataclass(frozen=True, slots=True)
class JobEnvironment:
    """What is the same for all workers of a node over all cycles.

    `virtual_devices` is the device that each local rank sees as its only one, which makes every
    worker's LOCAL_RANK 0.
    """

    nproc: int
    role: str
    job_id: str
    run_id: str
    max_restarts: int
    launcher_socket: str
    monitor_sockets: tuple[str, ...]
    omp_num_threads: str | None = None
    inprocess_store: str | None = None
    virtual_devices: tuple[str, ...] | None = None
    signals_to_handle: str = ""


def shared_variables(job: JobEnvironment, inherited: Mapping[str, str]) -> dict[str, str]:
    """Return what every worker of the node has, whatever its rank and cycle."""
    added = {
        RUN_ID: job.run_id,
        "NVRX_MEMBERSHIP": "active",
        FT_LAUNCHER_IPC_SOCKET: job.launcher_socket,
        "LOCAL_WORLD_SIZE": str(job.nproc),
        "ROLE_NAME": job.role,
        "TORCHELASTIC_MAX_RESTARTS": str(job.max_restarts),
        "TORCHELASTIC_RUN_ID": job.job_id,
        "TORCHELASTIC_SIGNALS_TO_HANDLE": job.signals_to_handle,
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": inherited.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        "TORCH_ELASTIC_WORKER_IDENTICAL": inherited.get("TORCH_ELASTIC_WORKER_IDENTICAL", "1"),
    }
    if job.inprocess_store is not None:
        # Ranks that restart in their processes meet there: it outlives them all.
        added[INPROCESS_STORE] = inherited.get(INPROCESS_STORE, job.inprocess_store)
    if job.omp_num_threads is not None:
        added["OMP_NUM_THREADS"] = job.omp_num_threads
    return added


@dataclass(frozen=True, slots=True)
class CycleStamp:
    """When a cycle started (unix s), and the rank that the scheduler gave this node, if any.

    `cycle_start_time` is the beginning of the cycle's rendezvous, from cycle 1 on.
    """

    launch_time: float
    cycle_start_time: float | None = None
    infra_rank: int | None = None


def rank_variables(
    job: JobEnvironment,
    assignment: Assignment,
    local_rank: int,
    stamp: CycleStamp,
    error_file: str,
) -> dict[str, str]:
    """Return what differs between workers and cycles; `@record` writes to `error_file`."""
    rank = assignment.rank_offset + local_rank
    world_size = str(assignment.world_size)
    variables = {
        "LOCAL_RANK": str(local_rank),
        "RANK": str(rank),
        "ROLE_RANK": str(rank),
        "WORLD_SIZE": world_size,
        "ROLE_WORLD_SIZE": world_size,
        "GROUP_RANK": str(assignment.group_rank),
        "GROUP_WORLD_SIZE": str(assignment.group_world_size),
        "MASTER_ADDR": assignment.master_addr,
        "MASTER_PORT": str(assignment.master_port),
        "TORCHELASTIC_RESTART_COUNT": str(assignment.cycle),
        "TORCHELASTIC_ERROR_FILE": error_file,
        "NVRX_CYCLE": str(assignment.cycle),
        "NVRX_LAUNCH_TIME": repr(stamp.launch_time),
    }
    if job.virtual_devices is not None:
        variables["LOCAL_RANK"] = "0"
        variables["CUDA_VISIBLE_DEVICES"] = job.virtual_devices[local_rank]
    if job.monitor_sockets:
        variables[FT_RANK_MONITOR_IPC_SOCKET] = job.monitor_sockets[local_rank]
    if stamp.cycle_start_time is not None:
        variables["NVRX_CYCLE_START_TIME"] = repr(stamp.cycle_start_time)
    if stamp.infra_rank is not None and stamp.infra_rank >= 0:
        variables["NVRX_INFRA_RANK"] = str(stamp.infra_rank)
    return variables


class PortInUseError(NvrxError):
    """The port that the user fixed is taken."""

    def __init__(self, port: int) -> None:
        super().__init__(
            f"--master-port {port}: the port is in use on this host; "
            f"choose another, or leave the flag out for a free one"
        )
        self.port = port


class PortReservation:
    """A bound socket that never listens.

    With SO_REUSEADDR on both sides the store of rank 0 can bind and listen beside it, while the
    kernel gives the port to nobody who asks for "any free port".
    """

    def __init__(self, port: int | None = None) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            if port is not None:
                _refuse_listener(port)
            self._socket.bind(("", port or 0))
        except OSError as error:
            self._socket.close()
            if error.errno in (errno.EADDRINUSE, errno.EACCES) and port is not None:
                raise PortInUseError(port) from None
            raise
        self.port: int = self._socket.getsockname()[1]

    def release(self) -> None:
        """Give the port back."""
        self._socket.close()


def _refuse_listener(port: int) -> None:
    """Raise EADDRINUSE when somebody listens: a bind with SO_REUSEADDR alone would not tell."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("", port))
        probe.listen(1)
