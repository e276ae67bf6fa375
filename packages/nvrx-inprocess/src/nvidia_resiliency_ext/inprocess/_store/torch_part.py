# SPDX-License-Identifier: Apache-2.0
"""torch's TCPStore without the rest of torch, for a process of ours that needs nothing else of it.

All of torch takes 1.5 s of processor time to import, and a job waits for its store. The class is in
torch's extension module, which asks for two packages of torch's that can be empty here.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
import sys
import types
from typing import Any

__all__ = ["PartialImportError", "tcp_store_class"]

_PACKAGE = "torch"
_DISTRIBUTED = "torch.distributed"
_EXTENSION = "torch._C"
_C10D = "torch._C._distributed_c10d"
_DEPENDENCIES = os.path.join("lib", "libtorch_global_deps.so")


class PartialImportError(ImportError):
    """This torch is of another kind; what was imported can only be got rid of with the process."""


def tcp_store_class(*, whole: bool = False) -> Any:
    """Return torch's TCPStore.

    Args:
        whole: Import all of torch.

    Raises:
        PartialImportError: It cannot be had without the rest; the process may not go on with torch.
        ImportError: There is no torch.
    """
    if _C10D in sys.modules:
        return sys.modules[_C10D].TCPStore
    if whole:
        return importlib.import_module(_DISTRIBUTED).TCPStore
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ImportError("torch is not installed")
    folder = spec.submodule_search_locations[0]
    try:
        return _class_alone(folder)
    except Exception as error:
        raise PartialImportError(f"torch in {folder}: {error}") from error


def _class_alone(folder: str) -> Any:
    for name, path in ((_PACKAGE, folder), (_DISTRIBUTED, os.path.join(folder, "distributed"))):
        package = types.ModuleType(name)
        package.__path__ = [path]
        sys.modules[name] = package
    dependencies = os.path.join(folder, _DEPENDENCIES)
    if os.path.exists(dependencies):
        # As torch does it: what CUDA and others need is found by all later.
        ctypes.CDLL(dependencies, mode=ctypes.RTLD_GLOBAL)
    extension = importlib.import_module(_EXTENSION)
    extension._c10d_init()  # noqa: SLF001 - torch.distributed begins with it
    return sys.modules[_C10D].TCPStore
