# SPDX-License-Identifier: Apache-2.0
"""The root: its log streams, which read, acknowledge, refuse and end, and its process."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from nvidia_resiliency_ext.shared_utils._funnel.shared import Access
from nvidia_resiliency_ext.shared_utils.clock import Deadline

from . import chunks, process
from .chunks import Refusal, decode
from .funnel import Funnel
from .queue import FunnelOptions
from .service import ERRORS_IN_ACKS, Rpc, Service
from .target import Source

_PATIENCE_S = 5.0
_MAX_SOURCES = 4096

_logger = logging.getLogger("LogAggregationServer")


class LoopQueue:
    """Calls from writers' threads, made in one event loop; many wake it once."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._posted: deque[tuple[Callable[[Source], None], Source]] = deque()
        self._is_waking = False

    def post(self, take: Callable[[Source], None], source: Source) -> None:
        """Have `take(source)` called in the event loop; from any thread."""
        self._posted.append((take, source))
        if not self._is_waking:
            self._is_waking = True
            try:
                self._loop.call_soon_threadsafe(self._deliver)
            except RuntimeError:
                return  # the loop has ended, and the streams with it

    def _deliver(self) -> None:
        # First: what is added from now on wakes the loop again.
        self._is_waking = False
        for _ in range(len(self._posted)):
            take, source = self._posted.popleft()
            take(source)


