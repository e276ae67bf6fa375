# SPDX-License-Identifier: Apache-2.0
"""One computation per log, shared by all who ask for it."""

from __future__ import annotations

from nvidia_resiliency_ext.attribution.coalescing.coalescer import RequestCoalescer
from nvidia_resiliency_ext.attribution.coalescing.types import (
    CacheResult,
    CoalescerStats,
    InflightResult,
    LogAnalysisCoalesced,
    StatsResult,
    SubmittedResult,
    coalesced_from_cache,
)

__all__ = [
    "CacheResult",
    "CoalescerStats",
    "InflightResult",
    "LogAnalysisCoalesced",
    "RequestCoalescer",
    "StatsResult",
    "SubmittedResult",
    "coalesced_from_cache",
]
