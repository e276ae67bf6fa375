# SPDX-License-Identifier: Apache-2.0
"""The environment of workers: what all of a node share, what a cycle adds, what is a rank's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from nvidia_resiliency_ext.fault_tolerance import _env
from nvidia_resiliency_ext.fault_tolerance._core.machine import Assignment
from nvidia_resiliency_ext.fault_tolerance._plan.plan import LaunchPlan

if TYPE_CHECKING:
    from .run_files import RunPaths

# A launcher that is itself a rank's child must not hand these on where it sets none of its own.
_OF_AN_OUTER_RANK = frozenset(
    {
        _env.CURRENT_CYCLE_INFO, _env.FT_RANK_MONITOR_IPC_SOCKET,
        "NVRX_CYCLE_START_TIME", "NVRX_INFRA_RANK",
    }
)  # fmt: skip


def shared_variables(
    plan: LaunchPlan, paths: RunPaths, environ: Mapping[str, str], store: str | None
) -> dict[str, str]:
    """Return what every worker of the node has; `store`: address of the store of many nodes."""
    variables = {
        **{name: value for name, value in environ.items() if name not in _OF_AN_OUTER_RANK},
        _env.RUN_ID: paths.run_id,
        "NVRX_MEMBERSHIP": "active",
        _env.FT_LAUNCHER_IPC_SOCKET: paths.launcher_socket,
        "LOCAL_WORLD_SIZE": str(plan.nproc_per_node),
        "ROLE_NAME": plan.role,
        "TORCHELASTIC_MAX_RESTARTS": str(plan.max_restarts),
        "TORCHELASTIC_RUN_ID": plan.run_id,
        "TORCHELASTIC_SIGNALS_TO_HANDLE": ",".join(signum.name for signum in plan.signals),
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }
    variables.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    variables.setdefault("TORCH_ELASTIC_WORKER_IDENTICAL", "1")
    if store is not None:
        # Ranks that restart in their processes meet there: it outlives them all.
        variables.setdefault(_env.INPROCESS_STORE, store)
    if plan.omp_num_threads is not None:
        variables["OMP_NUM_THREADS"] = plan.omp_num_threads
    return variables


def cycle_variables(
    launch_time: float, cycle_start_time: float | None, infra_rank: int
) -> dict[str, str]:
    """Return when a cycle began (unix s), and the scheduler's rank of this node, where known."""
    variables = {"NVRX_LAUNCH_TIME": repr(launch_time)}
    if cycle_start_time is not None:  # Of its rendezvous, from cycle 1 on.
        variables["NVRX_CYCLE_START_TIME"] = repr(cycle_start_time)
    if infra_rank >= 0:
        variables["NVRX_INFRA_RANK"] = str(infra_rank)
    return variables


def rank_variables(
    plan: LaunchPlan, paths: RunPaths, assignment: Assignment, local_rank: int, error_file: str
) -> dict[str, str]:
    """Return what differs between workers and rounds; `@record` writes to `error_file`."""
    rank = str(assignment.rank_offset + local_rank)
    world_size = str(assignment.world_size)
    variables = {
        "LOCAL_RANK": str(local_rank),
        "RANK": rank,
        "ROLE_RANK": rank,
        "WORLD_SIZE": world_size,
        "ROLE_WORLD_SIZE": world_size,
        "GROUP_RANK": str(assignment.group_rank),
        "GROUP_WORLD_SIZE": str(assignment.group_world_size),
        "MASTER_ADDR": assignment.master_addr,
        "MASTER_PORT": str(assignment.master_port),
        "TORCHELASTIC_RESTART_COUNT": str(assignment.cycle),
        "TORCHELASTIC_ERROR_FILE": error_file,
        "NVRX_CYCLE": str(assignment.cycle),
    }
    if plan.virtual_devices is not None:
        variables["LOCAL_RANK"] = "0"
        variables["CUDA_VISIBLE_DEVICES"] = plan.virtual_devices[local_rank]
    if paths.monitor_sockets:
        variables[_env.FT_RANK_MONITOR_IPC_SOCKET] = paths.monitor_sockets[local_rank]
    return variables
