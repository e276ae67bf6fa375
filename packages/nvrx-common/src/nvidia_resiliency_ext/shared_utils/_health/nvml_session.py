# SPDX-License-Identifier: Apache-2.0
"""Owns this process's one session with the driver: lazy, serialised, with a deadline per call.

State that all threads share lives here and nowhere else in these rooms. The session is opened at
the first question and stays open. A call runs in a thread that can be left behind, or, with
``NVRX_NVML_SUBPROCESS=1``, in a helper process that can be killed. A forked child never touches the
session of its parent: it asks through a helper of its own.
"""

from __future__ import annotations

import functools
import os
import threading
from typing import TYPE_CHECKING, Any, Protocol

from nvidia_resiliency_ext.shared_utils.abandonable import DeadlineCaller, StuckError

from . import settings
from .nvml_errors import DriverHungError
from .nvml_queries import NvmlQueries, load_binding

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["NvmlSession", "lock", "session", "set_nvml", "with_pynvml_lock"]

lock = threading.RLock()
"""Held for one driver call at a time by the session; others may hold it around calls of theirs."""


class Answering(Protocol):
    """Answers one question at a time, within a deadline."""

    def ask(self, query: str, arguments: tuple[Any, ...], timeout_s: float) -> Any:
        """Return the answer, or raise an error of `nvml_errors`."""
        ...

    def close(self) -> None:
        """Give back what can be given back."""
        ...


class NvmlSession:
    """Puts questions of `NvmlQueries` to whoever answers them in this process.

    Args:
        answering: Answers them.
    """

    def __init__(self, answering: Answering) -> None:
        self._answering = answering

    def ask(self, query: str, *arguments: Any) -> Any:
        """Return the answer to one question, by the name of a method of `NvmlQueries`.

        Raises:
            NvmlUnavailableError: There is nothing to ask.
            NvmlCallError: The driver says no.
            DriverHungError: This call, or one before it, has not returned within
                `NVRX_NVML_TIMEOUT_S`.
        """
        timeout_s = settings.nvml_timeout_s()
        held = lock
        if not held.acquire(timeout=timeout_s):
            raise DriverHungError(query, timeout_s)
        try:
            # The whole time, however long others took before: it is the driver's, not the queue's.
            return self._answering.ask(query, arguments, timeout_s)
        finally:
            held.release()

    def close(self) -> None:
        """Let it go; the library itself stays as it is."""
        self._answering.close()


class _ThreadAnswering:
    """Answers in a thread per call; while one hangs, all later questions fail at once."""

    def __init__(self, load: Callable[[], Any]) -> None:
        self._load = load
        self._queries: NvmlQueries | None = None
        self._caller = DeadlineCaller()

    def ask(self, query: str, arguments: tuple[Any, ...], timeout_s: float) -> Any:
        answer = functools.partial(self._answer, query, arguments)
        try:
            return self._caller.run(query, answer, timeout_s)
        except StuckError as error:
            raise DriverHungError(error.what, error.seconds) from error

    def close(self) -> None:
        pass

    def _answer(self, query: str, arguments: tuple[Any, ...]) -> Any:
        if self._queries is None:
            self._queries = NvmlQueries(self._load())
        return self._queries.answer(query, arguments)


class _State:
    """The session of this process, and what it was told to use in place of the real binding."""

    def __init__(self) -> None:
        self.session: NvmlSession | None = None
        self.binding: Any = None
        self.is_forked = False
        self.guard = threading.Lock()


_state = _State()


def session() -> NvmlSession:
    """Return the session of this process, made at the first call."""
    with _state.guard:
        if _state.session is None:
            _state.session = NvmlSession(_choose())
        return _state.session


def set_nvml(binding: Any) -> None:
    """Use an object in place of the module `pynvml`.

    It starts a new session, so a test can also use it to forget what was found before.

    A new session begins, which forgets all earlier readings.

    Args:
        binding: The object; None: the real module.
    """
    with _state.guard:
        old, _state.session = _state.session, None
        _state.binding = binding
    if old is not None:
        old.close()


def with_pynvml_lock(func: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that holds the lock of driver calls while it runs.

    Args:
        func: The function to wrap.
    """

    @functools.wraps(func)
    def locked(*args: Any, **kwargs: Any) -> Any:
        with lock:
            return func(*args, **kwargs)

    return locked


def _choose() -> Answering:
    if _state.binding is not None:
        binding = _state.binding
        return _ThreadAnswering(lambda: binding)
    if _state.is_forked or settings.nvml_in_helper():
        from .nvml_helper import HelperAnswering

        return HelperAnswering()
    return _ThreadAnswering(load_binding)


def _after_fork() -> None:
    # The parent's threads are gone, its locks may be held for ever, and its descriptors of the
    # driver are not ours to use.
    global lock  # noqa: PLW0603 - the one name under which it is known
    lock = threading.RLock()
    _state.guard = threading.Lock()
    _state.is_forked = _state.is_forked or _state.session is not None
    _state.session = None


os.register_at_fork(after_in_child=_after_fork)
