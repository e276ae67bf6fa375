# SPDX-License-Identifier: Apache-2.0
"""Why a rendezvous was closed, as written into its store, and the exit code that says "stop"."""

from typing import Final

__all__ = [
    "DEFAULT_NO_RESTART_EXIT_CODE",
    "RDZV_NO_RESTART_REASONS",
    "RDZV_SHUTDOWN_REASON_ATTRIBUTION_STOP",
    "RDZV_SHUTDOWN_REASON_FAILURE",
    "RDZV_SHUTDOWN_REASON_GRACEFUL",
    "RDZV_SHUTDOWN_REASON_NO_PROGRESS",
]

DEFAULT_NO_RESTART_EXIT_CODE: Final = 93

RDZV_SHUTDOWN_REASON_GRACEFUL: Final = "graceful"
RDZV_SHUTDOWN_REASON_FAILURE: Final = "failure"
RDZV_SHUTDOWN_REASON_ATTRIBUTION_STOP: Final = "attribution_stop"
RDZV_SHUTDOWN_REASON_NO_PROGRESS: Final = "no_progress"

RDZV_NO_RESTART_REASONS: Final = frozenset(
    {RDZV_SHUTDOWN_REASON_ATTRIBUTION_STOP, RDZV_SHUTDOWN_REASON_NO_PROGRESS}
)
