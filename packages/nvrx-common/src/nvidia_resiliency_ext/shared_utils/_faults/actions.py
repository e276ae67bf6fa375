# SPDX-License-Identifier: Apache-2.0
"""What stands between a dispatch and its effect: the shape that every fault is made in."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable

__all__ = ["Action", "Plain", "Preparer", "on_main_thread_only", "refusal"]


class Action:
    """One fault on its way; made while it is dispatched, used by one background thread."""

    def begin(self) -> None:
        """Learn that the time has come and that the callback runs next."""

    def act(self, stop: threading.Event) -> None:
        """Make it happen; a lasting effect that can end ends when `stop` is set."""
        raise NotImplementedError

    def withdraw(self) -> bool:
        """Give it up before its time; return whether it surely does not happen."""
        return True


class Plain(Action):
    """An effect that needs no preparation."""

    def __init__(self, effect: Callable[[threading.Event], object]) -> None:
        self._effect = effect

    def act(self, stop: threading.Event) -> None:
        self._effect(stop)


if TYPE_CHECKING:
    # Moment on the monotonic clock, whether a callback comes first -> action.
    Preparer = Callable[[float, bool], Action]


def refusal(fault: str, reason: str) -> RuntimeError:
    """Return the error for a fault that this process or machine cannot be given."""
    return RuntimeError(f"fault {fault} is refused: {reason}")


def on_main_thread_only(fault: str) -> None:
    """Refuse a fault whose signal handler only the main thread may install."""
    import threading

    if threading.current_thread() is not threading.main_thread():
        raise refusal(fault, "dispatch it from the main thread, which alone can install handlers")
