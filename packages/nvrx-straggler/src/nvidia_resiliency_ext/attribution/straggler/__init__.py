# SPDX-License-Identifier: Apache-2.0
"""Find slow GPUs and slow ranks of a training job from the times of sections and kernels."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from . import cupti, dist_utils, interval_tracker, name_mapper, reporting, statistics, straggler
    from .reporting import Report, StragglerId
    from .statistics import Statistic
    from .straggler import CallableId, Detector

__all__ = [
    "CallableId",
    "Detector",
    "Report",
    "Statistic",
    "StragglerId",
    "cupti",
    "dist_utils",
    "interval_tracker",
    "name_mapper",
    "reporting",
    "statistics",
    "straggler",
]

_MODULES = {
    "CallableId": "straggler",
    "Detector": "straggler",
    "Report": "reporting",
    "Statistic": "statistics",
    "StragglerId": "reporting",
}


def __getattr__(name: str) -> object:
    """Import a submodule, or what defines a name; `nvrx-straggler` goes without torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{_MODULES.get(name, name)}")
    value: object = getattr(module, name) if name in _MODULES else module
    globals()[name] = value
    return value
