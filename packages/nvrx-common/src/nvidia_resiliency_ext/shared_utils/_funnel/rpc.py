# SPDX-License-Identifier: Apache-2.0
"""Owns one log stream at the gRPC edge of the root: reading, acknowledging, refusing, ending.

It lives in the event loop, so an idle stream costs a suspended coroutine and no thread. Messages
are read one by one, and none while a chunk waits for room: gRPC's flow control then holds the
sender.
"""

from __future__ import annotations

import asyncio
import errno
import logging
from typing import TYPE_CHECKING, Any

from nvidia_resiliency_ext.shared_utils._funnel.acks import AckWriter, forget_settled
from nvidia_resiliency_ext.shared_utils._funnel.chunks import Chunk, decode
from nvidia_resiliency_ext.shared_utils._funnel.refusal import Refusal
from nvidia_resiliency_ext.shared_utils._funnel.streams import Source

if TYPE_CHECKING:
    from nvidia_resiliency_ext.shared_utils._funnel.funnel import Funnel
    from nvidia_resiliency_ext.shared_utils._funnel.mailbox import Mailbox

__all__ = ["ERRORS_IN_ACKS", "StreamRpc"]

ERRORS_IN_ACKS = ("nvrx-errors", "ack")
_PATIENCE_S = 5.0
_MAX_ID_CHARS = 256
_MAX_SOURCES = 4096

_logger = logging.getLogger("LogAggregationServer")


