# SPDX-License-Identifier: Apache-2.0
"""The names of the environment variables of nvrx-ft; what they mean stands in the reference.

Variables are read at the edges (programs, public functions), which hand the environment on as a
mapping. What only workers are given is listed where it is made, in `_workers/command.py`; the
start-up hook of standbys, which can import nothing, has two names of its own, and logging and
events have nvrx-common's.
"""

from __future__ import annotations

from typing import Final

# Workers: set by the launcher for ranks and what they start.
CURRENT_CYCLE_INFO: Final = "NVRX_CURRENT_CYCLE_INFO"
FT_LAUNCHER_IPC_SOCKET: Final = "FT_LAUNCHER_IPC_SOCKET"
FT_RANK_MONITOR_IPC_SOCKET: Final = "FT_RANK_MONITOR_IPC_SOCKET"
INPROCESS_STORE: Final = "NVRX_INPROCESS_STORE"
RUN_ID: Final = "NVRX_RUN_ID"

# torch's: set by the launcher, as by torchrun, for ranks and `@record`.
ENABLE_FILE_TIMER: Final = "TORCHELASTIC_ENABLE_FILE_TIMER"
ERROR_FILE: Final = "TORCHELASTIC_ERROR_FILE"
GROUP_RANK: Final = "GROUP_RANK"
LOCAL_RANK: Final = "LOCAL_RANK"
LOG_LINE_PREFIX_TEMPLATE: Final = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"
OMP_NUM_THREADS: Final = "OMP_NUM_THREADS"
PYTHON_EXEC: Final = "PYTHON_EXEC"
RANK: Final = "RANK"
SHUTDOWN_TIMEOUT: Final = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
TIMER_FILE: Final = "TORCHELASTIC_TIMER_FILE"

# Launcher: set by users, read before anything starts.
CUDA_VISIBLE_DEVICES: Final = "CUDA_VISIBLE_DEVICES"
DISABLE_RANK_MONITORS: Final = "NVRX_DISABLE_RANK_MONITORS"
EXPECTED_GPUS: Final = "NVRX_EXPECTED_GPUS"
FT_LAUNCHER_LOGLEVEL: Final = "FT_LAUNCHER_LOGLEVEL"
GPUS_PER_NUMA: Final = "NVRX_GPUS_PER_NUMA"
INJECT_GPU_FAILURE: Final = "NVRX_INJECT_GPU_FAILURE"
LOG_DEBUG: Final = "NVRX_LOG_DEBUG"
LOG_FUNNEL_TOKEN_FILE: Final = "NVRX_LOG_FUNNEL_TOKEN_FILE"  # noqa: S105  # a name
MULTI_LAUNCHERS: Final = "NVRX_ENABLE_MULTI_LAUNCHERS_PER_NODE"
NODE_LOCAL_TMPDIR: Final = "NVRX_NODE_LOCAL_TMPDIR"

# Scheduler: set by Slurm and whoever wraps it, for the order of nodes.
CROSS_SLURM_PROCID: Final = "CROSS_SLURM_PROCID"
INFRA_RANK_FROM_NODENAME: Final = "NVRX_INFRA_RANK_FROM_NODENAME"
REPLACEMENT_GROUP_ID: Final = "NVRX_REPLACEMENT_GROUP_ID"
SLURMD_NODENAME: Final = "SLURMD_NODENAME"
SLURM_ARRAY_JOB_ID: Final = "SLURM_ARRAY_JOB_ID"
SLURM_ARRAY_TASK_ID: Final = "SLURM_ARRAY_TASK_ID"
SLURM_JOB_END_TIME: Final = "SLURM_JOB_END_TIME"
SLURM_JOB_ID: Final = "SLURM_JOB_ID"
SLURM_JOB_NUM_NODES: Final = "SLURM_JOB_NUM_NODES"
SLURM_NNODES: Final = "SLURM_NNODES"
SLURM_PROCID: Final = "SLURM_PROCID"
SLURM_TASKS_PER_NODE: Final = "SLURM_TASKS_PER_NODE"
SLURM_TOPOLOGY_ADDR: Final = "SLURM_TOPOLOGY_ADDR"
SLURM_TOPOLOGY_ADDR_PATTERN: Final = "SLURM_TOPOLOGY_ADDR_PATTERN"
SLURM_TOPOLOGY_NODES_PER_BLOCK: Final = "SLURM_TOPOLOGY_NODES_PER_BLOCK"
