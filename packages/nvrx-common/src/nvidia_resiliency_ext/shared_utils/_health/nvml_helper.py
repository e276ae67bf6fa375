# SPDX-License-Identifier: Apache-2.0
"""Asks the driver in a process of its own, which is killed when a call does not return.

Both ends are here: `HelperAnswering` in the process that asks, `main` in the one that answers
(``python -m``, its socket is standard input). A helper in uninterruptible sleep ignores even
SIGKILL: it is abandoned and counted, and no second one is started while it hangs.
"""

from __future__ import annotations

import socket
import sys
import time
from dataclasses import dataclass
from typing import Any

from nvidia_resiliency_ext.shared_utils.errors import ChildStartError, WireError
from nvidia_resiliency_ext.shared_utils.wire import MessageSet, receive_message, send_message

from .nvml import DriverHungError, NvmlCallError, NvmlQueries, NvmlUnavailableError, load_binding
from .probes import Probe

_MODULE = "nvidia_resiliency_ext.shared_utils._health.nvml_helper"


@dataclass(frozen=True)
class _Question:
    query: str
    arguments: list[Any]


@dataclass(frozen=True)
class _Answer:
    """A value; or `refused`, the arguments of the NvmlCallError; or `absent`, why there is none."""

    value: Any = None
    refused: tuple[str, int, str] | None = None
    absent: str | None = None


_MESSAGES = MessageSet(_Question, _Answer)

# Starting an interpreter on a busy machine says nothing about the driver: it has its own time.
_START_TIMEOUT_S = 30.0


class HelperAnswering:
    """Keeps one helper process and puts the questions to it."""

    def __init__(self) -> None:
        self._socket: socket.socket | None = None
        self._helper: Probe | None = None
        self._stuck: tuple[Probe, str] | None = None
        self._absent: NvmlUnavailableError | None = None

    def ask(self, query: str, arguments: tuple[Any, ...], timeout_s: float) -> Any:
        if self._absent is not None:
            raise self._absent
        if self._stuck is not None:
            helper, stuck_query = self._stuck
            if not helper.has_ended():
                raise DriverHungError(stuck_query, helper.age_s())
            self._stuck = None
        try:
            connection = self._socket or self._start()
            return self._exchange(connection, _Question(query, list(arguments)), timeout_s)
        except DriverHungError:
            raise  # a TimeoutError, too
        except (WireError, OSError, ChildStartError) as error:
            self.close()
            raise NvmlCallError(query, 999, f"the helper process failed: {error}") from error

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
        if self._helper is not None:
            self._helper.kill()
        self._socket = self._helper = None

    def _start(self) -> socket.socket:
        """Start the helper and wait until it is ready, which is before it calls the driver."""
        ours, theirs = socket.socketpair()
        self._socket = ours
        with theirs:
            self._helper = Probe.start([sys.executable, "-m", _MODULE], stdin=theirs.fileno())
        self._receive(ours, _START_TIMEOUT_S)
        return ours

    def _exchange(self, connection: socket.socket, question: _Question, timeout_s: float) -> Any:
        start = time.monotonic()
        try:
            send_message(connection, _MESSAGES, question, timeout_s)
            left_s = max(0.001, timeout_s - (time.monotonic() - start))
            return self._receive(connection, left_s)
        except TimeoutError as error:
            helper = self._helper
            self.close()
            if helper is not None and not helper.has_ended():
                self._stuck = helper, question.query
            raise DriverHungError(question.query, time.monotonic() - start) from error

    def _receive(self, connection: socket.socket, timeout_s: float) -> Any:
        answer = receive_message(connection, _MESSAGES, timeout_s)
        assert isinstance(answer, _Answer)
        if answer.absent is not None:
            self._absent = NvmlUnavailableError(answer.absent)
            self.close()
            raise self._absent
        if answer.refused is not None:
            raise NvmlCallError(*answer.refused)
        return answer.value


def main() -> int:
    """Answer questions on standard input until it closes."""
    with socket.socket(fileno=0) as connection:
        try:
            queries = NvmlQueries(load_binding())
        except NvmlUnavailableError as error:
            send_message(connection, _MESSAGES, _Answer(absent=str(error)), None)
            return 0
        answer = _Answer("ready")
        while True:
            send_message(connection, _MESSAGES, answer, None)
            try:
                question = receive_message(connection, _MESSAGES, None)
            except WireError:
                return 0
            assert isinstance(question, _Question)
            try:
                answer = _Answer(queries.answer(question.query, question.arguments))
            except NvmlUnavailableError as error:
                answer = _Answer(absent=str(error))
            except NvmlCallError as error:
                answer = _Answer(refused=(error.query, error.code, error.text))


if __name__ == "__main__":
    sys.exit(main())
