# SPDX-License-Identifier: Apache-2.0
"""An attribution service that says what it is told to, over real HTTP."""

import contextlib
import json
import socket
import socketserver
import threading
from http.server import BaseHTTPRequestHandler
from urllib.parse import parse_qs, urlsplit


class Service:
    """Serves on a TCP port or a Unix socket until it is closed.

    Attributes:
        requests: Method, path or parameters, body and headers of each request.
        replies: Status and JSON value by log path, for GET; default: still in flight.
        post_status: Status of the replies to POST.
    """

    def __init__(self, socket_path=None, tls=None) -> None:
        self.requests = []
        self.replies = {}
        self.post_status = 200
        self.connections = 0
        self.open_sockets = []
        self.before_reply = lambda: None
        self.changed = threading.Condition()
        handler = type("Handler", (_Handler,), {"service": self})
        if socket_path is None:
            self.server = _TcpServer(("127.0.0.1", 0), handler)
            scheme = "http" if tls is None else "https"
            self.endpoint = f"{scheme}://localhost:{self.server.server_address[1]}"
        else:
            self.server = _UnixServer(str(socket_path), handler)
            self.endpoint = f"unix://{socket_path}"
        if tls is not None:
            self.server.socket = tls.wrap_socket(self.server.socket, server_side=True)
        self.thread = threading.Thread(
            target=self.server.serve_forever, kwargs={"poll_interval": 0.01}
        )
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        for connection in self.open_sockets:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self.server.server_close()
        self.thread.join()

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def wait_for(self, condition, timeout_s=60.0) -> None:
        """Wait until a condition on what was received holds."""
        with self.changed:
            assert self.changed.wait_for(condition, timeout_s), self.requests

    def posts(self):
        return [
            (body["analysis_intent"], body["log_path"])
            for m, _, body, _ in self.requests
            if m == "POST"
        ]

    def polls(self):
        return [query["log_path"][0] for method, query, _, _ in self.requests if method == "GET"]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    service = None

    def setup(self) -> None:
        super().setup()
        self.service.connections += 1
        self.service.open_sockets.append(self.request)

    def address_string(self) -> str:
        return "client"

    def log_message(self, *_) -> None:
        pass

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self._note("POST", self.path, body)
        self._reply(self.service.post_status, {"submitted": True})

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        query = parse_qs(parts.query)
        self._note("GET", query, None)
        status, value = self.service.replies.get(
            query["log_path"][0], (200, {"status": "in_flight"})
        )
        self._reply(status, value)

    def _note(self, method, path, body) -> None:
        with self.service.changed:
            self.service.requests.append((method, path, body, dict(self.headers)))
            self.service.changed.notify_all()

    def _reply(self, status, value) -> None:
        self.service.before_reply()
        data = value if isinstance(value, bytes) else json.dumps(value).encode()
        with contextlib.suppress(OSError):
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)


class _TcpServer(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = False
    block_on_close = True


class _UnixServer(socketserver.ThreadingUnixStreamServer):
    daemon_threads = False
    block_on_close = True
