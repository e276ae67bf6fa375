# SPDX-License-Identifier: Apache-2.0
"""The monitor's thread that writes to the store, one operation after the other.

The loop that watches ranks never calls the store: it hands operations in, and gets the results
back as calls in its own thread. A store that hangs therefore holds up nobody but this thread, and
`busy_s` tells for how long.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import queue
import sys
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from nvidia_resiliency_ext.inprocess._monitor import factory

if TYPE_CHECKING:
    from collections.abc import Callable

    from nvidia_resiliency_ext.inprocess._monitor.settings import MonitorSettings
    from nvidia_resiliency_ext.inprocess._protocol.board import Board

__all__ = ["CONNECT", "Desk", "connect_store", "open_board", "store_name", "warm_up"]

logger = logging.getLogger("nvrx")

CONNECT = f"{__name__}:connect_store"
"""The name of `connect_store`: the one factory that needs no torch."""
_CONNECT_LIMIT = timedelta(seconds=60)


def open_board(settings: MonitorSettings) -> Board:
    """Connect to the store of a call; called in the thread that will use it."""
    if settings.store_factory != CONNECT:
        warm_up()
    from nvidia_resiliency_ext.inprocess._protocol.board import Board

    make = factory.load_named(settings.store_factory, settings.store_file)
    return Board(make(**factory.load_kwargs(settings.store_kwargs)), settings.prefix)


def connect_store(host: str, port: int) -> Any:
    """Connect to a TCPStore that is served; without torch, where that is possible."""
    from nvidia_resiliency_ext.inprocess._store.plain import PlainStore, StrangeStoreError

    try:
        return PlainStore(host, port, _CONNECT_LIMIT)
    except StrangeStoreError as error:
        logger.info("monitor_process: %s; torch's own client is used", error)
    warm_up()
    from nvidia_resiliency_ext.inprocess._store.endpoint import Endpoint
    from nvidia_resiliency_ext.inprocess._store.stores import TCPStore

    return TCPStore.connect(Endpoint(host, port, is_served=True), _CONNECT_LIMIT)


def store_name(settings: MonitorSettings) -> str:
    """Return what people call the store of a call."""
    if settings.store_factory != CONNECT:
        return f"the store of {settings.store_factory}"
    where = factory.load_kwargs(settings.store_kwargs)
    return f"the store at {where['host']}:{where['port']}"


def warm_up() -> None:
    """Import torch and all of this package, which what connects may need."""
    # `boot.py` leaves it where it has put an empty package in place.
    complete = getattr(sys.modules["nvidia_resiliency_ext.inprocess"], "_nvrx_complete", None)
    if complete is not None:
        complete()
    with contextlib.suppress(ImportError):
        import torch.distributed  # noqa: F401 - for its effect


@dataclass(frozen=True, slots=True)
class _Operation:
    run: Callable[[Board], Any]
    done: Callable[[Any], None] | None


class Desk:
    """Owns one thread with one store connection, and the operations that wait for it.

    Args:
        settings: Which store.
        post: Has something called in the loop's thread.
        lost: Called there, once, with a text when the store cannot be used any more.
    """

    def __init__(
        self,
        settings: MonitorSettings,
        post: Callable[[Callable[[], None]], None],
        lost: Callable[[str], None],
    ) -> None:
        self._settings = settings
        self._post = post
        self._lost = lost
        self._waiting: queue.SimpleQueue[_Operation | None] = queue.SimpleQueue()
        self._started_s: float | None = time.monotonic()
        self._pending = 0  # operations not done; written by the loop's thread only
        self._has_failed = False
        self._board: Board | None = None
        self._thread = threading.Thread(target=self._run, name="nvrx-store", daemon=True)
        self._thread.start()

    @property
    def is_open(self) -> bool:
        """Whether it has been connected."""
        return self._board is not None

    @property
    def pending(self) -> int:
        """How many operations are not done, and will be."""
        return 0 if self._has_failed else self._pending

    def busy_s(self, now: float) -> float:
        """Return for how long the operation of this moment has been running."""
        started_s = self._started_s
        return 0.0 if started_s is None else now - started_s

    def submit(
        self, run: Callable[[Board], Any], done: Callable[[Any], None] | None = None
    ) -> None:
        """Have an operation done after those that wait.

        Args:
            run: The operation; it may run twice, if the connection breaks.
            done: Called in the loop's thread with the result.
        """
        self._pending += 1
        self._waiting.put(_Operation(run, done))

    def close(self) -> None:
        """Let the thread end after what waits."""
        self._waiting.put(None)

    def _run(self) -> None:
        lost = ""
        try:
            self._board = open_board(self._settings)
            self._started_s = None
            while (operation := self._waiting.get()) is not None:
                self._started_s = time.monotonic()
                result = self._perform(operation)
                self._started_s = None
                self._post(functools.partial(self._finish, operation, result))
        except Exception as error:
            logger.debug("monitor_process: the store is lost", exc_info=True)
            lost = f"{type(error).__name__}: {error}"
            self._has_failed = True
        finally:
            self._started_s = None
            self._board = None
        # Not before: by then the connections are closed, which the error's frames held.
        if lost:
            self._post(lambda: self._lost(lost))

    def _perform(self, operation: _Operation) -> Any:
        assert self._board is not None
        try:
            return operation.run(self._board)
        except Exception as error:  # noqa: BLE001 - stores raise all sorts
            # A connection may break without the store being lost; all operations may be repeated.
            logger.info("monitor_process: the store is connected to again: %s", error)
            self._board = open_board(self._settings)
            return operation.run(self._board)

    def _finish(self, operation: _Operation, result: Any) -> None:
        self._pending -= 1
        if operation.done is not None:
            operation.done(result)
