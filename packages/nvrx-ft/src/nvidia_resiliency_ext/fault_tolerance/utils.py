# SPDX-License-Identifier: Apache-2.0
"""Small public helpers under one path; the code is in `_infra`, `_ipc` and `_process`."""

from nvidia_resiliency_ext.fault_tolerance._infra.env import is_slurm_job_array, parse_bool_env
from nvidia_resiliency_ext.fault_tolerance._infra.nodelist import (
    hostnames_to_slurm_nodelist,
    ranks_to_range_str,
    slurm_sort_addrs,
)
from nvidia_resiliency_ext.fault_tolerance._infra.rank import (
    get_infrastructure_rank,
    get_log_aggregator_shard_index,
)
from nvidia_resiliency_ext.fault_tolerance._infra.rdzv_reasons import (
    DEFAULT_NO_RESTART_EXIT_CODE,
    RDZV_NO_RESTART_REASONS,
    RDZV_SHUTDOWN_REASON_ATTRIBUTION_STOP,
    RDZV_SHUTDOWN_REASON_FAILURE,
    RDZV_SHUTDOWN_REASON_GRACEFUL,
    RDZV_SHUTDOWN_REASON_NO_PROGRESS,
)
from nvidia_resiliency_ext.fault_tolerance._ipc.objects import (
    read_obj_from_ipc_socket,
    read_obj_from_ipc_stream,
    recv_all,
    write_obj_to_ipc_stream,
    write_object_to_ipc_socket,
)
from nvidia_resiliency_ext.fault_tolerance._ipc.sockets import set_ipc_socket_timeouts
from nvidia_resiliency_ext.fault_tolerance._process.cuda_context import reduce_cuda_ctx_size
from nvidia_resiliency_ext.fault_tolerance._process.ends import (
    is_process_alive,
    terminate_mp_processes,
    wait_for_mp_events,
    wait_until_process_terminated,
)
from nvidia_resiliency_ext.fault_tolerance._process.exception_hook import (
    get_rank,
    install_exception_handler,
)
from nvidia_resiliency_ext.fault_tolerance._process.listing import get_processes_by_pgids
from nvidia_resiliency_ext.fault_tolerance._process.patching import patched_method

__all__ = [
    "DEFAULT_NO_RESTART_EXIT_CODE",
    "RDZV_NO_RESTART_REASONS",
    "RDZV_SHUTDOWN_REASON_ATTRIBUTION_STOP",
    "RDZV_SHUTDOWN_REASON_FAILURE",
    "RDZV_SHUTDOWN_REASON_GRACEFUL",
    "RDZV_SHUTDOWN_REASON_NO_PROGRESS",
    "get_infrastructure_rank",
    "get_log_aggregator_shard_index",
    "get_processes_by_pgids",
    "get_rank",
    "hostnames_to_slurm_nodelist",
    "install_exception_handler",
    "is_process_alive",
    "is_slurm_job_array",
    "parse_bool_env",
    "patched_method",
    "ranks_to_range_str",
    "read_obj_from_ipc_socket",
    "read_obj_from_ipc_stream",
    "recv_all",
    "reduce_cuda_ctx_size",
    "set_ipc_socket_timeouts",
    "slurm_sort_addrs",
    "terminate_mp_processes",
    "wait_for_mp_events",
    "wait_until_process_terminated",
    "write_obj_to_ipc_stream",
    "write_object_to_ipc_socket",
]
