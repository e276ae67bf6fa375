# SPDX-License-Identifier: Apache-2.0
"""The key-value stores through which ranks agree, with barriers; the public API of `_store`."""

from __future__ import annotations

from ._store.mixin import BarrierError, BarrierOverflow, BarrierTimeout, StoreMixin
from ._store.stores import FileStore, PrefixStore, TCPStore

__all__ = [
    "BarrierError",
    "BarrierOverflow",
    "BarrierTimeout",
    "FileStore",
    "PrefixStore",
    "StoreMixin",
    "TCPStore",
]
