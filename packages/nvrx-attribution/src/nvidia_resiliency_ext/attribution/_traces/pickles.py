# SPDX-License-Identifier: Apache-2.0
"""Read pickles of plain containers; nothing in them is ever executed.

A dump lies in a directory that others can write to. The classes that a pickle may name are a
closed list of containers, so no function of its choice is called. Still a few bytes can ask for any
memory (the interpreter grows a table to any index that they name) and any time (the hash of a tuple
of tuples of tuples): only a process in which both are limited may read one.
"""

from __future__ import annotations

import builtins
import collections
import io
import pickle
from typing import Any

__all__ = ["UnsafePickleError", "load_plain"]

_ALLOWED: dict[tuple[str, str], type] = {
    ("builtins", "dict"): builtins.dict,
    ("builtins", "list"): builtins.list,
    ("builtins", "tuple"): builtins.tuple,
    ("builtins", "set"): builtins.set,
    ("builtins", "frozenset"): builtins.frozenset,
    ("collections", "OrderedDict"): collections.OrderedDict,
}


class UnsafePickleError(ValueError):
    """A pickle names a class or function that is no plain container.

    Args:
        name: What it names.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name[:200]

    def __str__(self) -> str:
        return f"the pickle names {self.name!r}; only plain containers are read"


def _find_class(module: str, name: str) -> type:
    # Protocol 2 has the name of Python 2 for builtins.
    found = _ALLOWED.get(("builtins" if module == "__builtin__" else module, name))
    if found is None:
        raise UnsafePickleError(f"{module}.{name}")
    return found


class _PlainReader(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        return _find_class(module_name, global_name)


def load_plain(data: bytes) -> object:
    """Return the value of a pickle that holds only plain containers, numbers and texts.

    Raises:
        UnsafePickleError: It names anything else; nothing was called.
        ValueError: It is no whole pickle, or needs more memory than the process may have.
    """
    try:
        return _PlainReader(io.BytesIO(data)).load()
    except UnsafePickleError:
        raise
    except MemoryError:
        raise ValueError("the pickle needs more memory than it may have") from None
    except Exception as error:  # noqa: BLE001 - hostile bytes can make any operation fail
        raise ValueError(f"not a whole pickle: {error!r:.200}") from None
