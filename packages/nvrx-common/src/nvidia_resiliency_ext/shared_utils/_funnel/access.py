# SPDX-License-Identifier: Apache-2.0
"""Owns who may talk to a server of the funnel: the job's token, certificates, and when neither.

This is the only place of the funnel that reads the environment.
"""

from __future__ import annotations

import hmac
import ipaddress
import logging
import os
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nvidia_resiliency_ext.shared_utils.errors import ConfigError
from nvidia_resiliency_ext.shared_utils.os_utils import read_regular_file

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["TOKEN_FILE_VARIABLE", "Access", "is_loopback", "read_token"]

TOKEN_FILE_VARIABLE = "NVRX_LOG_FUNNEL_TOKEN_FILE"  # noqa: S105 - the name of a variable
_logger = logging.getLogger("LogAggregationServer")

_MAX_TOKEN_BYTES = 4096
_MAX_PEM_BYTES = 1 << 20


def read_token(path: str) -> str:
    """Return the token in a file that nobody but its owner can read.

    Raises:
        ConfigError: It cannot be read, others can read it, or it holds no token.
    """
    try:
        status = os.stat(path)
        data = read_regular_file(path, _MAX_TOKEN_BYTES + 1, follows_symlink=True)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"token file {path!r}: {reason}") from error
    if status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        mode = stat.S_IMODE(status.st_mode)
        raise ConfigError(f"token file {path!r}: others may read it (mode {mode:o}, must be 600)")
    token = data.strip()
    if not token or len(data) > _MAX_TOKEN_BYTES or not token.isascii() or b"\n" in token:
        raise ConfigError(f"token file {path!r}: must hold one line of ASCII")
    return token.decode()


def is_loopback(host: str) -> bool:
    """Tell whether only this machine can reach a server bound to that host."""
    if host.startswith("unix:") or host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """What a server asks of its clients, and what a leaf shows to the root.

    Attributes:
        token: The job's secret; `None`: none is asked for.
        certificate: PEM file of this server's certificate; `None`: no TLS.
        key: PEM file of its key.
        authority: PEM file of who signed the certificates of clients, which then must have one.
    """

    token: str | None = None
    certificate: str | None = None
    key: str | None = None
    authority: str | None = None

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            raise ConfigError("--tls-cert and --tls-key belong together")

    @classmethod
    def for_server(cls, host: str, *, insecure: bool = False, **files: str | None) -> Access:
        """Take the token from the file that NVRX_LOG_FUNNEL_TOKEN_FILE names, if it is set.

        Args:
            host: Where the server will listen.
            insecure: Anybody who reaches it may write.
            files: Certificate, key and authority.

        Raises:
            ConfigError: The token or a certificate is unusable, or anybody could write and nobody
                said that this is meant.
        """
        path = os.environ.get("NVRX_LOG_FUNNEL_TOKEN_FILE")
        access = cls(token=read_token(path) if path else None, **files)
        access.check_reach(host, insecure=insecure)
        return access

    @property
    def is_open(self) -> bool:
        """Anybody who reaches the port may talk to the server."""
        return self.token is None and self.authority is None

    def check_reach(self, host: str, *, insecure: bool = False) -> None:
        """Refuse to listen where everybody in the network could write logs, unless told to.

        Raises:
            ConfigError: It would be so.
        """
        if not self.is_open or is_loopback(host):
            return
        if not insecure:
            raise ConfigError(
                f"listening on {host} needs a token (NVRX_LOG_FUNNEL_TOKEN_FILE), client"
                " certificates (--tls-ca), or --insecure-no-auth"
            )
        _logger.warning("anybody who reaches %s can write logs here (--insecure-no-auth)", host)

    def admits(self, metadata: Iterable[tuple[str, str | bytes]]) -> bool:
        """Tell whether a call may proceed."""
        if self.token is None:
            return True
        expected = f"Bearer {self.token}".encode()
        found = False
        for key, value in metadata:
            if key == "authorization":
                given = value if isinstance(value, bytes) else value.encode()
                # In constant time, so that the answer's delay tells nothing.
                found = hmac.compare_digest(given, expected) or found
        return found

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Return what a call to a server of the same job must carry."""
        return () if self.token is None else (("authorization", f"Bearer {self.token}"),)

    def server_credentials(self) -> Any | None:
        """Return gRPC's credentials for a server; `None` without TLS."""
        import grpc

        if self.certificate is None or self.key is None:
            return None
        pair = (_pem(self.key), _pem(self.certificate))
        authority = None if self.authority is None else _pem(self.authority)
        return grpc.ssl_server_credentials(
            [pair], root_certificates=authority, require_client_auth=authority is not None
        )

    def channel_credentials(self) -> Any | None:
        """Return gRPC's credentials for a leaf's way to the root; `None` without TLS."""
        import grpc

        if self.authority is None:
            return None
        key = None if self.key is None else _pem(self.key)
        certificate = None if self.certificate is None else _pem(self.certificate)
        return grpc.ssl_channel_credentials(_pem(self.authority), key, certificate)


def _pem(path: str) -> bytes:
    try:
        return read_regular_file(path, _MAX_PEM_BYTES, follows_symlink=True)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"TLS file {path!r}: {reason}") from error
