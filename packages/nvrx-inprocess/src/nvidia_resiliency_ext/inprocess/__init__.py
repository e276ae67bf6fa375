# SPDX-License-Identifier: Apache-2.0
"""Run a training function again after a fault, in the same processes: `Wrapper` decorates it."""

from . import (
    abort,
    attribution,
    completion,
    compose,
    exception,
    finalize,
    health_check,
    initialize,
    monitor_process,
    monitor_thread,
    nested_restarter,
    param_utils,
    progress_watchdog,
    rank_assignment,
    sibling_monitor,
    state,
    store,
    terminate,
    utils,
    wrap,
)
from .compose import Compose
from .state import FrozenState, Mode, State
from .wrap import CallWrapper, Wrapper

__all__ = [
    "CallWrapper",
    "Compose",
    "FrozenState",
    "Mode",
    "State",
    "Wrapper",
    "abort",
    "attribution",
    "completion",
    "compose",
    "exception",
    "finalize",
    "health_check",
    "initialize",
    "monitor_process",
    "monitor_thread",
    "nested_restarter",
    "param_utils",
    "progress_watchdog",
    "rank_assignment",
    "sibling_monitor",
    "state",
    "store",
    "terminate",
    "utils",
    "wrap",
]
