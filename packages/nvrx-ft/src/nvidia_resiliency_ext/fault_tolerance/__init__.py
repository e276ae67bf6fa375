# SPDX-License-Identifier: Apache-2.0
"""Fault-tolerant launcher and rank monitor for PyTorch jobs; the public names, loaded when used."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

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
    "FaultToleranceConfig",
    "InvalidStateTransitionException",
    "RankMonitorClient",
    "RankMonitorClientError",
    "RankMonitorServer",
    "RankMonitorState",
    "RankMonitorStateMachine",
    "WorkloadAction",
    "WorkloadControlRequest",
]

_HOMES = {
    "FaultToleranceConfig": "config",
    "InvalidStateTransitionException": "rank_monitor_state_machine",
    "RankMonitorClient": "rank_monitor_client",
    "RankMonitorClientError": "rank_monitor_client",
    "RankMonitorServer": "rank_monitor_server",
    "RankMonitorState": "rank_monitor_state_machine",
    "RankMonitorStateMachine": "rank_monitor_state_machine",
    "WorkloadAction": "data",
    "WorkloadControlRequest": "data",
}


def __getattr__(name: str) -> Any:
    """Load a public name from its module on first use."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Return the public names, loaded or not, and the modules that are; not what is used here."""
    return sorted({*globals(), *__all__} - {"Any", "TYPE_CHECKING", "import_module"})
