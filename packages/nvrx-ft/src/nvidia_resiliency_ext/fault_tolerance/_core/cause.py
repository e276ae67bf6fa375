# SPDX-License-Identifier: Apache-2.0
"""Why a cycle or a rendezvous ended: values that launchers, coordinator and records share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

ATTRIBUTION = "attribution"
"""The kind of a cause that the attribution service names."""


@dataclass(frozen=True, slots=True)
class Cause:
    """Why a cycle ended: machine-readable, and said to every node."""

    kind: str
    what: str
    rank: int | None = None
    local_rank: int | None = None
    host: str = ""
    exit_code: int | None = None
    signal: int | None = None
    detected_by: str = "launcher"
    detail: Mapping[str, object] = field(default_factory=dict)


DEFAULT_NO_RESTART_EXIT_CODE: Final = 93
RDZV_SHUTDOWN_REASON_GRACEFUL: Final = "graceful"
RDZV_SHUTDOWN_REASON_FAILURE: Final = "failure"
RDZV_SHUTDOWN_REASON_ATTRIBUTION_STOP: Final = "attribution_stop"
RDZV_SHUTDOWN_REASON_NO_PROGRESS: Final = "no_progress"
RDZV_NO_RESTART_REASONS: Final = frozenset(
    {RDZV_SHUTDOWN_REASON_ATTRIBUTION_STOP, RDZV_SHUTDOWN_REASON_NO_PROGRESS}
)
