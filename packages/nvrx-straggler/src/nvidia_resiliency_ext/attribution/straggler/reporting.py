# SPDX-License-Identifier: Apache-2.0
"""Reports and their creation; code that only creates or explains them is loaded when first used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nvidia_resiliency_ext.shared_utils.lazy_names import lazy_names

from ._scores.report import Report, StragglerId

if TYPE_CHECKING:
    from ._exchange.generator import ReportGenerator
    from ._scores.explain import RankExplanation
    from ._scores.scoring import ScoringOptions
    from ._scores.views import RankDetail, SlowKernel

__all__ = [
    "RankDetail",
    "RankExplanation",
    "Report",
    "ReportGenerator",
    "ScoringOptions",
    "SlowKernel",
    "StragglerId",
]

__getattr__, __dir__ = lazy_names(
    globals(),
    {
        "_exchange.generator": ("ReportGenerator",),
        "_scores.explain": ("RankExplanation",),
        "_scores.scoring": ("ScoringOptions",),
        "_scores.views": ("RankDetail", "SlowKernel"),
    },
)
