# SPDX-License-Identifier: Apache-2.0
"""Owns the gRPC channel to the log server and the calls on it; only here is gRPC imported."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from nvidia_resiliency_ext.shared_utils.errors import MissingExtraError

from .access import FunnelTls, Tls, target_of
from .verdict import Outcome

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nvidia_resiliency_ext.shared_utils.credentials import TokenFile

    from .chunks import Chunk

__all__ = ["Call", "Link"]

_MAX_MESSAGE_BYTES = 10 * 1024 * 1024
_PREFIX = "/nvidia_resiliency_ext.fault_tolerance.LogAggregationService"
_OPTIONS = (
    ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
    # A host that vanished answers no ping.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    # Our own delays come on top and are spread.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.min_reconnect_backoff_ms", 10_000),
    ("grpc.use_local_subchannel_pool", 1),
    # What is not confirmed is sent again by us; gRPC need not keep copies.
    ("grpc.enable_retries", 0),
    # The server is a machine of the job: a proxy for the outer world has no part in it.
    ("grpc.enable_http_proxy", 0),
)
# gRPC in a forked child is of no use, and taking it down there can hang: it stays as it is.
_ABANDONED: list[object] = []


class Call:
    """One stream to the server.

    Args:
        call: What gRPC returned.
        is_plain: It answers once, at its end.
    """

    def __init__(self, call: Any, *, is_plain: bool) -> None:
        self.is_plain = is_plain
        self._call = call

    def answers(self) -> Iterator[tuple[str, int]]:
        """Yield stream id and number of each confirmation; end with the call."""
        import grpc

        try:
            for ack in self._call:
                yield ack.stream_id, ack.committed_seq
        except grpc.RpcError:
            return  # the outcome tells

    def final_status(self) -> str | None:
        """Wait for the end of a plain stream; return the server's status, None on an error."""
        import grpc

        try:
            return str(self._call.result().status)
        except (grpc.RpcError, grpc.FutureCancelledError):
            return None

    def outcome(self) -> Outcome:
        """Return how it ended; call it at the end."""
        return Outcome(self._call.code().name, self._call.details() or "")

    def cancel(self) -> None:
        """End it at once; harmless when it has ended."""
        self._call.cancel()


class Link:
    """The way to one server; for all threads. The lock guards the channel.

    Args:
        endpoint: `host:port` or `unix:/path`.
        node_id: What this node is called.
        token: The job's secret, if there is one.
        tls: Certificates, None for an open connection.

    Raises:
        ConfigError: The endpoint or a file makes no sense.
        MissingExtraError: gRPC is not installed.
    """

    def __init__(
        self, endpoint: str, node_id: str, token: TokenFile | None, tls: FunnelTls | None
    ) -> None:
        self._target = target_of(endpoint)
        self._node_id = node_id
        self._token = token
        self._tls = None if tls is None else Tls(tls)
        self._files: tuple[bytes | None, ...] | None = None
        self._lock = threading.Lock()
        self._channel: Any = None
        self._is_closed = False
        try:
            import grpc  # noqa: F401 - say early that it is missing

            from nvidia_resiliency_ext.shared_utils.proto import log_aggregation_pb2
        except ImportError as error:
            raise MissingExtraError("the log funnel", "nvrx-common[grpc]", error) from error
        self._messages = log_aggregation_pb2

    def start(self, chunks: Iterator[Chunk], path: str, stream_id: str, *, is_plain: bool) -> Call:
        """Begin a stream that takes its chunks from an iterator, in a thread of gRPC's."""
        chunk_type = self._messages.LogChunk
        node_id = self._node_id

        def encode(chunk: Chunk) -> bytes:
            message = chunk_type(
                node_id=node_id,
                data=chunk.data,
                file_path=path,
                stream_id=stream_id,
                seq=chunk.seq,
            )
            encoded: bytes = message.SerializeToString()
            return encoded

        token = self._token
        metadata = () if token is None else (("authorization", token.header()),)
        channel = self._open_channel()
        if is_plain:
            method = channel.stream_unary(
                f"{_PREFIX}/StreamLogs",
                request_serializer=encode,
                response_deserializer=self._messages.StreamResponse.FromString,
            )
            return Call(method.future(chunks, metadata=metadata), is_plain=True)
        method = channel.stream_stream(
            f"{_PREFIX}/StreamLogsAcked",
            request_serializer=encode,
            response_deserializer=self._messages.Ack.FromString,
        )
        return Call(method(chunks, metadata=metadata), is_plain=False)

    def close(self) -> None:
        """End every call; harmless when repeated."""
        with self._lock:
            channel, self._channel = self._channel, None
            self._is_closed = True
        if channel is not None:
            channel.close()

    def abandon(self) -> None:
        """Forget the channel in a forked child, whose parent goes on with it."""
        self._lock = threading.Lock()
        _ABANDONED.append(self._channel)
        self._channel = None
        self._is_closed = True

    def _open_channel(self) -> Any:
        import grpc

        with self._lock:
            if self._is_closed:
                raise ConnectionAbortedError("the client is closed")
            files = None if self._tls is None else self._tls.read()
            if self._channel is not None and files != self._files:
                # It keeps the certificates that it began with. Its streams are sent again.
                self._channel.close()
                self._channel = None
            if self._channel is None:
                self._files = files
                options: list[tuple[str, str | int]] = list(_OPTIONS)
                if self._tls is None or files is None:
                    self._channel = grpc.insecure_channel(self._target, options=options)
                else:
                    if self._tls.server_name is not None:
                        options.append(("grpc.ssl_target_name_override", self._tls.server_name))
                    credentials = grpc.ssl_channel_credentials(*files)
                    self._channel = grpc.secure_channel(self._target, credentials, options=options)
            return self._channel
