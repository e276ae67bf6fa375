# SPDX-License-Identifier: Apache-2.0
"""Owns when a sender is told what is committed: at once, then not more often than is of use."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from nvidia_resiliency_ext.shared_utils._funnel import messages
from nvidia_resiliency_ext.shared_utils._funnel.refusal import Refusal

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

__all__ = ["AckWriter", "forget_settled"]

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

    def has_told(self, stream_id: str, seq: int) -> bool:
        """Tell whether the sender knows that all up to this number is committed."""
        return stream_id not in self._news and self._told.get(stream_id, (0, False)) == (seq, False)

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


class _Stream(Protocol):
    stream_id: str
    committed_seq: int

    @property
    def is_settled(self) -> bool: ...


_AnyStream = TypeVar("_AnyStream", bound=_Stream)


def forget_settled(
    streams: dict[str, _AnyStream],
    acks: AckWriter | None,
    most: int,
    forget: Callable[[_AnyStream], None],
) -> None:
    """Take streams of a call off of which nothing waits, half of `most` at a time.

    One whose sender still has to be told stays: it would wait for that for ever.

    Args:
        streams: Those of the call, by `stream_id`.
        acks: What tells their sender, if anything does.
        most: How many streams a call may have, twice over where nothing can be taken off.
        forget: Called with each that was taken off.

    Raises:
        Refusal: There are too many others.
    """
    settled = [
        stream
        for stream in streams.values()
        if stream.is_settled
        and (acks is None or acks.has_told(stream.stream_id, stream.committed_seq))
    ]
    for stream in settled[: most // 2]:
        del streams[stream.stream_id]
        if acks is not None:
            acks.forget(stream.stream_id)
        forget(stream)
    if len(streams) >= 2 * most:
        raise Refusal("RESOURCE_EXHAUSTED", "too many streams over one connection")
