# SPDX-License-Identifier: Apache-2.0
"""Fault-tolerant launcher and rank monitor for PyTorch jobs; the public names, loaded when used."""

from typing import TYPE_CHECKING

from nvidia_resiliency_ext.shared_utils.lazy_names import lazy_names

if TYPE_CHECKING:
    from .config import FaultToleranceConfig
    from .data import WorkloadAction, WorkloadControlRequest
    from .rank_monitor_client import RankMonitorClient, RankMonitorClientError
    from .rank_monitor_server import RankMonitorServer
    from .rank_monitor_state_machine import (
        InvalidStateTransitionException,
        RankMonitorState,
        RankMonitorStateMachine,
    )

__all__ = [
    "FaultToleranceConfig", "InvalidStateTransitionException", "RankMonitorClient",
    "RankMonitorClientError", "RankMonitorServer", "RankMonitorState", "RankMonitorStateMachine",
    "WorkloadAction", "WorkloadControlRequest",
]  # fmt: skip

__getattr__, __dir__ = lazy_names(
    globals(),
    {
        "config": ("FaultToleranceConfig",),
        "data": ("WorkloadAction", "WorkloadControlRequest"),
        "rank_monitor_client": ("RankMonitorClient", "RankMonitorClientError"),
        "rank_monitor_server": ("RankMonitorServer",),
        "rank_monitor_state_machine": (
            *("InvalidStateTransitionException", "RankMonitorState", "RankMonitorStateMachine"),
        ),
    },
)
