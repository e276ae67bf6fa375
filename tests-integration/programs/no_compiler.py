# SPDX-License-Identifier: Apache-2.0
"""Import it before torch: DDP then does not load torch's compiler.

It only asks to be left alone, and the import takes as long as that of all the rest of torch,
in each rank of each cycle. Whoever wants more of the compiler than that gets the real one.
"""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType
from typing import Any

NAME = "torch._dynamo"


class _StandIn(ModuleType):
    """A module until something is asked of it that it does not have."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        for module in (NAME, f"{NAME}.utils"):
            if isinstance(sys.modules.get(module), _StandIn):
                del sys.modules[module]
        return getattr(importlib.import_module(self.__name__), name)


def _disable(function: Any = None, *_: Any, **__: Any) -> Any:
    """Do what the compiler's function does where nothing is compiled."""
    return _disable if function is None else function


_compiler = _StandIn(NAME)
_torch = importlib.util.find_spec("torch")
_compiler.__path__ = [f"{place}/_dynamo" for place in _torch.submodule_search_locations]
_compiler.disable = _disable  # type: ignore[attr-defined]
_utils = _StandIn(f"{NAME}.utils")
_utils.get_optimize_ddp_mode = lambda: "ddp_optimizer"  # type: ignore[attr-defined]
_compiler.utils = _utils  # type: ignore[attr-defined]
_compiler.trace_rules = ModuleType("trace_rules")  # type: ignore[attr-defined]
_compiler.trace_rules.clear_lru_cache = lambda: None  # type: ignore[attr-defined]
sys.modules.update({NAME: _compiler, f"{NAME}.utils": _utils})
