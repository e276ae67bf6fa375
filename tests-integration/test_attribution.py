# SPDX-License-Identifier: Apache-2.0
"""Scenarios: a service reads the cycle logs; its STOP ends the job, its failures do nothing."""

from __future__ import annotations

import http.server
import json
import threading
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fault_jobs import Job


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers as the test says."""

    mode: ClassVar[str] = "stop"
    seen: ClassVar[list[str]] = []
    released: ClassVar[threading.Event] = threading.Event()

    def do_POST(self) -> None:
        """Take a log."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.seen.append(f"{body['analysis_intent']} {body['log_path'].rpartition('/')[2]}")
        self._reply({})

    def do_GET(self) -> None:
        """Give the verdict."""
        reason = {"action": "STOP", "reason": "the data set is empty"}
        self._reply({"status": "completed", "recommendation": reason})

    def _reply(self, value: dict[str, Any]) -> None:
        if self.mode == "hangs":
            self.released.wait(60.0)
        data = b"\xfe?" if self.mode == "garbage" else json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def service() -> Iterator[str]:
    """Give the address of a service."""
    Handler.mode, Handler.seen, Handler.released = "stop", [], threading.Event()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    Handler.released.set()
    server.shutdown()
    server.server_close()


def flags_of(job: Job, url: str, action: str) -> tuple[str, ...]:
    """Return the flags of a job whose cycle logs are read."""
    return (
        *("--ft-per-cycle-applog-prefix", str(job.folder / "logs" / "job.log")),
        *("--ft-attribution-endpoint", url, "--ft-attribution-stop-action", action),
    )


def test_stop_ends_the_job_with_93(job: Job, service: str) -> None:
    """After a fault the service says STOP: the cycle that has begun is ended, exit code 93."""
    job.start("--last-cycle", "9", "0:1:die", flags=flags_of(job, service, "no-restart"))
    assert job.wait() == 93, job.log()
    assert "the data set is empty" in job.log()
    assert Handler.seen[:2] == ["progressive job_cycle0.log", "terminal job_cycle0.log"]


def test_stop_is_only_logged_where_nothing_else_was_asked_for(job: Job, service: str) -> None:
    """With the action `log` the job goes on after the verdict."""
    job.start("--last-cycle", "1", "0:1:die", flags=flags_of(job, service, "log"))
    assert job.wait() == 0, job.log()
    assert job.cycles() == [0, 1]


@pytest.mark.parametrize("mode", ["hangs", "garbage", "refuses"])
def test_a_service_that_misbehaves_neither_ends_nor_delays_a_job(
    job: Job, service: str, mode: str
) -> None:
    """Hanging, garbage or nobody there: restarts go on, and the job ends as it would."""
    Handler.mode = mode
    url = "http://127.0.0.1:1" if mode == "refuses" else service
    job.start("--last-cycle", "2", "*:1:die", flags=flags_of(job, url, "no-restart"))
    job.wait(20.0)
    assert job.cycles() == [0, 1, 2, 3], job.log()


def test_a_service_that_is_not_installed_is_one_message(job: Job) -> None:
    """Asking for the managed service without its package is said once, and the job runs."""
    job.start("--last-cycle", "0", flags=flags_of(job, "localhost", "log"))
    assert job.wait() == 0, job.log()
    assert job.log().count("attribution is off") == 1
