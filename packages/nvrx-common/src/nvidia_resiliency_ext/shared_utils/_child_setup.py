# SPDX-License-Identifier: Apache-2.0
"""What surrounds the fork of a child: our own SIGCHLD, its signal mask, its death with us."""

from __future__ import annotations

import functools
import logging
import os
import signal as signals
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["child_setup", "end_with_parent", "keep_exit_statuses"]

logger = logging.getLogger("nvrx")

_PR_SET_PDEATHSIG = 1


def keep_exit_statuses() -> None:
    """Make sure that the kernel keeps the exit statuses of our children for us."""
    # A parent that ignored SIGCHLD leaves that to us, and the kernel then drops exit statuses.
    if signals.getsignal(signals.SIGCHLD) is not signals.SIG_IGN:
        return
    if threading.current_thread() is threading.main_thread():
        signals.signal(signals.SIGCHLD, signals.SIG_DFL)
    else:
        logger.warning("SIGCHLD is ignored: exit statuses of child processes will be lost")


def child_setup(*, death_signal: int | None) -> Callable[[], None] | None:
    """Return what the child runs before exec; `None` lets Popen use the faster vfork.

    Args:
        death_signal: What the kernel sends to the child when its parent dies; `None` for nothing.
    """
    masked = bool(signals.pthread_sigmask(signals.SIG_BLOCK, ()))
    if death_signal is None and not masked:
        return None
    if death_signal is None:
        return _unmask
    # Everything is looked up here: between fork and exec nothing may be imported.
    return functools.partial(_set_up_child, os.getpid(), _load_prctl(), death_signal)


def end_with_parent(signum: int = signals.SIGTERM) -> None:
    """Let the kernel send this process a signal when its parent dies.

    Args:
        signum: The signal. Default SIGTERM.

    Raises:
        OSError: The kernel refuses.
    """
    if _load_prctl()(_PR_SET_PDEATHSIG, signum) != 0:
        raise OSError("prctl(PR_SET_PDEATHSIG) was refused")


def _unmask() -> None:
    signals.pthread_sigmask(signals.SIG_SETMASK, ())


def _set_up_child(parent_pid: int, prctl: Callable[[int, int], int], death_signal: int) -> None:
    _unmask()
    if prctl(_PR_SET_PDEATHSIG, death_signal) != 0:
        raise OSError("prctl(PR_SET_PDEATHSIG) was refused")
    # The parent may have died before the call above; the kernel then sends nothing.
    if os.getppid() != parent_pid:
        os._exit(1)


@functools.lru_cache(maxsize=1)
def _load_prctl() -> Callable[[int, int], int]:
    import ctypes  # milliseconds that most starts need not pay

    prctl = ctypes.CDLL(None).prctl
    prctl.argtypes = (ctypes.c_int, ctypes.c_ulong)
    prctl.restype = ctypes.c_int
    function: Callable[[int, int], int] = prctl
    return function
