# SPDX-License-Identifier: Apache-2.0
"""Faults that are signals, sent by a small program that is started at the dispatch.

It is executed and never forked from this process: a fork of a process with threads or a GPU can
hang, and copies its page tables. What it does: `signal_helper.py`.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import TYPE_CHECKING

from .actions import Action, refusal

if TYPE_CHECKING:
    import threading

    from .actions import Preparer

__all__ = ["signal_from_outside"]

_HELPER = os.path.join(os.path.dirname(__file__), "signal_helper.py")
# A live interpreter answers within its switch interval of 5 ms.
_GRACE_S = 0.025
_GRACE_WITH_CALLBACK_S = 1.0
_WITHDRAW_WAIT_S = 5.0


def signal_from_outside(number: signal.Signals) -> Preparer:
    """Return what prepares that signal to this process."""

    def prepare(due: float, has_callback: bool) -> Action:
        return _SignalFromOutside(number, due, has_callback=has_callback)

    return prepare


class _SignalFromOutside(Action):
    """Owns the helper process until it has sent the signal or given up."""

    def __init__(self, number: signal.Signals, due: float, *, has_callback: bool) -> None:
        # Not at the top: it brings subprocess, and importing faults is to be cheap.
        from nvidia_resiliency_ext.shared_utils.children import start_child
        from nvidia_resiliency_ext.shared_utils.errors import ChildStartError

        self._has_callback = has_callback
        pid = os.getpid()
        grace = _GRACE_WITH_CALLBACK_S if has_callback else _GRACE_S
        line = f"FAULT INJECTION: {number.name} to process {pid}, whose interpreter is stuck"
        numbers = (str(pid), str(int(number)), repr(due), repr(grace))
        if not sys.executable:
            raise refusal(number.name, "no Python executable is known to send it")
        try:
            self._helper = start_child(
                [sys.executable, "-I", "-S", _HELPER, *numbers, line], stdin=-1, stdout=-3
            )
        except ChildStartError as error:
            raise refusal(number.name, str(error)) from error

    def begin(self) -> None:
        if self._has_callback:
            self._tell(b"b")

    def act(self, stop: threading.Event) -> None:
        del stop
        self._tell(b"g")
        self._helper.wait()
        self._helper.close()

    def withdraw(self) -> bool:
        if self._helper.stdin is not None:
            self._helper.stdin.close()
        status = self._helper.wait(_WITHDRAW_WAIT_S)
        self._helper.close()
        return status is None or status.code != 0

    def _tell(self, word: bytes) -> None:
        if self._helper.stdin is not None:
            try:
                os.write(self._helper.stdin.fileno(), word)
            except BrokenPipeError:
                return  # it did not hear from us in time and has acted
