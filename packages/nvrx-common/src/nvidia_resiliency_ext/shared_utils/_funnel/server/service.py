# SPDX-License-Identifier: Apache-2.0
"""What the gRPC services of root and leaf have in common: calls, answers, access.

A service lives in the event loop, so an idle stream costs a suspended coroutine and no thread.
No message is read while a chunk waits for space: gRPC's flow control then holds the sender.
"""

from __future__ import annotations

import abc
import asyncio
import logging
import threading
from typing import Any

from nvidia_resiliency_ext.shared_utils._funnel.shared import SERVICE, Access

from . import chunks
from .chunks import Refusal

ERRORS_IN_ACKS = ("nvrx-errors", "ack")
_MAX_ID_CHARS = 256
_SHOWN_REFUSALS = 20
_ACK_SPACING_S = 0.05


class Rpc(abc.ABC):
    """One open StreamLogs or StreamLogsAcked of a root or a leaf, in the event loop.

    However slow the sender reads, one acknowledgement per stream is all that waits for it.
    """

    def __init__(self, context: Any, *, acknowledges: bool) -> None:
        self.node_id = ""
        self._context = context
        self._acknowledges = acknowledges
        self._task = asyncio.current_task()
        self._changed = asyncio.Event()
        self._is_reading = False
        self._unsent: dict[str, tuple[int, Refusal | None]] = {}
        self._ack_task: asyncio.Task[None] | None = None
        self._ending: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self) -> None:
        """Take all chunks; return when every byte is in its file, raise the call's `Refusal`."""
        is_clean = False
        try:
            try:
                await self._read_each()
                is_clean = True
            except asyncio.CancelledError:
                # Cancelled by us, because of a refusal, or by gRPC, because the client is gone.
                self._raise_refusal()
                raise
            finally:
                self._is_reading = False
                self._finish(is_clean=is_clean)
            await self._until_settled()
            self._ending.set_result(None)
            if self._ack_task is not None:
                await self._ack_task
        finally:
            # What is stored after the end of the call has nobody to tell.
            self._acknowledges = False
            if self._ack_task is not None:
                self._ack_task.cancel()

    @abc.abstractmethod
    def response(self) -> bytes:
        """Return the answer to a call that has ended."""

    def clients(self) -> list[dict[str, Any]]:
        """Return the fields of a StatsResponse for each stream."""
        return []

    @abc.abstractmethod
    async def _read_each(self) -> None: ...

    @abc.abstractmethod
    def _finish(self, *, is_clean: bool) -> None: ...

    @abc.abstractmethod
    async def _until_settled(self) -> None: ...

    @abc.abstractmethod
    def _raise_refusal(self) -> None: ...

    def _end_reading(self) -> None:
        """Wake the task that reads, which then raises the refusal."""
        self._changed.set()
        if self._is_reading and self._task is not None:
            self._task.cancel()

    def _check_ids(self, chunk: chunks.Chunk) -> None:
        if len(chunk.stream_id) > _MAX_ID_CHARS or len(chunk.node_id) > _MAX_ID_CHARS:
            raise Refusal("INVALID_ARGUMENT", f"an id has more than {_MAX_ID_CHARS} characters")

    def _acknowledge(self, stream_id: str, seq: int, refusal: Refusal | None = None) -> None:
        """Acknowledge a stream, even a number again: senders behind a leaf may share one."""
        if not self._acknowledges:
            return
        self._unsent[stream_id] = (seq, refusal)
        if self._ack_task is None:
            self._ack_task = asyncio.get_running_loop().create_task(self._write_acks())

    async def _write_acks(self) -> None:
        try:
            while self._unsent:
                stream_id = next(iter(self._unsent))
                await self._context.write(chunks.ack(stream_id, *self._unsent.pop(stream_id)))
                if not self._unsent:
                    # The end of the call ends this wait.
                    await asyncio.wait([self._ending], timeout=_ACK_SPACING_S)
        finally:
            self._ack_task = None


