# SPDX-License-Identifier: Apache-2.0
"""Functions and their arguments as text, and back, so that another program can call them.

No pickle: a function is named by module and qualified name, arguments are plain values.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import os
import sys
from collections.abc import Callable, Mapping
from datetime import timedelta
from types import ModuleType
from typing import Any

from nvidia_resiliency_ext.shared_utils.errors import NvrxError

_MAIN_ALIAS = "__nvrx_main__"
_TAG = "$"


class UnnameableError(NvrxError, TypeError):
    """Another process cannot find a function by its name, or an argument cannot be written."""


def name_of(function: Callable[..., object], what: str = "store_factory") -> tuple[str, str]:
    """Return `module:qualname` of a function or class, and its source file ("" for unknown)."""
    module = getattr(function, "__module__", None)
    qualname = getattr(function, "__qualname__", None)
    if not module or not qualname or "<" in qualname:
        raise UnnameableError(
            f"{what} must be a class or function at the top of a module, because the monitor "
            f"imports it by name; {function!r} has none"
        )
    try:
        file = inspect.getsourcefile(sys.modules[module]) or ""
    except (KeyError, TypeError):
        file = ""
    return f"{module}:{qualname}", os.path.abspath(file) if file else ""


def load_named(name: str, file: str = "") -> Callable[..., Any]:
    """Return the function or class that `name_of` named in another process."""
    module_name, _, qualname = name.partition(":")
    found: Any = _load_module(module_name, file)
    for part in qualname.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        raise UnnameableError(f"there is nothing to call under the name {name!r}")
    function: Callable[..., Any] = found
    return function


def dump_kwargs(kwargs: Mapping[str, object], what: str = "store_kwargs") -> str:
    """Return arguments as text: plain values, timedeltas and paths."""
    try:
        return json.dumps(dict(kwargs), default=_to_plain, separators=(",", ":"))
    except (TypeError, ValueError) as error:
        raise UnnameableError(
            f"{what} must be plain values, because they are sent to the monitor as text: {error}"
        ) from error


def load_kwargs(text: str) -> dict[str, Any]:
    kwargs = json.loads(text, object_hook=_from_plain)
    if not isinstance(kwargs, dict):
        raise ValueError("arguments must be a mapping")  # noqa: TRY004 - of the text
    return kwargs


def _to_plain(value: object) -> object:
    if isinstance(value, timedelta):
        return {_TAG: "timedelta", "seconds": value.total_seconds()}
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    raise TypeError(f"a {type(value).__name__} cannot be written down")


def _from_plain(tree: dict[str, Any]) -> object:
    if tree.get(_TAG) == "timedelta" and tree.keys() == {_TAG, "seconds"}:
        return timedelta(seconds=tree["seconds"])
    return tree


def _load_module(name: str, file: str) -> ModuleType:
    if name != "__main__":
        try:
            return importlib.import_module(name)
        except ImportError:
            if not file:
                raise
    if not file:
        raise UnnameableError("the main program has no file that could be loaded again")
    # Under another name, so that `if __name__ == "__main__"` is not entered.
    alias = _MAIN_ALIAS if name == "__main__" else name
    if alias in sys.modules:
        return sys.modules[alias]
    spec = importlib.util.spec_from_file_location(alias, file)
    if spec is None or spec.loader is None:
        raise UnnameableError(f"{file} cannot be loaded as a module")
    module = importlib.util.module_from_spec(spec)
    sys.modules[alias] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[alias]
        raise
    return module
