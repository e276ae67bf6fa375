# SPDX-License-Identifier: Apache-2.0
"""The attribution service as a process of its own, and requests to it."""

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from urllib.parse import urlencode

from nvidia_resiliency_ext.services.attrsvc import parse_service_endpoint

OOM = "torch.OutOfMemoryError: CUDA out of memory.\n"
READY_S = 50


class Unix(http.client.HTTPConnection):
    """A connection to a Unix socket."""

    def __init__(self, path):
        super().__init__("localhost", timeout=30)
        self.path = path

    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(30)
        self.sock.connect(self.path)


class Service:
    """A running service.

    Attributes:
        process: Its process.
    """

    def __init__(self, endpoint, process):
        self.endpoint = endpoint
        self.process = process

    def request(self, method, target, body=None, **headers):
        where = parse_service_endpoint(self.endpoint)
        if where.path is not None:
            connection = Unix(where.path)
        else:
            connection = http.client.HTTPConnection(where.host, where.port, timeout=30)
        with contextlib.closing(connection):
            data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
            if data is not None:
                headers.setdefault("Content-Type", "application/json")
            connection.request(method, target, data, headers)
            response = connection.getresponse()
            text = response.read()
        is_json = response.headers.get_content_type() == "application/json"
        return response.status, json.loads(text) if is_json else text.decode()

    def post(self, path, **fields):
        return self.request("POST", "/logs", {"log_path": str(path), **fields})

    def get(self, path, **params):
        query = urlencode({"log_path": str(path), **params})
        return self.request("GET", f"/logs?{query}")


@contextlib.contextmanager
def running(root, endpoint, **settings):
    """Run the service until the end of the block."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("NVRX_", "LLM_"))}
    given = {"ALLOWED_ROOT": root, "ENDPOINT": endpoint, **settings}
    environ |= {f"NVRX_ATTRSVC_{name}": str(value) for name, value in given.items()}
    argv = [sys.executable, "-B", "-m", "nvidia_resiliency_ext.services.attrsvc"]
    with subprocess.Popen(argv, env=environ, stderr=subprocess.PIPE, text=True) as process:
        service = Service(endpoint, process)
        try:
            deadline = time.monotonic() + READY_S
            while True:
                assert process.poll() is None, process.stderr.read()
                assert time.monotonic() < deadline
                with contextlib.suppress(OSError):
                    if service.request("GET", "/healthz")[0] == 200:
                        break
                time.sleep(0.05)  # a process that starts has no event to wait for
            yield service
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
        finally:
            process.kill()
