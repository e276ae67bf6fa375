# SPDX-License-Identifier: Apache-2.0
"""Signals as readable bytes: the handler does nothing, the loop decides."""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
from collections.abc import Iterable, Iterator
from types import FrameType


def _ignore(_signum: int, _frame: FrameType | None) -> None:
    """Do nothing: the number arrives through the wakeup descriptor."""


def ignore(signum: signal.Signals) -> None:
    """Let a signal do nothing; in another thread than the main one it stays as it is."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signum, signal.SIG_IGN)


class SignalInbox:
    """Collects signal numbers while it is installed.

    Only the main thread may install handlers; in another thread (a launcher used as a library)
    the inbox stays silent and the program keeps its own handlers.
    """

    def __init__(self, signums: Iterable[signal.Signals]) -> None:
        self._signums = tuple(signums)
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)

    def fileno(self) -> int:
        """Return a descriptor that is readable when a signal came."""
        return self._reader.fileno()

    def receive(self) -> list[int]:
        """Return the numbers that came since the last call, in order."""
        try:
            return [number for number in self._reader.recv(4096) if number in self._signums]
        except BlockingIOError:
            return []

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Take the signals over for the time of the context, and give them back."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {signum: signal.getsignal(signum) for signum in self._signums}
        old_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        taken = []
        for signum in self._signums:
            # nohup: who started us wants us to live on.
            if before[signum] is signal.SIG_IGN and signum == signal.SIGHUP:
                continue
            signal.signal(signum, _ignore)
            taken.append(signum)
        try:
            yield
        finally:
            for signum in taken:
                signal.signal(signum, before[signum] or signal.SIG_DFL)
            signal.set_wakeup_fd(old_fd)

    def close(self) -> None:
        """Close both ends."""
        self._reader.close()
        self._writer.close()