class RefusalLog:
    """Logs refused streams, ever more seldom if there are many; for all threads."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._lock = threading.Lock()
        self._count = 0

    def add(self, node_id: str, refusal: Refusal) -> None:
        with self._lock:
            self._count += 1
            count = self._count
        if count <= _SHOWN_REFUSALS or count & (count - 1) == 0:
            more = "" if count <= _SHOWN_REFUSALS else f" ({count} refusals so far)"
            # Its text only: a handler that keeps records would keep the call with its traceback.
            self._logger.warning(
                "a stream of node %r is refused: %s%s", node_id, str(refusal), more
            )


class Service(abc.ABC):
    """The methods of a server's service and its open streams; made in the event loop."""

    def __init__(self, access: Access, logger: logging.Logger) -> None:
        self._access = access
        self.logger = logger
        self._refusals = RefusalLog(logger)
        self._rpcs: set[Rpc] = set()
        self._left = asyncio.Event()
        self._refuses_new = False

    @property
    def stream_count(self) -> int:
        return len(self._rpcs)

    @property
    def is_healthy(self) -> bool:
        """The answer to a health check."""
        return True

    def prepare_end(self) -> None:
        self._refuses_new = True

    @abc.abstractmethod
    def log_stats(self) -> None:
        """Log counters of the service."""

    @abc.abstractmethod
    def _open(self, context: Any, *, acknowledges: bool) -> Rpc: ...

    @abc.abstractmethod
    def _counts(self) -> dict[str, int]:
        """Return counts by their names in a StatsResponse."""

    def handler(self) -> Any:
        """Return gRPC's handler of all methods; messages stay bytes."""
        import grpc

        methods = {
            "StreamLogs": grpc.stream_unary_rpc_method_handler(self._stream_logs),
            "StreamLogsAcked": grpc.stream_stream_rpc_method_handler(self._stream_logs_acked),
            "HealthCheck": grpc.unary_unary_rpc_method_handler(self._health_check),
            "Stats": grpc.unary_unary_rpc_method_handler(self._stats),
        }
        return grpc.method_handlers_generic_handler(SERVICE, methods)

    async def wait_empty(self) -> None:
        while self._rpcs:
            self._left.clear()
            await self._left.wait()

    async def _stream_logs(self, _requests: Any, context: Any) -> bytes:
        return (await self._serve(context, acknowledges=False)).response()

    async def _stream_logs_acked(self, _requests: Any, context: Any) -> None:
        await self._serve(context, acknowledges=True)

    async def _serve(self, context: Any, *, acknowledges: bool) -> Rpc:
        # Plain code: when all nodes come at once, what one stream costs holds up all others.
        await self._check_access(context)
        if self._refuses_new:
            await _abort(context, Refusal("UNAVAILABLE", "this server is ending"))
        rpc = self._open(context, acknowledges=acknowledges)
        self._rpcs.add(rpc)
        try:
            if acknowledges:
                # The sender learns at once that the method exists.
                await context.send_initial_metadata(())
            await rpc.run()
        except Refusal as refusal:
            self._refusals.add(rpc.node_id, refusal)
            await _abort(context, refusal)
        finally:
            self._rpcs.discard(rpc)
            self._left.set()
        return rpc

    async def _health_check(self, _request: bytes, context: Any) -> bytes:
        await self._check_access(context)
        return chunks.health(len(self._rpcs), healthy=self.is_healthy)

    async def _stats(self, _request: bytes, context: Any) -> bytes:
        await self._check_access(context)
        clients = [client for rpc in self._rpcs for client in rpc.clients()]
        return chunks.stats(self._counts(), len(self._rpcs), clients)

    async def _check_access(self, context: Any) -> None:
        """End the call unless it carries the job's token."""
        if not self._access.admits(context.invocation_metadata() or ()):
            reason = "the job's token is missing or wrong (metadata 'authorization: Bearer ...')"
            self.logger.warning("a call from %s is refused: %s", context.peer(), reason)
            await _abort(context, Refusal("UNAUTHENTICATED", reason))


async def _abort(context: Any, refusal: Refusal) -> None:
    import grpc

    await context.abort(grpc.StatusCode[refusal.code], refusal.reason)


class AddressError(OSError):
    """The server cannot listen at its address."""
