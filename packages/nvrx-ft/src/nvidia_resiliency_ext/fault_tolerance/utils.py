# SPDX-License-Identifier: Apache-2.0
"""Small public helpers under one path; the code is in `_core`."""

from nvidia_resiliency_ext.shared_utils.unix_sockets import set_ipc_socket_timeouts

from ._core.errors import (
    DEFAULT_NO_RESTART_EXIT_CODE,
    RDZV_NO_RESTART_REASONS,
    RDZV_SHUTDOWN_REASON_ATTRIBUTION_STOP,
    RDZV_SHUTDOWN_REASON_FAILURE,
    RDZV_SHUTDOWN_REASON_GRACEFUL,
    RDZV_SHUTDOWN_REASON_NO_PROGRESS,
)
from ._core.exceptions import install_exception_handler
from ._core.infra import (
    get_infrastructure_rank,
    get_log_aggregator_shard_index,
    hostnames_to_slurm_nodelist,
    is_slurm_job_array,
    parse_bool_env,
    ranks_to_range_str,
    slurm_sort_addrs,
)
from ._core.messages import (
    read_obj_from_ipc_socket,
    read_obj_from_ipc_stream,
    recv_all,
    write_obj_to_ipc_stream,
    write_object_to_ipc_socket,
)
from ._core.processes import (
    get_processes_by_pgids,
    is_process_alive,
    patched_method,
    reduce_cuda_ctx_size,
    terminate_mp_processes,
    wait_for_mp_events,
    wait_until_process_terminated,
)
from .data import get_rank

__all__ = [
    "DEFAULT_NO_RESTART_EXIT_CODE", "RDZV_NO_RESTART_REASONS",
    "RDZV_SHUTDOWN_REASON_ATTRIBUTION_STOP", "RDZV_SHUTDOWN_REASON_FAILURE",
    "RDZV_SHUTDOWN_REASON_GRACEFUL", "RDZV_SHUTDOWN_REASON_NO_PROGRESS", "get_infrastructure_rank",
    "get_log_aggregator_shard_index", "get_processes_by_pgids", "get_rank",
    "hostnames_to_slurm_nodelist", "install_exception_handler", "is_process_alive",
    "is_slurm_job_array", "parse_bool_env", "patched_method", "ranks_to_range_str",
    "read_obj_from_ipc_socket", "read_obj_from_ipc_stream", "recv_all", "reduce_cuda_ctx_size",
    "set_ipc_socket_timeouts", "slurm_sort_addrs", "terminate_mp_processes", "wait_for_mp_events",
    "wait_until_process_terminated", "write_obj_to_ipc_stream", "write_object_to_ipc_socket",
]  # fmt: skip
