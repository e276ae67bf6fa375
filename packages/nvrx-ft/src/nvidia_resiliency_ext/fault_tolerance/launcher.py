# SPDX-License-Identifier: Apache-2.0
"""The launcher's public API for `ft_launcher` and for programs that import it. No logic here.

Names are loaded when first used: the launcher itself does not import torch.
"""

from __future__ import annotations

from collections.abc import Sequence

from nvidia_resiliency_ext.fault_tolerance._env import FT_LAUNCHER_IPC_SOCKET
from nvidia_resiliency_ext.shared_utils.lazy_names import lazy_names

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ._config.launch_config import LaunchConfig, LogFunnelPorts, get_rdzv_endpoint, get_use_env
    from ._config.syntax import parse_min_max_nnodes
    from ._core.errors import NoRestartRequested, TerminalWorkerGroupFailure, UnhealthyNodeException
    from ._core.local_world import determine_local_world_size
    from ._health.admission import (
        ensure_node_is_healthy,
        get_node_health_check,
        init_node_health_check,
    )
    from ._torch.agent import LocalElasticAgent
    from ._torch.elastic import config_from_args, elastic_launch, launch_agent, run
    from ._workers.run_path import run_script_path
    from .cli_args import get_args_parser, parse_args

__all__ = [
    "FT_LAUNCHER_IPC_SOCKET", "LaunchConfig", "LocalElasticAgent", "LogFunnelPorts",
    "NoRestartRequested", "TerminalWorkerGroupFailure", "UnhealthyNodeException",
    "config_from_args", "determine_local_world_size", "elastic_launch", "ensure_node_is_healthy",
    "get_args_parser", "get_node_health_check", "get_rdzv_endpoint", "get_use_env",
    "init_node_health_check", "launch_agent", "main", "parse_args", "parse_min_max_nnodes", "run",
    "run_script_path",
]  # fmt: skip

_NAMES_OF = {
    "_config.launch_config": ("LaunchConfig", "LogFunnelPorts", "get_rdzv_endpoint", "get_use_env"),
    "_config.syntax": ("parse_min_max_nnodes",),
    "_core.errors": ("NoRestartRequested", "TerminalWorkerGroupFailure", "UnhealthyNodeException"),
    "_core.local_world": ("determine_local_world_size",),
    "_health.admission": (
        "ensure_node_is_healthy", "get_node_health_check", "init_node_health_check",
    ),
    "_torch.agent": ("LocalElasticAgent",),
    "_torch.elastic": ("config_from_args", "elastic_launch", "launch_agent", "run"),
    "_workers.run_path": ("run_script_path",),
    "cli_args": ("get_args_parser", "parse_args"),
}  # fmt: skip
__getattr__, _ = lazy_names(globals(), _NAMES_OF)


def __dir__() -> list[str]:
    return sorted(__all__)


def main(args: Sequence[str] | None = None) -> None:
    """Run `ft_launcher` with `args` (default: the command line) and leave with its exit code.

    Without `args` the process belongs to the launcher: if a thread is still inside torch, the
    process ends after exit functions and output, and no caller gets `SystemExit`.
    """
    try:
        from nvidia_resiliency_ext.fault_tolerance._cli.program import run_command_line

        code = run_command_line(args)
    except KeyboardInterrupt:
        # Before the job takes over signals, or after it gave them back: nothing is running. End as
        # a program without a handler would, so that a shell script ends too; no traceback.
        import os
        import signal

        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
        os._exit(128 + signal.SIGINT)  # the signal is blocked
    from nvidia_resiliency_ext.fault_tolerance._core.processes import end_program

    end_program(code, is_own=args is None)


if __name__ == "__main__":
    main()
