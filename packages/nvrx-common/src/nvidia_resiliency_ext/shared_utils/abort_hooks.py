# SPDX-License-Identifier: Apache-2.0
"""Hooks that stop resources, such as checkpoint writers, when a rank aborts in-process.

A package that owns such a resource registers a hook at first use; the in-process restart runs all
hooks. Neither imports the other.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

__all__ = ["register_abort_hook", "run_abort_hooks"]

logger = logging.getLogger("nvrx")

_lock = threading.Lock()
_hooks: dict[str, Callable[[], object]] = {}


def register_abort_hook(name: str, hook: Callable[[], object]) -> Callable[[], None]:
    """Run a hook at every abort of this process; return a function that unregisters it.

    Args:
        name: Who it belongs to, for messages; the same name again replaces the hook in its place.
        hook: Called without arguments, from any thread, perhaps more than once; it must be quick
            and must not wait for peers that may be dead.

    Example:
        >>> unregister = register_abort_hook("checkpoint writer", threading.Event().set)
        >>> unregister()
    """
    with _lock:
        _hooks[name] = hook

    def unregister() -> None:
        with _lock:
            if _hooks.get(name) is hook:
                del _hooks[name]

    return unregister


def run_abort_hooks() -> list[Exception]:
    """Run all hooks in the order of registration; return what was raised and logged."""
    with _lock:
        hooks = list(_hooks.items())
    failures = []
    for name, hook in hooks:
        try:
            hook()
        except Exception as error:
            logger.exception("abort hook %s failed", name)
            failures.append(error)
    return failures
