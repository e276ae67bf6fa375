# SPDX-License-Identifier: Apache-2.0
"""Connects to one log server over gRPC, with the job's secret and certificates."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from nvidia_resiliency_ext.shared_utils._funnel.shared import MAX_MESSAGE_BYTES, Access
from nvidia_resiliency_ext.shared_utils.credentials import PemFile, TokenFile
from nvidia_resiliency_ext.shared_utils.errors import ConfigError, MissingExtraError

from .limits import Chunk

_LONGEST_UNIX_PATH = 107
_HIGHEST_PORT = 65535
_HOST_AND_PORT = re.compile(r"(\[[0-9A-Fa-f:.%]+\]|[^\s:/\[\]]+):([0-9]{1,5})")


@dataclass(frozen=True, slots=True)
class FunnelTls:
    """Files in PEM form for an encrypted connection to the log server.

    Attributes:
        ca_file: Certificates that the server's must be signed by.
        cert_file: Certificate of this client, for servers that ask for one.
        key_file: Its private key.
        server_name: Name in the server's certificate, where it is not the endpoint's host.
    """

    ca_file: str
    cert_file: str | None = None
    key_file: str | None = None
    server_name: str | None = None


def access_of(token_file: str | None, tls: FunnelTls | None) -> Access:
    """Return a connection's token and TLS; the token's file is given or named by the environment.

    Raises:
        ConfigError: A file cannot be used, `ca_file` is missing, or one of key and certificate.
    """
    token_file = token_file or os.environ.get("NVRX_LOG_FUNNEL_TOKEN_FILE")
    token = TokenFile(token_file) if token_file else None
    if tls is None:
        return Access(token=token)
    if not tls.ca_file:
        raise ConfigError(
            "the log funnel's TLS: ca_file is empty; name the file with the certificates that the"
            " server's must be signed by"
        )
    if (tls.cert_file is None) != (tls.key_file is None):
        raise ConfigError("the log funnel's TLS: cert_file and key_file go together")

    def pem(name: str) -> PemFile | None:
        path = getattr(tls, name)
        return None if path is None else PemFile(path, f"the log funnel's TLS: {name}")

    return Access(
        token=token, authority=pem("ca_file"), key=pem("key_file"), certificate=pem("cert_file")
    )


def target_of(endpoint: str) -> str:
    """Return an endpoint as gRPC names it."""
    scheme, _, path = endpoint.partition(":")
    if scheme == "unix":
        path = path.removeprefix("//")
        if not os.path.isabs(path) or len(os.fsencode(path)) > _LONGEST_UNIX_PATH or "\0" in path:
            message = f"not an absolute path of at most {_LONGEST_UNIX_PATH} bytes"
            raise ConfigError(f"the log funnel's endpoint {endpoint!r}: {message}")
        return f"unix:{path}"
    match = _HOST_AND_PORT.fullmatch(endpoint)
    if match is None or not 0 < int(match[2]) <= _HIGHEST_PORT:
        message = "neither host:port nor unix:/absolute/path"
        raise ConfigError(f"the log funnel's endpoint {endpoint!r}: {message}")
    return endpoint


_OPTIONS = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
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


class Link:
    """The gRPC channel to one server, for all threads; the lock guards the channel.

    `call_errors` are what reading from a failed call raises; its status tells why.
    """

    def __init__(
        self, endpoint: str, node_id: str, access: Access, server_name: str | None
    ) -> None:
        self.endpoint = endpoint
        self._target = target_of(endpoint)
        self._node_id = node_id
        self._access = access
        self._server_name = server_name
        self._files: tuple[bytes | None, ...] | None = None
        self._lock = threading.Lock()
        self._channel: Any = None
        self._is_closed = False
        try:
            import grpc  # say early that it is missing

            from nvidia_resiliency_ext.shared_utils.proto import (
                log_aggregation_pb2,
                log_aggregation_pb2_grpc,
            )
        except ImportError as error:
            raise MissingExtraError("the log funnel", "nvrx-common[grpc]", error) from error
        self._chunk_type = log_aggregation_pb2.LogChunk
        self._stub_type: Any = log_aggregation_pb2_grpc.LogAggregationServiceStub
        self.call_errors = (grpc.RpcError, grpc.FutureCancelledError)

    def start(self, chunks: Iterator[Chunk], path: str, stream_id: str, *, is_plain: bool) -> Any:
        """Begin gRPC's call that takes its chunks from an iterator, in a thread of gRPC's."""
        make, node_id = self._chunk_type, self._node_id
        messages = (
            make(node_id=node_id, data=data, file_path=path, stream_id=stream_id, seq=seq)
            for seq, data, _ in chunks
        )
        metadata = self._access.metadata()
        stub = self._stub_type(self._open_channel())
        if is_plain:
            return stub.StreamLogs.future(messages, metadata=metadata)
        return stub.StreamLogsAcked(messages, metadata=metadata)

    def close(self) -> None:
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
            files = self._access.channel_files()
            if self._channel is not None and files != self._files:
                # It keeps the certificates that it began with. Its streams are sent again.
                self._channel.close()
                self._channel = None
            if self._channel is None:
                self._files = files
                options: list[tuple[str, str | int]] = list(_OPTIONS)
                if files is None:
                    self._channel = grpc.insecure_channel(self._target, options=options)
                else:
                    if self._server_name is not None:
                        options.append(("grpc.ssl_target_name_override", self._server_name))
                    credentials = grpc.ssl_channel_credentials(*files)
                    self._channel = grpc.secure_channel(self._target, credentials, options=options)
            return self._channel
