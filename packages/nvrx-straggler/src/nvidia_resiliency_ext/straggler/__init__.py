# SPDX-License-Identifier: Apache-2.0
"""The older import path of `nvidia_resiliency_ext.attribution.straggler`: the same modules.

Both paths give the same module objects, so a process always has only one `Detector`.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

_package = importlib.import_module("nvidia_resiliency_ext.attribution.straggler")
for _name in _package.__all__:
    _value = getattr(_package, _name)
    if isinstance(_value, ModuleType):
        sys.modules[f"{__name__}.{_name}"] = _value
sys.modules[__name__] = _package
