# SPDX-License-Identifier: Apache-2.0
"""Reports and how they are made; what only makes or explains them is loaded when first used."""

from __future__ import annotations

from typing import TYPE_CHECKING

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

_HOMES = {
    "RankDetail": "_scores.views",
    "RankExplanation": "_scores.explain",
    "ReportGenerator": "_exchange.generator",
    "ScoringOptions": "_scores.scoring",
    "SlowKernel": "_scores.views",
}


def __getattr__(name: str) -> object:
    """Load a name on first use."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    module = importlib.import_module(f".{_HOMES[name]}", __package__)
    value: object = getattr(module, name)
    globals()[name] = value
    return value
