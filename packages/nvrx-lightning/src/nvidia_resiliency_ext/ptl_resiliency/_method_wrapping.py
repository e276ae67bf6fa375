# SPDX-License-Identifier: Apache-2.0
"""Methods of Lightning's strategy run inside a context manager, until they are restored."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

__all__ = ["WrappedMethod"]

_MISSING = object()


class WrappedMethod:
    """One method of one object, run inside a context manager.

    Several owners may wrap the same method and restore it in any order: a wrapper that is no longer
    outermost stays in place and only passes calls on.

    Args:
        owner: Object whose attribute is replaced.
        name: Name of the method.
        around: Makes the context manager of one call.
    """

    def __init__(
        self, owner: object, name: str, around: Callable[[], AbstractContextManager[object]]
    ) -> None:
        self._owner, self._name = owner, name
        self._before = vars(owner).get(name, _MISSING)
        method = getattr(owner, name)
        self._is_active = True

        @functools.wraps(method)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if not self._is_active:
                return method(*args, **kwargs)
            with around():
                return method(*args, **kwargs)

        self._wrapper = wrapper
        setattr(owner, name, wrapper)

    def restore(self) -> None:
        """Take the wrapper away; harmless when repeated."""
        self._is_active = False
        if vars(self._owner).get(self._name) is not self._wrapper:
            return
        if self._before is _MISSING:
            delattr(self._owner, self._name)
        else:
            setattr(self._owner, self._name, self._before)
