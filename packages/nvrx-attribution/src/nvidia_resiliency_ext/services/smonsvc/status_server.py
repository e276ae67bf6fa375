# SPDX-License-Identifier: Apache-2.0
"""The monitor's own counts and jobs over HTTP, for people and probes."""

from __future__ import annotations

import http.server
import json
import socket
import threading
from dataclasses import asdict
from typing import Any

from nvidia_resiliency_ext.services.smonsvc.models import MonitorState
from nvidia_resiliency_ext.shared_utils.credentials import TokenFile, is_loopback
from nvidia_resiliency_ext.shared_utils.errors import ConfigError

__all__ = ["DEFAULT_STATUS_HOST", "StatusServer"]

DEFAULT_STATUS_HOST = "127.0.0.1"
_REQUEST_S = 10.0


class StatusServer:
    """Answers `/stats` (also `/`), `/jobs` and `/healthz` in a thread until it is closed.

    Args:
        state: What it shows.
        port: Where it listens; 0 takes a free one.
        host: At which address. Default 127.0.0.1.
        token_file: File with the token that is asked for except at `/healthz`; None: all may look.

    Attributes:
        port: Where it listens.

    Raises:
        ConfigError: The address cannot be had, or others could read there without a token.

    Example:
        >>> server = StatusServer(MonitorState(), port=0)
        >>> server.port > 0
        True
        >>> server.close()
    """

    def __init__(
        self,
        state: MonitorState,
        port: int,
        host: str = DEFAULT_STATUS_HOST,
        token_file: str | None = None,
    ) -> None:
        if token_file is None and not is_loopback(host):
            raise ConfigError(
                f"{host} can be reached by other machines: set NVRX_SMONSVC_TOKEN_FILE, or listen"
                f" at {DEFAULT_STATUS_HOST}"
            )
        token = None if token_file is None else TokenFile(token_file)
        try:
            self._server = _Server(host, port, _handler_of(state, token))
        except OSError as error:
            why = error.strerror or error
            raise ConfigError(f"cannot listen at {host}:{port}: {why}") from None
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="nvrx-smonsvc-status", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """End the server and its thread."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def __init__(
        self, host: str, port: int, handler: type[http.server.BaseHTTPRequestHandler]
    ) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), handler)


def _reply_of(path: str, state: MonitorState) -> tuple[int, dict[str, Any]]:
    with state.lock:
        problems = state.problems()
        if path == "/healthz":
            status = 503 if problems else 200
            return status, {"status": "fail" if problems else "ok", "issues": problems}
        if path == "/jobs":
            return 200, {"count": len(state.jobs), "jobs": [asdict(j) for j in state.jobs.values()]}
        if path in {"/", "/stats"}:
            open_jobs = len(state.open_jobs())
            counts = {**state.counts, "jobs": len(state.jobs), "open": open_jobs}
            return 200, {"counts": counts, "issues": problems}
    return 404, {"error_code": "not_found", "message": "/stats, /jobs and /healthz are there"}


def _handler_of(
    state: MonitorState, token: TokenFile | None
) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        timeout = _REQUEST_S
        server_version = "nvrx-smonsvc"
        sys_version = ""

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            given = (self.headers.get("Authorization") or "").encode("latin-1", "replace")
            if path != "/healthz" and token is not None and not token.admits(given):
                status, value = 401, {"error_code": "unauthorized", "message": "a token is needed"}
            else:
                status, value = _reply_of(path, state)
            data = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    return Handler
