# SPDX-License-Identifier: Apache-2.0
"""Read pickles of plain containers; nothing in them is ever executed.

A dump lies in a directory that others can write to. The classes that a pickle may name are a
closed list of containers, so no function of its choice is called. The interpreter's fast reader
grows a table to any index that a pickle names: `load_plain` uses the slow reader, which keeps a
dictionary; `load_plain_limited` is for a process whose memory is limited.
"""

from __future__ import annotations

import builtins
import collections
import io
import pickle
from typing import Any

__all__ = ["UnsafePickleError", "load_plain", "load_plain_limited"]

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


# The reader in Python: its table of earlier values is a dictionary, so an index of four billion
# in a small file costs nothing.
class _SlowReader(pickle._Unpickler):  # noqa: SLF001 - its only name
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        return _find_class(module_name, global_name)


class _FastReader(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        return _find_class(module_name, global_name)


def load_plain(data: bytes) -> object:
    """Return the value of a pickle that holds only plain containers, numbers and texts.

    Raises:
        UnsafePickleError: It names anything else; nothing was called.
        ValueError: It is no whole pickle.
    """
    return _load(_SlowReader(io.BytesIO(data)))


def load_plain_limited(data: bytes) -> object:
    """Return the same as `load_plain`, five times as fast, in a process with limited memory.

    Raises:
        UnsafePickleError: It names anything else; nothing was called.
        ValueError: It is no whole pickle, or needs more memory than the process may have.
    """
    return _load(_FastReader(io.BytesIO(data)))


def _load(reader: Any) -> object:
    try:
        return reader.load()
    except UnsafePickleError:
        raise
    except MemoryError:
        raise ValueError("the pickle needs more memory than it may have") from None
    except Exception as error:  # noqa: BLE001 - hostile bytes can make any operation fail
        raise ValueError(f"not a whole pickle: {error!r:.200}") from None
