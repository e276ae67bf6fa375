# SPDX-License-Identifier: Apache-2.0
"""Settings of the funnel's servers and who may use them."""

from __future__ import annotations

import logging
import math
import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nvidia_resiliency_ext.shared_utils.credentials import PemFile, TokenFile, is_loopback
from nvidia_resiliency_ext.shared_utils.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable


FSYNC_POLICIES = ("never", "interval", "commit")
_LEAST = {
    "flush_bytes": 1,
    "flush_interval_s": 0,
    "completion_idle_s": 0,
    "max_buffered_bytes": 1 << 20,
    "max_files": 1,
    "max_open_files": 1,
    "max_stream_files": 1,
    "max_stream_bytes": 0,
    "stall_s": 0,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FunnelOptions:
    """How the root server treats what it gets.

    Attributes:
        allowed_roots: Directories below which logs may lie; `None`: anywhere, for use in process.
        flush_bytes: A file with so much waiting is written at once, and one that holds half of what
            it may hold.
        flush_interval_s: ... and with less, so long after its last write.
        completion_idle_s: How long nothing must come for an old cycle's file until it counts as
            complete.
        max_buffered_bytes: The most that may wait in memory.
        max_files: Files that are in use at one time.
        max_open_files: ... of which so many are held open.
        max_stream_files: Files that one stream may name.
        max_stream_bytes: Bytes that one stream may send; 0: any number.
        verify_node_prefix: A line's rank prefix belongs to the first node that uses it in a file.
        fsync: When to wait for the disk: `never`, `interval` (each second), `commit` (before each
            acknowledgement).
        stall_s: A write that takes longer marks its file as stalled.
    """

    allowed_roots: tuple[str, ...] | None
    flush_bytes: int = 1 << 20
    flush_interval_s: float = 0.02
    completion_idle_s: float = 10.0
    max_buffered_bytes: int = 32 << 20
    max_files: int = 4096
    max_open_files: int = 512
    max_stream_files: int = 64
    max_stream_bytes: int = 0
    verify_node_prefix: bool = False
    fsync: str = "never"
    stall_s: float = 2.0

    def __post_init__(self) -> None:
        problems = [
            f"{name}={getattr(self, name)!r} must be a finite number of at least {least}"
            for name, least in _LEAST.items()
            if not least <= getattr(self, name) < math.inf
        ]
        if self.fsync not in FSYNC_POLICIES:
            problems.append(f"fsync={self.fsync!r} must be one of {', '.join(FSYNC_POLICIES)}")
        if problems:
            raise ConfigError("; ".join(problems))


_PREFIX = re.compile(rb"^ *(\d{1,9}): ", re.MULTILINE)


def claim(data: memoryview, node_id: str, owners: dict[bytes, str]) -> tuple[str, str] | None:
    """Note a node's prefixes, unless one is another node's."""
    found = set(_PREFIX.findall(data))
    for prefix in found:
        owner = owners.get(prefix, node_id)
        if owner != node_id:
            return prefix.decode(), owner
    owners.update(dict.fromkeys(found, node_id))
    return None


_logger = logging.getLogger("LogAggregationServer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """What a server asks of its clients, and what a leaf shows to the root.

    What stands in the files when a call or connection begins is what counts.

    Attributes:
        token: The job's secret; `None`: none is asked for.
        certificate: This server's certificate; `None`: no TLS.
        authority: Who signed the certificates of clients, which then must have one.
    """

    token: TokenFile | None = None
    certificate: PemFile | None = None
    key: PemFile | None = None
    authority: PemFile | None = None

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            raise ConfigError("--tls-cert and --tls-key belong together")

    @classmethod
    def for_server(cls, host: str, *, insecure: bool = False, **files: str | None) -> Access:
        """Take the token from the file that NVRX_LOG_FUNNEL_TOKEN_FILE names, if it is set.

        Refuse to listen where everybody in the network could write logs, unless it is meant.
        """
        path = os.environ.get("NVRX_LOG_FUNNEL_TOKEN_FILE")
        pems = {name: None if file is None else PemFile(file) for name, file in files.items()}
        access = cls(token=TokenFile(path) if path else None, **pems)
        if access.token is None and access.authority is None and not is_loopback(host):
            if not insecure:
                raise ConfigError(
                    f"listening on {host} needs a token (NVRX_LOG_FUNNEL_TOKEN_FILE), client"
                    " certificates (--tls-ca), or --insecure-no-auth"
                )
            _logger.warning("anybody who reaches %s can write logs here (--insecure-no-auth)", host)
        return access

    def admits(self, metadata: Iterable[tuple[str, str | bytes]]) -> bool:
        """Tell whether a call may proceed."""
        if self.token is None:
            return True
        shown = (value for key, value in metadata if key == "authorization")
        return any(self.token.admits(value) for value in shown)

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Return what a call to a server of the same job must carry."""
        return () if self.token is None else (("authorization", self.token.header()),)

    def server_credentials(self) -> Any | None:
        """Return gRPC's credentials for a server; `None` without TLS.

        gRPC asks at each handshake whether the files have changed.
        """
        import grpc

        if self.certificate is None or self.key is None:
            return None
        shown: tuple[bytes, bytes, bytes | None] | None = None

        def changed() -> Any | None:
            nonlocal shown
            assert self.certificate is not None
            assert self.key is not None
            now = (self.key.read(), self.certificate.read(), self._authority())
            if now == shown:
                return None
            shown = now
            return grpc.ssl_server_certificate_configuration([now[:2]], now[2])

        return grpc.dynamic_ssl_server_credentials(
            changed(), changed, require_client_authentication=self.authority is not None
        )

    def channel_files(self) -> tuple[bytes, bytes | None, bytes | None] | None:
        """Return authority, key and certificate for a way to the server, as they are now.

        `None` without TLS. A channel keeps those that it began with.
        """
        authority = self._authority()
        if authority is None:
            return None
        key = None if self.key is None else self.key.read()
        return authority, key, None if self.certificate is None else self.certificate.read()

    def _authority(self) -> bytes | None:
        return None if self.authority is None else self.authority.read()


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """What both servers are told.

    Attributes:
        host: Where it listens; `unix:PATH` for a Unix socket.
        grace_s: How long it goes on serving after it was asked to end.
    """

    host: str
    port: int
    grace_s: float
    access: Access
