# SPDX-License-Identifier: Apache-2.0
"""Exceptions raised in other threads by the interpreter's own means; no signals, no gate.

For programs that use these functions by themselves. The wrapper's own way is `gate.py`.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
import threading
from typing import TYPE_CHECKING, Any

from .restart import RankShouldRestart
from .shield import is_shielded, shielded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["async_abort_main_thread", "async_raise", "delayed_async_raise", "reraise_if_unraisable"]

_PACE_S = 0.01
_set_async_exc = ctypes.pythonapi.PyThreadState_SetAsyncExc
_set_async_exc.argtypes = [ctypes.c_ulong, ctypes.py_object]
_set_async_exc.restype = ctypes.c_int


def async_raise(
    tid: int, exc_type: type[BaseException], event: threading.Event | None = None
) -> None:
    """Raise an exception in a thread, between two bytecodes; does nothing at interpreter exit.

    Args:
        tid: Identifier of the thread.
        exc_type: Class of the exception.
        event: Waited for first.

    Raises:
        RuntimeError: There is no such thread, or several would be hit; then none is.
    """
    if event is not None:
        event.wait()
    if sys.is_finalizing():
        return
    hit = _set_async_exc(tid, exc_type)
    if hit == 0:
        raise RuntimeError(f"no thread has the identifier {tid}")
    if hit > 1:
        _set_async_exc(tid, ctypes.py_object())  # nothing, which `None` would not be
        raise RuntimeError(f"{hit} threads have the identifier {tid}; nothing was raised")


def delayed_async_raise(tid: int, exc_type: type[BaseException]) -> None:
    """Raise an exception in a thread a moment later, from a helper thread.

    It waits until the thread is out of a function that could not pass the exception on.

    Args:
        tid: `ident` of the thread.
        exc_type: The exception's class.
    """
    _in_helper_thread(lambda: _raise_outside(tid, exc_type))


def async_abort_main_thread(msg: str | None = None) -> None:
    """Raise `RankShouldRestart` in the main thread, with the message as its argument.

    Args:
        msg: Argument of the exception; None: no argument.
    """
    ident = threading.main_thread().ident
    if ident is not None:
        async_raise(ident, RankShouldRestart if msg is None else _with_message(msg))


@contextlib.contextmanager
def reraise_if_unraisable(exc_type: type[BaseException]) -> Iterator[None]:
    """Raise exceptions again that were raised where Python cannot pass them on.

    In a destructor or a callback Python only reports them to `sys.unraisablehook`. While this is
    active they are raised once more in the main thread. The hook that was there is called, too,
    and is there again afterwards.

    Args:
        exc_type: Which exceptions.
    """
    previous = sys.unraisablehook
    main_ident = threading.main_thread().ident
    # Guards what was lost: it is raised by a helper thread, or at the end of this, not by both.
    lock = threading.Lock()
    lost: list[type[BaseException]] = []

    @shielded
    def hook(unraisable: Any) -> None:
        try:
            previous(unraisable)
        finally:
            if main_ident is not None and issubclass(unraisable.exc_type, exc_type):
                lost.append(unraisable.exc_type)
                _in_helper_thread(raise_lost)

    def raise_lost() -> None:
        _wait_until_outside(main_ident)
        with lock:
            # The same one several times is one.
            if lost and main_ident is not None:
                async_raise(main_ident, lost[0])
                lost.clear()

    def end() -> list[type[BaseException]]:
        # One that was set meanwhile knows ours as its previous one, and keeps working.
        if sys.unraisablehook is hook:
            sys.unraisablehook = previous
        with lock:
            left, lost[:] = lost[:], []
            return left

    sys.unraisablehook = hook
    try:
        yield
    except BaseException:
        end()
        raise
    left = end()
    if left:
        raise left[0]


def _in_helper_thread(function: Callable[[], None]) -> None:
    threading.Thread(target=function, name="nvrx-delayed-raise", daemon=True).start()


def _raise_outside(tid: int, exc_type: type[BaseException]) -> None:
    _wait_until_outside(tid)
    # The thread may have ended: then nobody is there to be told.
    with contextlib.suppress(RuntimeError):
        async_raise(tid, exc_type)


def _wait_until_outside(tid: int | None) -> None:
    elsewhere = threading.Event()
    while tid is not None and is_shielded(sys._current_frames().get(tid)):  # noqa: SLF001 - the way
        elsewhere.wait(_PACE_S)


def _with_message(msg: str) -> type[RankShouldRestart]:
    # The interpreter takes classes only, and calls them without arguments.
    class WithMessage(RankShouldRestart):
        def __new__(cls) -> RankShouldRestart:  # type: ignore[misc]
            return RankShouldRestart(msg)

    return WithMessage