class StreamRpc(Rpc):
    """One call of the root; that of a leaf carries the streams of many."""

    def __init__(
        self, funnel: Funnel, context: Any, loop_queue: LoopQueue, *, acknowledges: bool
    ) -> None:
        super().__init__(context, acknowledges=acknowledges)
        self._funnel = funnel
        self._loop_queue = loop_queue
        metadata = [tuple(pair) for pair in context.invocation_metadata() or ()]
        self._is_relay = acknowledges and ERRORS_IN_ACKS in metadata
        self.sources: dict[str, Source] = {}
        self._is_waiting = False
        self._trouble = ""  # why the last bytes of an ended stream cannot be written at present

    def response(self) -> bytes:
        sources = self.sources.values()
        if self._trouble:
            return chunks.response(self._trouble, sum(s.written_bytes for s in sources))
        seq = max((source.committed_seq for source in sources), default=0)
        return chunks.response("OK", sum(s.received_bytes for s in sources), seq)

    def clients(self) -> list[dict[str, Any]]:
        """Return the fields of a StatsResponse for each source."""
        now = time.monotonic()
        return [
            {
                "node_id": source.node_id,
                "stream_id": source.stream_id,
                "bytes_received": source.received_bytes,
                "last_seq": source.received_seq,
                "committed_seq": source.committed_seq,
                "bytes_behind": source.behind_bytes,
                "seconds_behind": source.seconds_behind(now),
            }
            for source in self.sources.values()
        ]

    def _on_progress(self, source: Source) -> None:
        # From any thread. Without acknowledgements nothing follows while chunks are read.
        if self._acknowledges or self._is_waiting or source.refusal is not None:
            self._loop_queue.post(self._note_progress, source)

    def _finish(self, *, is_clean: bool) -> None:
        for source in self.sources.values():
            self._funnel.finish(source, is_clean=is_clean)

    async def _read_each(self) -> None:
        import grpc.aio

        # One turn for each message: what can be done before the loop is.
        end, read, offer = grpc.aio.EOF, self._context.read, self._funnel.offer
        source: Source | None = None
        self._is_reading = True
        while (raw := await read()) is not end:
            chunk = decode(raw)
            if source is None or chunk.stream_id != source.stream_id:
                self.node_id = self.node_id or chunk.node_id
                source = self._source(chunk)
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
                self._on_progress(source)

    def _source(self, chunk: chunks.Chunk) -> Source:
        self._check_ids(chunk)
        source = self.sources.get(chunk.stream_id)
        if source is None:
            self._forget_settled()
            source = self._new_source(chunk.stream_id, chunk.node_id or self.node_id)
        return source

    def _new_source(self, stream_id: str, node_id: str) -> Source:
        made = Source(self._on_progress, stream_id, node_id, is_patient=not self._is_relay)
        self.sources[stream_id] = made
        return made

    def _forget_settled(self) -> None:
        """Forget streams of which nothing waits; one that goes on is a new source."""
        if len(self.sources) < _MAX_SOURCES:
            return
        settled = [source for source in self.sources.values() if source.is_settled]
        for source in settled[: _MAX_SOURCES // 2]:
            self._funnel.finish(source, is_clean=False)
            del self.sources[source.stream_id]
        if max(len(self.sources), len(self._unsent)) >= 2 * _MAX_SOURCES:
            raise Refusal("RESOURCE_EXHAUSTED", "too many streams over one connection")

    def _start_again(self, source: Source) -> Source:
        self._funnel.finish(source, is_clean=False)
        # What was told of it before counts no more.
        self._unsent.pop(source.stream_id, None)
        return self._new_source(source.stream_id, source.node_id)

    def _raise_refusal(self) -> None:
        if self._is_relay:
            return
        for source in self.sources.values():
            if source.refusal is not None:
                raise source.refusal

    def _note_progress(self, source: Source) -> None:
        self._changed.set()
        if source.refusal is not None and not self._is_relay:
            self._end_reading()
        elif self.sources.get(source.stream_id) is source or source.refusal is None:
            self._acknowledge(source.stream_id, source.committed_seq, source.refusal)

    async def _until_admitted(self, source: Source) -> None:
        # Nothing to cancel here: a refusal ends this wait.
        self._is_reading = False
        # Before the first look: progress is passed over until then.
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
        since = time.monotonic()
        self._is_waiting = True
        while True:
            self._changed.clear()
            self._raise_refusal()
            behind = [s for s in self.sources.values() if not s.is_settled and s.refusal is None]
            if not behind:
                break
            if not await process.happened(self._changed.wait(), _PATIENCE_S):
                self._trouble = self._trouble_of(behind, time.monotonic() - since)
                if self._trouble:
                    return
        for source in self.sources.values():
            self._acknowledge(source.stream_id, source.committed_seq, source.refusal)

    def _trouble_of(self, behind: list[Source], waited_s: float) -> str:
        """Return the name of the error that keeps a stream's bytes from their file, if one does."""
        # A sender without acknowledgements cannot tell waiting from writing, so it is told.
        for source in () if self._acknowledges else behind:
            error = self._funnel.trouble_of(source)
            if error:
                _logger.warning(
                    "node %r leaves with %d bytes unwritten after %.0f s: %s",
                    source.node_id, source.behind_bytes, waited_s, error,
                )  # fmt: skip
                return error
        return ""


class RootService(Service):
    def __init__(self, access: Access, funnel: Funnel) -> None:
        super().__init__(access, _logger)
        self._funnel = funnel
        self._loop_queue = LoopQueue()

    def log_stats(self) -> None:
        _logger.info(
            "received %(bytes_received)d bytes in %(chunks_received)d chunks, wrote"
            " %(bytes_written)d bytes to %(files)d files (%(failing_files)d failing),"
            " %(buffered_bytes)d bytes wait (at most %(buffered_bytes_peak)d), %(chunks_repeated)d"
            " chunks came again, %(bytes_lost)d bytes lost, %(streams)d streams open",
            {**self._counts(), "streams": self.stream_count},
        )

    def prepare_end(self) -> None:
        """Go on taking new streams until the server stops: leaves that end still bring theirs."""

    def _open(self, context: Any, *, acknowledges: bool) -> StreamRpc:
        return StreamRpc(self._funnel, context, self._loop_queue, acknowledges=acknowledges)

    def _counts(self) -> dict[str, int]:
        return self._funnel.queue.stats()


def run(config: process.ServerConfig, options: FunnelOptions) -> int:
    """Serve until asked to end; return the exit code."""
    funnel = Funnel(options)

    async def main() -> None:
        service = RootService(config.access, funnel)
        await process.serve(service, config, process.stop_event())
        service.log_stats()

    try:
        process.run_until_complete(main)
    finally:
        # Also after an error: the threads must end.
        lost = funnel.close(Deadline.after(process.CLOSE_S))
    return 1 if lost else 0
