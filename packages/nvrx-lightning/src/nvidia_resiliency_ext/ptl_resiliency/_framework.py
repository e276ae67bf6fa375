# SPDX-License-Identifier: Apache-2.0
"""Which Lightning the callbacks belong to, and the errors about a distribution that is missing."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from functools import cache
from types import ModuleType
from typing import Any

__all__ = ["Callback", "framework", "module_available", "require"]


def module_available(name: str) -> bool:
    """Return whether a module could be imported, without importing the module itself.

    Args:
        name: Full name, for example `lightning.pytorch`. Its parent packages are imported.
    """
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


@cache
def framework() -> ModuleType:
    """Return `lightning.pytorch` or `pytorch_lightning`, the one that the program uses.

    `lightning` comes first. A program that has imported only `pytorch_lightning` gets that one: the
    callback classes of the two are different, and a `Trainer` accepts only its own.

    Raises:
        ImportError: Neither is installed.
    """
    names = ["lightning.pytorch", "pytorch_lightning"]
    if "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules:
        names.reverse()
    for name in names:
        if module_available(name):
            return importlib.import_module(name)
    raise ImportError(
        "the callbacks of nvrx-lightning need Lightning: pip install 'nvrx-lightning[lightning]',"
        " or pip install pytorch-lightning"
    )


def require(module: str, extra: str) -> ModuleType:
    """Import a module of another nvrx distribution.

    Args:
        module: Name below `nvidia_resiliency_ext`.
        extra: Extra of nvrx-lightning that brings it.

    Raises:
        ImportError: It is not installed; the message says how to install it.
    """
    name = f"nvidia_resiliency_ext.{module}"
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not name.startswith(error.name):
            raise
        raise ImportError(
            f"this callback needs {name}: pip install 'nvrx-lightning[{extra}]'", name=name
        ) from None


Callback: Any = framework().Callback
