# SPDX-License-Identifier: Apache-2.0
"""Replacing a method for a while."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["patched_method"]


@contextmanager
def patched_method(obj: Any, name: str, new: Any) -> Iterator[None]:
    """Let `obj.name` be `new` inside the block, and what it was before afterwards.

    An attribute that `obj` only inherits is not written onto it for good.

    Raises:
        AttributeError: there is no such attribute.
    """
    getattr(obj, name)
    own = vars(obj)
    is_own = name in own
    before = own.get(name)
    setattr(obj, name, new)
    try:
        yield
    finally:
        if is_own:
            setattr(obj, name, before)
        else:
            delattr(obj, name)
