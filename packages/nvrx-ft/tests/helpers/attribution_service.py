# SPDX-License-Identifier: Apache-2.0
"""An attribution service of a test's own: it answers what the test says, or worse."""

from __future__ import annotations

import contextlib
import http.server
import json
import socketserver
import threading
from collections.abc import Iterator
from typing import Any

LIMIT_S = 60.0
NOBODY = "http://127.0.0.1:1"
_HUGE_BYTES = 200 << 20
STOP = {"action": "STOP", "reason": "the data set is empty"}


class AttributionService:
    """Takes logs and gives a verdict, in threads, until it is closed.

    Attributes:
        answer: What it says when it is asked for the result.
        mode: `well`, `slow` (after 1.5 s), `hangs` (no answer), `garbage` (no JSON), `types` (JSON
            of wrong types), `huge` (200 MB), `dies` (ends in the middle), `redirects`, `fails`
            (status 500).
        posts: What was submitted: intent and path of each log.
        bodies: The same with everything else that was said.
        url: Where it is.
    """

    def __init__(self, path: str | None = None) -> None:
        """Listen on the loopback, or on a Unix socket that hosts without a network reach."""
        self.answer: dict[str, Any] = {"status": "in_flight"}
        self.mode = "well"
        self.posts: list[tuple[str, str]] = []
        self.bodies: list[dict[str, Any]] = []
        self._arrived = threading.Condition()
        self._released = threading.Event()
        server: socketserver.BaseServer
        if path is None:
            server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _handler_of(self))
            self.url = f"http://127.0.0.1:{server.server_port}"
        else:
            server = _UnixServer(path, _handler_of(self))
            self.url = f"unix://{path}"
        server.daemon_threads = True
        self._server = server
        threading.Thread(target=server.serve_forever, daemon=True).start()

    def decides(self, recommendation: dict[str, str], **attribution: Any) -> None:
        """Give this verdict from now on."""
        self.answer = {
            "status": "completed",
            "recommendation": recommendation,
            "attribution": attribution,
        }

    def wait_for_posts(self, count: int) -> list[tuple[str, str]]:
        """Wait until so many logs were submitted; return intent and path of each."""
        with self._arrived:
            assert self._arrived.wait_for(lambda: len(self.posts) >= count, LIMIT_S), self.posts
            return list(self.posts)

    def take(self, body: dict[str, Any]) -> None:
        """Take a log."""
        with self._arrived:
            self.bodies.append(body)
            self.posts.append((body["analysis_intent"], body["log_path"]))
            self._arrived.notify_all()

    def reply(self, value: dict[str, Any]) -> tuple[int, bytes]:
        """Return status and bytes of an answer, as the mode says."""
        if self.mode in {"hangs", "slow"}:
            self._released.wait(60.0 if self.mode == "hangs" else 1.5)
        if self.mode == "types":
            value = {"status": ["completed"], "recommendation": {"action": 7}, "attribution": []}
        data = b"\xff{not json" if self.mode == "garbage" else json.dumps(value).encode()
        return {"fails": 500, "redirects": 307}.get(self.mode, 200), data

    def close(self) -> None:
        """End it, and whoever waits for an answer."""
        self._released.set()
        self._server.shutdown()
        self._server.server_close()


class _UnixServer(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    pass


def _handler_of(service: AttributionService) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            service.take(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self._reply({})

        def do_GET(self) -> None:
            self._reply(service.answer)

        def _reply(self, value: dict[str, Any]) -> None:
            status, data = service.reply(value)
            # Whoever asked may have given up.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                self.send_response(status)
                is_cut, is_huge = service.mode == "dies", service.mode == "huge"
                length = _HUGE_BYTES if is_huge else len(data) + is_cut
                self.send_header("Content-Length", str(length))
                self.send_header("Location", service.url)
                self.end_headers()
                for _ in range(length >> 20 if is_huge else 0):
                    self.wfile.write(b" " * (1 << 20))
                self.wfile.write(data)
                self.close_connection = is_cut

        def log_message(self, *_: object) -> None:
            pass

    return Handler


@contextlib.contextmanager
def attribution_service(path: str | None = None) -> Iterator[AttributionService]:
    """Give a service that is closed in the end."""
    with contextlib.closing(AttributionService(path)) as made:
        yield made
