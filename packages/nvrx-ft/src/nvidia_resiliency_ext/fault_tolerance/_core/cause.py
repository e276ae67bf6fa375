# SPDX-License-Identifier: Apache-2.0
"""Why a cycle ended: the one value that launchers, coordinator and records share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

ATTRIBUTION = "attribution"  # The kind of a cause that the attribution service names.


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
