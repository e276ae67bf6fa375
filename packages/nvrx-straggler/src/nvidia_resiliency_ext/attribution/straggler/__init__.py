# SPDX-License-Identifier: Apache-2.0
"""Find slow GPUs and slow ranks of a training job from the times of sections and kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nvidia_resiliency_ext.shared_utils.lazy_names import lazy_names

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

# Submodules are loaded when used, too: `nvrx-straggler` goes without torch.
__getattr__, __dir__ = lazy_names(
    globals(),
    {
        "reporting": ("Report", "StragglerId"),
        "statistics": ("Statistic",),
        "straggler": ("CallableId", "Detector"),
    },
)