class StreamRpc:
    """One open StreamLogs or StreamLogsAcked; a connection to the funnel.

    Args:
        funnel: Where chunks go.
        context: gRPC's context of the call.
        mailbox: Brings news into the event loop.
        acknowledges: The method has acknowledgements.
    """

    def __init__(
        self, funnel: Funnel, context: Any, mailbox: Mailbox, *, acknowledges: bool
    ) -> None:
        self._funnel = funnel
        self._mailbox = mailbox
        self._context = context
        self._is_relay = acknowledges and _has_errors_in_acks(context)
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self.sources: dict[str, Source] = {}
        self._is_waiting = False
        self._changed = asyncio.Event()
        self._is_reading = False
        self._acks = AckWriter(context.write) if acknowledges else None

    def progress(self, source: Source) -> None:
        """Hand a source's news to the event loop; from any thread."""
        # Without acknowledgements nothing follows from it while chunks are read.
        if self._acks is not None or self._is_waiting or source.refusal is not None:
            self._mailbox.post(self._note, source)

    async def run(self) -> None:
        """Take all chunks of the stream; return when every byte is in its file.

        Raises:
            Refusal: Something is not taken; the call must end with its code.
        """
        is_clean = False
        try:
            await self._read_all()
            is_clean = True
            for source in self.sources.values():
                self._funnel.finish(source, is_clean=True)
            await self._until_settled()
            if self._acks is not None:
                for source in self.sources.values():
                    news = (source.committed_seq, source.refusal)
                    self._acks.note_if_new(source.stream_id, *news)
                await self._acks.finish()
        finally:
            if not is_clean:
                for source in self.sources.values():
                    self._funnel.finish(source, is_clean=False)
            if self._acks is not None:
                self._acks.close()

    @property
    def bytes_written(self) -> int:
        """Bytes of the stream that are in their files."""
        return sum(source.written_bytes for source in self.sources.values())

    @property
    def bytes_received(self) -> int:
        """Bytes of the stream that were taken."""
        return sum(source.received_bytes for source in self.sources.values())

    async def _read_all(self) -> None:
        try:
            await self._read_each()
        except asyncio.CancelledError:
            # Cancelled by us, because of a refusal, or by gRPC, because the client is gone.
            self._raise_refusal()
            raise
        finally:
            self._is_reading = False

    async def _read_each(self) -> None:
        import grpc.aio

        # One turn for each message: what can be done before the loop is.
        end, read, offer = grpc.aio.EOF, self._context.read, self._funnel.offer
        source: Source | None = None
        node_id = ""
        self._is_reading = True
        while (raw := await read()) is not end:
            chunk = decode(raw)
            if source is None or chunk.stream_id != source.stream_id:
                node_id = node_id or chunk.node_id
                source = self._source(chunk, node_id)
            if source.refusal is not None and self._is_relay:
                if not chunk.resumed:
                    continue
                source = self._start_again(source)
            try:
                if not offer(source, chunk, len(raw)):
                    await self._until_admitted(source)
            except Refusal as refusal:
                if not self._is_relay:
                    raise
                _logger.debug("refused in an acknowledgement: %s", str(refusal))
                self.progress(source)

    def _source(self, chunk: Chunk, node_id: str) -> Source:
        if len(chunk.stream_id) > _MAX_ID_CHARS or len(chunk.node_id) > _MAX_ID_CHARS:
            raise Refusal("INVALID_ARGUMENT", f"an id has more than {_MAX_ID_CHARS} characters")
        source = self.sources.get(chunk.stream_id)
        if source is None:
            if len(self.sources) >= _MAX_SOURCES:
                # Of streams that have ended, the connection of a leaf tells nothing. One that goes
                # on after all is a new source; the ledger knows what it has sent.
                forget_settled(self.sources, self._acks, _MAX_SOURCES, self._forget)
            source = self._new_source(chunk.stream_id, chunk.node_id or node_id)
            self.sources[chunk.stream_id] = source
        return source

    def _new_source(self, stream_id: str, node_id: str) -> Source:
        return Source(self, stream_id, node_id, is_patient=not self._is_relay)

    def _forget(self, source: Source) -> None:
        self._funnel.finish(source, is_clean=False)

    def _start_again(self, source: Source) -> Source:
        self._funnel.finish(source, is_clean=False)
        if self._acks is not None:
            self._acks.forget(source.stream_id)
        fresh = self._new_source(source.stream_id, source.node_id)
        self.sources[source.stream_id] = fresh
        return fresh

    def _raise_refusal(self) -> None:
        if self._is_relay:
            return
        for source in self.sources.values():
            if source.refusal is not None:
                raise source.refusal

    def _note(self, source: Source) -> None:
        self._changed.set()
        if source.refusal is not None and not self._is_relay:
            if self._is_reading and self._task is not None:
                self._task.cancel()
        elif self._acks is not None and self.sources.get(source.stream_id) is source:
            self._acks.note(source.stream_id, source.committed_seq, source.refusal)

    async def _until_admitted(self, source: Source) -> None:
        # Nothing to cancel here: a refusal ends this wait.
        self._is_reading = False
        # Before the first look: news are passed over until then.
        self._is_waiting = True
        while source.waiting is not None:
            self._changed.clear()
            await self._changed.wait()
        self._is_waiting = False
        self._is_reading = True
        self._raise_refusal()
        if source.refusal is not None:
            raise source.refusal

    async def _until_settled(self) -> None:
        since = self._loop.time()
        self._is_waiting = True
        while True:
            self._changed.clear()
            self._raise_refusal()
            behind = [s for s in self.sources.values() if not s.is_settled and s.refusal is None]
            if not behind:
                return
            try:
                await asyncio.wait_for(self._changed.wait(), _PATIENCE_S)
            except (asyncio.TimeoutError, TimeoutError):
                self._check_trouble(behind, self._loop.time() - since)

    def _check_trouble(self, behind: list[Source], waited_s: float) -> None:
        # A sender without acknowledgements cannot tell waiting from writing, so it is told.
        if self._acks is not None:
            return
        for source in behind:
            error = self._funnel.trouble_of(source)
            if error is not None:
                _logger.warning(
                    "node %r leaves with %d bytes unwritten after %.0f s: %s",
                    source.node_id, source.behind_bytes, waited_s, error.strerror,
                )  # fmt: skip
                raise UnwrittenError(error)


def _has_errors_in_acks(context: Any) -> bool:
    return ERRORS_IN_ACKS in [tuple(pair) for pair in context.invocation_metadata() or ()]


class UnwrittenError(Exception):
    """A stream ended, and its last bytes cannot be written at present."""

    def __init__(self, error: OSError) -> None:
        super().__init__(error)
        self.status = errno.errorcode.get(error.errno or errno.EIO, "EIO")
