# SPDX-License-Identifier: Apache-2.0
"""The older import path of `nvidia_resiliency_ext.attribution.straggler`: the same modules.

Both paths give the same module objects, so a process has one `Detector` whichever it imports.
"""

from __future__ import annotations

import importlib
import sys

_TARGET = "nvidia_resiliency_ext.attribution.straggler"
_SUBMODULES = (
    "cupti",
    "dist_utils",
    "interval_tracker",
    "name_mapper",
    "reporting",
    "statistics",
    "straggler",
)

_package = importlib.import_module(_TARGET)
for _name in _SUBMODULES:
    sys.modules[f"{__name__}.{_name}"] = importlib.import_module(f"{_TARGET}.{_name}")
sys.modules[__name__] = _package
