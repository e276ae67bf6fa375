# SPDX-License-Identifier: Apache-2.0
"""Copy large pieces of memory with a few threads, while the trainer waits."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from concurrent.futures import Future

_PIECE_BYTES = 4 << 20
_MAX_THREADS = 4


class Copier:
    """Copies bytes; more than one piece of 4 MiB with several threads. Close it after use.

    Example:
        >>> target = bytearray(3)
        >>> with Copier() as copier:
        ...     copier.copy([(target, b"abc")])
        >>> target
        bytearray(b'abc')

    Args:
        threads: How many threads copy, the caller's included. Default: the cores that this rank
            may use divided by `LOCAL_WORLD_SIZE`, at most 4: more than that does not make the
            memory faster.
    """

    def __init__(self, threads: int | None = None) -> None:
        self._helpers = (_default_threads() if threads is None else threads) - 1
        self._pool: ThreadPoolExecutor | None = None

    def __enter__(self) -> Copier:  # noqa: PYI034 - needs Python 3.11
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def copy(self, copies: Sequence[tuple[Any, Any]]) -> None:
        """Copy each second buffer of a pair to the first, which is as long; wait for all of it.

        Raises:
            ValueError: Two buffers of a pair differ in length; some others may have been copied.
        """
        pieces = [piece for target, source in copies for piece in _pieces(target, source)]
        if self._helpers < 1 or len(pieces) <= 1:
            _copy_pieces(pieces)
            return
        left = iter(pieces)  # whoever is ready takes the next
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._helpers, thread_name_prefix="nvrx-copy")
        helping: list[Future[None]] = []
        try:
            try:
                while len(helping) < self._helpers:
                    helping.append(self._pool.submit(_copy_pieces, left))
            except RuntimeError:  # no thread can start, as while the interpreter ends
                self._helpers = 0
            _copy_pieces(left)
        finally:
            # Nothing may be written into the targets once this has returned.
            if not self._helpers:
                self.close()  # waits also for what was queued before its thread failed to start
            errors = [future.exception() for future in helping]
        for error in errors:
            if error is not None:
                raise error

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None


def _pieces(target: Any, source: Any) -> Iterable[tuple[Any, Any]]:
    to, what = np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8)
    if len(to) != len(what):
        raise ValueError(f"{len(what)} bytes do not fit into {len(to)}")
    for start in range(0, len(to), _PIECE_BYTES):
        yield to[start : start + _PIECE_BYTES], what[start : start + _PIECE_BYTES]


def _copy_pieces(pieces: Iterable[tuple[Any, Any]]) -> None:
    for target, source in pieces:
        np.copyto(target, source)  # without the interpreter's lock


def _default_threads() -> int:
    try:
        ranks = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    except ValueError:
        ranks = 1
    return max(1, min(_MAX_THREADS, len(os.sched_getaffinity(0)) // ranks))
