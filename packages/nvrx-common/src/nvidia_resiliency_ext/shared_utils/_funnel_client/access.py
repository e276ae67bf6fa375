# SPDX-License-Identifier: Apache-2.0
"""Owns what the client shows to be let in: the job's token and its certificates."""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass

from nvidia_resiliency_ext.shared_utils._funnel.access import TOKEN_FILE_VARIABLE, read_token
from nvidia_resiliency_ext.shared_utils.errors import ConfigError
from nvidia_resiliency_ext.shared_utils.os_utils import read_regular_file

__all__ = ["FunnelTls", "Token", "read_tls", "target_of"]

_LARGEST_PEM_BYTES = 1024 * 1024
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


class Token:
    """The job's secret from a file, read again for every connection so that it may be replaced.

    Args:
        path: A file that only we may read.

    Raises:
        ConfigError: It cannot be read, is open to others, or holds no token.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._last = read_token(path)

    @classmethod
    def find(cls, path: str | None) -> Token | None:
        """Return the token of a file, or of the one that the environment names; None without."""
        path = path or os.environ.get(TOKEN_FILE_VARIABLE)
        return cls(path) if path else None

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Return what a call carries."""
        # While the file is being replaced the last one serves; if it is refused, that is told.
        with contextlib.suppress(ConfigError):
            self._last = read_token(self.path)
        return (("authorization", f"Bearer {self._last}"),)


def read_tls(tls: FunnelTls) -> tuple[bytes, bytes | None, bytes | None]:
    """Return certificate authority, key and certificate.

    Raises:
        ConfigError: A file cannot be read, or only one of key and certificate is given.
    """
    if (tls.cert_file is None) != (tls.key_file is None):
        raise ConfigError("the log funnel's TLS: cert_file and key_file go together")
    ca = _read_pem("ca_file", tls.ca_file)
    if tls.cert_file is None or tls.key_file is None:
        return ca, None, None
    return ca, _read_pem("key_file", tls.key_file), _read_pem("cert_file", tls.cert_file)


def target_of(endpoint: str) -> str:
    """Return an endpoint as gRPC names it.

    Args:
        endpoint: `host:port`, `[address]:port` or `unix:/absolute/path`.

    Raises:
        ConfigError: It is none of these.
    """
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


def _read_pem(name: str, path: str) -> bytes:
    try:
        data = read_regular_file(path, _LARGEST_PEM_BYTES, follows_symlink=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"the log funnel's TLS: {name} {path!r}: {error}") from None
    if b"-----BEGIN" not in data:
        raise ConfigError(f"the log funnel's TLS: {name} {path!r} holds nothing in PEM form")
    return data
