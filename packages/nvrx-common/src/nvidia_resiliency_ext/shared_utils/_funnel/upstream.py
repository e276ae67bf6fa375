# SPDX-License-Identifier: Apache-2.0
"""Owns a leaf's connection to the root: one call that carries all streams, made anew when lost."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from typing import TYPE_CHECKING, Any

from nvidia_resiliency_ext.shared_utils._funnel import messages
from nvidia_resiliency_ext.shared_utils._funnel.edge import MAX_MESSAGE_BYTES
from nvidia_resiliency_ext.shared_utils._funnel.refusal import Refusal
from nvidia_resiliency_ext.shared_utils._funnel.rpc import ERRORS_IN_ACKS

if TYPE_CHECKING:
    from nvidia_resiliency_ext.shared_utils._funnel.access import Access
    from nvidia_resiliency_ext.shared_utils._funnel.relay import Relay

__all__ = ["Upstream"]

_logger = logging.getLogger("LogAggregationLeaf")

_FIRST_RETRY_S, _LONGEST_RETRY_S = 0.1, 5.0
_PAUSE_S = 0.5
_PING_MS, _PING_TIMEOUT_MS = 20_000, 10_000
_HEALTH_TRY_S = 5.0
# What a name or a reason of a status adds to a chunk on its way.
_ROOM_FOR_NAMES = 64 << 10


class Upstream:
    """The way to the root; it lives in the event loop.

    Args:
        target: `HOST:PORT` or `unix:PATH` of the root.
        access: Token and certificates to show.
        relay: What is to be sent.
    """

    def __init__(self, target: str, access: Access, relay: Relay) -> None:
        self._target = target
        self._access = access
        self._files = access.channel_files()
        self._channel = self._connect()
        self._relay = relay
        self._is_old_root = False
        self.is_up = False

    def _connect(self) -> Any:
        import grpc.aio

        options = [
            ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
            ("grpc.max_send_message_length", MAX_MESSAGE_BYTES + _ROOM_FOR_NAMES),
            ("grpc.keepalive_time_ms", _PING_MS),
            ("grpc.keepalive_timeout_ms", _PING_TIMEOUT_MS),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.max_pings_without_data", 0),
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", 2000),
        ]
        if self._files is None:
            return grpc.aio.insecure_channel(self._target, options)
        credentials = grpc.ssl_channel_credentials(*self._files)
        return grpc.aio.secure_channel(self._target, credentials, options)

    async def wait_healthy(self, timeout_s: float) -> str | None:
        """Wait until the root says that it is healthy; return why not, if it does not in time."""
        import grpc

        check = self._channel.unary_unary(f"/{messages.SERVICE}/HealthCheck")
        loop = asyncio.get_running_loop()
        end = loop.time() + timeout_s
        why = "no answer"
        while (left := end - loop.time()) > 0:
            try:
                answer = await check(
                    b"", metadata=self._access.metadata(), wait_for_ready=True,
                    timeout=min(left, _HEALTH_TRY_S),
                )  # fmt: skip
            except grpc.aio.AioRpcError as error:
                why = f"{error.code().name}: {error.details()}"
                if error.code() is grpc.StatusCode.UNAUTHENTICATED:
                    return why
                await self._pause(_FIRST_RETRY_S)
                continue
            if messages.read_health(answer):
                return None
            why = "it says that it is not healthy"
            await self._pause(_FIRST_RETRY_S * 5)
        return why

    async def run(self) -> None:
        """Carry chunks to the root for ever, over as many connections as it takes."""
        import grpc

        retry_s = _FIRST_RETRY_S
        while True:
            was_up = False
            try:
                await self._session()
                why = "the root has ended the stream"
            except grpc.aio.AioRpcError as error:
                why = f"{error.code().name}: {error.details()}"
                if error.code() is grpc.StatusCode.UNIMPLEMENTED and not self._is_old_root:
                    _logger.info("the root does not acknowledge: using StreamLogs")
                    self._is_old_root = True
                    continue
            except asyncio.InvalidStateError as error:
                # What grpc.aio says of a call that ended while it was written to.
                why = str(error)
            finally:
                was_up, self.is_up = self.is_up, False
            retry_s = _FIRST_RETRY_S if was_up else min(_LONGEST_RETRY_S, retry_s * 2)
            if was_up or retry_s == _LONGEST_RETRY_S:
                _logger.warning(
                    "no stream to the root (%s); %d chunks wait", why, self._relay.held_chunks
                )
            await self._pause(retry_s)

    async def close(self) -> None:
        """Close the connection."""
        await self._channel.close()

    async def _renew(self) -> None:
        """Connect anew if the certificates have changed: a channel keeps its first ones."""
        files = self._access.channel_files()
        if files != self._files:
            self._files = files
            await self._channel.close()
            self._channel = self._connect()

    async def _session(self) -> None:
        self._relay.start_session()
        await self._renew()
        if self._is_old_root:
            await self._session_unacknowledged()
            return
        call = self._channel.stream_stream(f"/{messages.SERVICE}/StreamLogsAcked")(
            metadata=(*self._access.metadata(), ERRORS_IN_ACKS), wait_for_ready=True
        )
        with _cancelled_at_end(call):
            # The root answers with its metadata before any chunk.
            await call.initial_metadata()
            if call.done():
                await call.read()
            self._say_up()
            writing = asyncio.create_task(self._write_all(call))
            try:
                await self._read_all(call)
            finally:
                writing.cancel()
                await asyncio.gather(writing, return_exceptions=True)

    async def _session_unacknowledged(self) -> None:
        call = self._channel.stream_unary(f"/{messages.SERVICE}/StreamLogs")(
            metadata=self._access.metadata(), wait_for_ready=True
        )
        with _cancelled_at_end(call):
            await call.wait_for_connection()
            self._say_up()
            writing = asyncio.create_task(self._write_all(call))
            ending = asyncio.create_task(_end_of(call))
            try:
                await asyncio.wait([writing, ending], return_when=asyncio.FIRST_COMPLETED)
                if writing.done():
                    writing.result()
            finally:
                writing.cancel()
                ending.cancel()
                await asyncio.gather(writing, ending, return_exceptions=True)

    def _say_up(self) -> None:
        self.is_up = True
        _logger.info("connected to the root at %s", self._target)

    async def _write_all(self, call: Any) -> None:
        relay = self._relay
        while True:
            found = relay.next_unsent()
            if found is None:
                await relay.has_unsent.wait()
                continue
            held, raw = found
            await call.write(raw)
            if self._is_old_root:
                relay.confirm_sent(held)

    async def _read_all(self, call: Any) -> None:
        import grpc.aio

        loop = asyncio.get_running_loop()
        while (data := await call.read()) is not grpc.aio.EOF:
            stream_id, seq, code, reason = messages.read_ack(data)
            refusal = Refusal(code, reason) if code else None
            if self._relay.confirm(stream_id, seq, refusal):
                loop.call_later(_PAUSE_S, self._relay.resume, stream_id)

    async def _pause(self, seconds: float) -> None:
        # Jitter, so that leaves that lost their root together do not come back together.
        await asyncio.sleep(seconds * random.uniform(0.5, 1.5))  # noqa: S311


@contextlib.contextmanager
def _cancelled_at_end(call: Any) -> Any:
    try:
        yield
    finally:
        call.cancel()


async def _end_of(call: Any) -> None:
    await call.code()
