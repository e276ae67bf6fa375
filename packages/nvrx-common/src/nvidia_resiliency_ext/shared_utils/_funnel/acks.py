# SPDX-License-Identifier: Apache-2.0
"""Owns when a sender is told what is committed: at once, then not more often than is of use."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from nvidia_resiliency_ext.shared_utils._funnel import messages

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from nvidia_resiliency_ext.shared_utils._funnel.refusal import Refusal

__all__ = ["AckWriter"]

_SPACING_S = 0.05


class AckWriter:
    """Acknowledgements of one call; it lives in the event loop.

    However slow the sender reads, one number per stream is all that waits for it.

    Args:
        write: Sends one message of the call.
    """

    def __init__(self, write: Callable[[bytes], Awaitable[Any]]) -> None:
        self._write = write
        self._loop = asyncio.get_running_loop()
        self._told: dict[str, tuple[int, bool]] = {}
        self._news: dict[str, tuple[int, Refusal | None]] = {}
        self._task: asyncio.Task[None] | None = None
        self._ending: asyncio.Future[None] = self._loop.create_future()

    def note(self, stream_id: str, seq: int, refusal: Refusal | None = None) -> None:
        """Tell the sender about a stream, also what it was told before.

        Behind a leaf several senders may ask for the same numbers one after the other.
        """
        self._news[stream_id] = (seq, refusal)
        if self._task is None:
            self._task = self._loop.create_task(self._run())

    def forget(self, stream_id: str) -> None:
        """A stream starts again: what was told of it before counts no more."""
        self._news.pop(stream_id, None)
        self._told.pop(stream_id, None)

    def note_if_new(self, stream_id: str, seq: int, refusal: Refusal | None = None) -> None:
        """Tell the sender about a stream, unless it knows already."""
        if self._told.get(stream_id, (0, False)) != (seq, refusal is not None):
            self.note(stream_id, seq, refusal)

    async def finish(self) -> None:
        """Send what is left."""
        self._ending.set_result(None)
        if self._task is not None:
            await self._task

    def close(self) -> None:
        """Stop sending; the call is over."""
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        try:
            while self._news:
                stream_id, (seq, refusal) = next(iter(self._news.items()))
                del self._news[stream_id]
                self._told[stream_id] = (seq, refusal is not None)
                await self._write(messages.ack(stream_id, seq, refusal))
                if not self._news:
                    # The end of the call ends this wait.
                    await asyncio.wait([self._ending], timeout=_SPACING_S)
        finally:
            self._task = None
