# SPDX-License-Identifier: Apache-2.0
"""What must be stopped when a rank aborts in place, such as checkpoint writers; it stops nothing.

A package that owns such things registers a hook on first use; the in-process restart runs them
all. Neither needs to know the other.
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
    """Have a hook run at every abort of this process; return what unregisters it.

    Args:
        name: Who it belongs to, for messages; the same name again replaces the hook in its place.
        hook: Called without arguments, from any thread, perhaps more than once; it must be quick
            and must not wait for peers that may be dead.
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
