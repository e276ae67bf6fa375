# SPDX-License-Identifier: Apache-2.0
"""One kept-alive connection to a service that speaks JSON over HTTP: TCP, TLS or a Unix socket."""

from __future__ import annotations

import http.client
import io
import json
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode, urlsplit

from nvidia_resiliency_ext.shared_utils.credentials import TokenFile

__all__ = ["Endpoint", "JsonConnection", "parse_endpoint"]

_LIMIT_BYTES = 1 << 20
_CHUNK_BYTES = 65536


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where the service is: a host and port, or a Unix socket.

    Attributes:
        scheme: ``http``, ``https`` or ``unix``.
        address: Host, or path of the socket.
        port: Port, 0 for a socket.
        prefix: Path in front of the routes.

    Example:
        >>> parse_endpoint("https://head/api")
        Endpoint(scheme='https', address='head', port=443, prefix='/api')
    """

    scheme: str
    address: str
    port: int = 0
    prefix: str = ""


def parse_endpoint(text: str) -> Endpoint | None:
    """Return the endpoint that the URL `text` names; None if it has another form."""
    try:
        parts = urlsplit(text.strip())
        port = parts.port
    except ValueError:
        return None
    if parts.scheme == "unix":
        return Endpoint("unix", parts.path) if parts.path and not parts.netloc else None
    if parts.scheme not in {"http", "https"} or not parts.hostname or parts.username is not None:
        return None
    default = 443 if parts.scheme == "https" else 80
    return Endpoint(parts.scheme, parts.hostname, port or default, parts.path.rstrip("/"))


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


class JsonConnection:
    """Sends requests to `endpoint` and returns status and decoded JSON; used by one thread.

    A request takes `timeout_s` at most, with `token` as bearer token; `ca_file` has certificates
    to trust in place of the system's.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        timeout_s: float,
        token: TokenFile | None = None,
        ca_file: str | None = None,
    ) -> None:
        self._endpoint = endpoint
        self._timeout_s = timeout_s
        self._ca_file = ca_file
        self._token = token
        self._connection: http.client.HTTPConnection | None = None

    def post(self, route: str, payload: Mapping[str, Any]) -> tuple[int, object]:
        """Send JSON object `payload` to `route`, such as `/logs`; return status and decoded reply.

        Raises:
            OSError: The service cannot be reached, or does not answer in time.
            http.client.HTTPException: The reply is no HTTP, or too large.
        """
        return self._request("POST", route, json.dumps(payload).encode())

    def get(self, route: str, params: Mapping[str, str]) -> tuple[int, object]:
        """Ask `route` with the query `params`; return status and decoded reply, raise as `post`."""
        return self._request("GET", f"{route}?{urlencode(params)}", None)

    def close(self) -> None:
        """Close the connection; the next request opens one again."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _request(self, method: str, target: str, body: bytes | None) -> tuple[int, object]:
        is_reused = self._connection is not None
        try:
            return self._exchange(method, target, body)
        except (http.client.RemoteDisconnected, BrokenPipeError, ConnectionResetError):
            # The service closed the kept connection meanwhile; submissions may be repeated.
            self.close()
            if not is_reused:
                raise
            return self._exchange(method, target, body)

    def _exchange(self, method: str, target: str, body: bytes | None) -> tuple[int, object]:
        deadline = time.monotonic() + self._timeout_s

        def timed_response(sock: socket.socket, **options: Any) -> http.client.HTTPResponse:
            return http.client.HTTPResponse(_TimedReader(sock, deadline), **options)  # type: ignore[arg-type]

        if self._connection is None:
            self._connection = self._connect()
        headers = {"Accept": "application/json"}
        if self._token is not None:
            headers["Authorization"] = self._token.header()
        if body is not None:
            headers["Content-Type"] = "application/json"
        try:
            if self._connection.sock is not None:
                self._connection.sock.settimeout(self._timeout_s)
            self._connection.response_class = timed_response  # type: ignore[assignment]
            self._connection.request(method, self._endpoint.prefix + target, body, headers)
            response = self._connection.getresponse()
            data = self._read(response)
        except BaseException:
            self.close()
            raise
        try:
            return response.status, json.loads(data) if data else None
        except (ValueError, RecursionError):
            return response.status, None

    def _read(self, response: http.client.HTTPResponse) -> bytes:
        data = bytearray()
        while chunk := response.read1(_CHUNK_BYTES):
            data += chunk
            if len(data) > _LIMIT_BYTES:
                raise http.client.HTTPException(f"the answer is over {_LIMIT_BYTES} bytes")
        if response.length:
            raise http.client.IncompleteRead(bytes(data), response.length)
        # Only then does the connection take another request: `read1` does not see the end.
        response.close()
        return bytes(data)

    def _connect(self) -> http.client.HTTPConnection:
        end = self._endpoint
        if end.scheme == "unix":
            return _UnixConnection(end.address, self._timeout_s)
        if end.scheme == "http":
            return http.client.HTTPConnection(end.address, end.port, timeout=self._timeout_s)
        import ssl

        context = ssl.create_default_context(cafile=self._ca_file)
        return http.client.HTTPSConnection(
            end.address, end.port, timeout=self._timeout_s, context=context
        )


class _TimedReader(io.RawIOBase):
    """Stream of `sock` for `http.client`; raises `TimeoutError` from `deadline` (monotonic) on.

    A socket counts its own limit anew at each byte.
    """

    def __init__(self, sock: socket.socket, deadline: float) -> None:
        self._sock = sock
        self._deadline = deadline
        # Keeps the connection open until it is read, also when `http.client` has closed its end.
        self._raw = sock.makefile("rb", buffering=0)

    def makefile(self, _mode: str) -> io.BufferedReader:
        return io.BufferedReader(self)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        left_s = self._deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the answer takes too long")
        self._sock.settimeout(left_s)
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()
