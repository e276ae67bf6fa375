# SPDX-License-Identifier: Apache-2.0
"""Owns what the client shows to be let in: the job's token and its certificates."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from nvidia_resiliency_ext.shared_utils.credentials import PemFile, TokenFile
from nvidia_resiliency_ext.shared_utils.errors import ConfigError

__all__ = ["FunnelTls", "Tls", "find_token", "target_of"]

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


class Tls:
    """The files of a connection, as they are now.

    Args:
        files: Where they are.

    Raises:
        ConfigError: A file cannot be read, or only one of key and certificate is given.
    """

    def __init__(self, files: FunnelTls) -> None:
        if (files.cert_file is None) != (files.key_file is None):
            raise ConfigError("the log funnel's TLS: cert_file and key_file go together")
        self.server_name = files.server_name
        self._files = tuple(
            None if path is None else PemFile(path, f"the log funnel's TLS: {name}")
            for name, path in (
                ("ca_file", files.ca_file),
                ("key_file", files.key_file),
                ("cert_file", files.cert_file),
            )
        )

    def read(self) -> tuple[bytes | None, ...]:
        """Return certificate authority, key and certificate."""
        return tuple(None if file is None else file.read() for file in self._files)


def find_token(path: str | None) -> TokenFile | None:
    """Return the token in a file, or in the one that the environment names; None without.

    Raises:
        ConfigError: The file cannot be read, is open to others, or holds no token.
    """
    path = path or os.environ.get("NVRX_LOG_FUNNEL_TOKEN_FILE")
    return TokenFile(path) if path else None


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
