# SPDX-License-Identifier: Apache-2.0
"""Ports for tests whose programs listen later, or again: no two tests are given the same one."""

from __future__ import annotations

import contextlib
import secrets
import socket
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# Below those that the system gives to who asks for any.
_FIRST, _LAST = 10000, 32000
_TRIES = 1000


@contextlib.contextmanager
def claimed(count: int = 1) -> Iterator[int]:
    """Give the first of so many adjacent ports at which nobody listens, until the end of the block.

    A port that has only been tried may be given to another test before the program listens, so each
    is claimed among tests by a name that the kernel takes back when the process ends.
    """
    for _ in range(_TRIES):
        first = _FIRST + secrets.randbelow(_LAST - _FIRST - count)
        with contextlib.ExitStack() as claims:
            try:
                for port in range(first, first + count):
                    claim = claims.enter_context(socket.socket(socket.AF_UNIX))
                    claim.bind(f"\0nvrx-tests-port-{port}")
                    with socket.socket() as probe:
                        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                        probe.bind(("", port))
            except OSError:
                continue
            yield first
            return
    raise AssertionError(f"no {count} free ports between {_FIRST} and {_LAST}")


@contextlib.contextmanager
def turn_at(port: int, limit_s: float = 150.0) -> Iterator[None]:
    """Let one test at a time use a port that a program chooses itself."""
    deadline = time.monotonic() + limit_s

    def wait_for(bind: Callable[[], None]) -> None:
        while True:
            try:
                return bind()
            except OSError:
                assert time.monotonic() < deadline, f"port {port} stays in use"
                time.sleep(0.1)  # another test's process; nobody tells of its end

    def probe() -> None:
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("", port))

    with socket.socket(socket.AF_UNIX) as claim:
        wait_for(lambda: claim.bind(f"\0nvrx-tests-port-{port}"))
        wait_for(probe)
        yield
