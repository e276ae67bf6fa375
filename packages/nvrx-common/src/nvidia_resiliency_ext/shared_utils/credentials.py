# SPDX-License-Identifier: Apache-2.0
"""Read a job's credentials from files, and read them again when they change.

A token or a certificate that is replaced while servers and clients run is used from their next call
on: no restart is needed. While a file is missing or incomplete, its previous content is used.

Example:
    >>> import tempfile
    >>> with tempfile.NamedTemporaryFile(buffering=0) as file:
    ...     written = file.write(b"s3cret")
    ...     token = TokenFile(file.name)
    ...     token.admits(token.header())  # a server asks, a client sends the header
    True
"""

from __future__ import annotations

import hmac
import ipaddress
import logging
import os
import stat

from .errors import ConfigError
from .os_utils import read_regular_file

__all__ = ["PemFile", "TokenFile", "is_loopback", "read_token"]

_logger = logging.getLogger("nvrx")

_MAX_TOKEN_BYTES = 4096
_MAX_PEM_BYTES = 1 << 20


def read_token(path: str, name: str = "token file") -> str:
    """Return the token in a file: one line of ASCII, at most 4096 bytes.

    Args:
        path: A file that nobody but its owner can read. It may be a symbolic link.
        name: What errors call the file, for example the option that names it.

    Raises:
        ConfigError: It cannot be read, others can read it, or it holds no token.
    """
    try:
        status = os.stat(path)
        data = read_regular_file(path, _MAX_TOKEN_BYTES + 1, follows_symlink=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{name} {path!r}: {_reason(error)}") from error
    if status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        mode = stat.S_IMODE(status.st_mode)
        raise ConfigError(f"{name} {path!r}: others may read it (mode {mode:o}, must be 600)")
    token = data.strip()
    is_text = token.isascii() and token.decode("ascii").isprintable()
    if not token or len(data) > _MAX_TOKEN_BYTES or not is_text:
        raise ConfigError(f"{name} {path!r}: must hold one line of printable ASCII")
    return token.decode()


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach a server bound to `host`.

    That is an address, also in brackets, `unix:PATH` or a name; of names only `localhost` counts.
    """
    if host.startswith("unix:") or host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


class _ChangingFile:
    """The present content of the file at `path`, named `name` in errors; for all threads."""

    _default_name = "file"

    def __init__(self, path: str, name: str = "") -> None:
        self.path = path
        self._name = name or self._default_name
        self._seen = self._signature()
        self._value = self._load()

    def _current(self) -> bytes:
        """Return the content, read again if the file has changed."""
        seen = self._signature()
        if seen != self._seen:
            try:
                self._value = self._load()
            except ConfigError as error:
                _logger.warning("%s; what it held before counts until it is mended", error)
            # After reading: a thread that sees the new signature must find the new content.
            self._seen = seen
        return self._value

    def _signature(self) -> tuple[int, ...] | None:
        """Return a signature that changes with the file; None while there is none."""
        try:
            found = os.stat(self.path)
        except (OSError, ValueError):
            return None
        return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns

    def _load(self) -> bytes:
        raise NotImplementedError


class TokenFile(_ChangingFile):
    """The token in a file, as clients show it and servers ask for it: `Bearer <token>`.

    Nobody but its owner can read the file.

    Raises:
        ConfigError: It cannot be read, others can read it, or it holds no token.
    """

    _default_name = "token file"

    def token(self) -> str:
        """Return the token that the file holds now."""
        return self._current().decode()

    def header(self) -> str:
        """Return the value of the header or metadata `authorization` that a client sends."""
        return f"Bearer {self.token()}"

    def admits(self, header: str | bytes | None) -> bool:
        """Return whether a client's `header` (`authorization`; None: not sent) holds the token.

        The comparison takes equally long for every wrong value.
        """
        if header is None:
            return False
        given = header if isinstance(header, bytes) else header.encode()
        return hmac.compare_digest(given, self.header().encode())

    def _load(self) -> bytes:
        return read_token(self.path, self._name).encode()


class PemFile(_ChangingFile):
    """A certificate, a key or a list of authorities in PEM form, in a file of at most 1 MiB.

    Raises:
        ConfigError: It cannot be read, or holds nothing in PEM form.
    """

    _default_name = "TLS file"

    def read(self) -> bytes:
        """Return the present content of the file."""
        return self._current()

    def _load(self) -> bytes:
        try:
            data = read_regular_file(self.path, _MAX_PEM_BYTES, follows_symlink=True)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{self._name} {self.path!r}: {_reason(error)}") from error
        if b"-----BEGIN" not in data:
            raise ConfigError(f"{self._name} {self.path!r} holds nothing in PEM form")
        return data


def _reason(error: OSError | ValueError) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
