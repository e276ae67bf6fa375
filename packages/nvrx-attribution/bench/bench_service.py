# SPDX-License-Identifier: Apache-2.0
"""Print how much the attribution service bears, one JSON line per figure.

`python packages/nvrx-attribution/bench/bench_service.py [--mb 200] [--repeats 10]`

    start                   from exec to the first good answer of /healthz
    submissions, polls      requests of one client on one kept connection; `cpu_ms` is what one
                            costs the service, whatever else the machine does
    verdict, followed log   from the last byte of a log that was read while it grew, with the
                            terminal submission right after it, to the verdict, asked for with
                            `wait=false` every 10 ms
    memory                  resident, idle, after all of the above, and at its highest
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

STEP = "{r}: iteration {i}/ 500000 | elapsed time per iteration (ms): 81.1 | lm loss: 2.{i}E+00 |\n"
END = "5: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
LIMIT_S = 60.0
_LOG_RANKS = 64


def figure(name: str, unit: str, values: list[float], **more: Any) -> None:
    """Print a figure."""
    line = {"figure": name, "median": round(statistics.median(values), 4), "unit": unit}
    spread = {"min": round(min(values), 4), "max": round(max(values), 4), "repeats": len(values)}
    load = round(os.getloadavg()[0], 2)
    print(json.dumps({**line, **spread, **more, "load": load}), flush=True)


class Service:
    """A running service with one connection to it."""

    def __init__(self, root: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        limits = {
            f"NVRX_ATTRSVC_RATE_LIMIT_{kind}": "1000000/second" for kind in ("SUBMIT", "ANALYZE")
        }
        environ = {
            **os.environ,
            **limits,
            "NVRX_ATTRSVC_ALLOWED_ROOT": str(root),
            "NVRX_ATTRSVC_ENDPOINT": f"http://127.0.0.1:{port}",
            "NVRX_ATTRSVC_STATE_DIR": str(root / "state"),
            "NVRX_ATTRSVC_RESTART_AGENT_PRE_END_POLL_SECONDS": "0.5",
            "NVRX_ATTRSVC_LOG_LEVEL": "WARNING",
        }
        argv = [sys.executable, "-m", "nvidia_resiliency_ext.services.attrsvc"]
        began = time.perf_counter()
        self.process = subprocess.Popen(argv, env=environ)
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LIMIT_S)
        while True:
            try:
                if self.request("GET", "/healthz")[0] == 200:
                    break
            except OSError:
                self.connection.close()
                if time.perf_counter() - began > LIMIT_S:
                    raise
                time.sleep(0.005)
        self.start_s = time.perf_counter() - began
        self.start_cpu_s = self.cpu_s()

    def request(self, method: str, target: str, body: Any = None) -> tuple[int, Any]:
        """Send a request and return status and value."""
        headers = {} if body is None else {"Content-Type": "application/json"}
        data = None if body is None else json.dumps(body)
        self.connection.request(method, target, data, headers)
        reply = self.connection.getresponse()
        return reply.status, json.loads(reply.read())

    def submit(self, path: Path, intent: str, *, is_complete: bool = False) -> None:
        """Submit a log."""
        body = {"log_path": str(path), "analysis_intent": intent, "log_complete": is_complete}
        status, reply = self.request("POST", "/logs", body)
        assert status == 200, reply

    def ask(self, path: Path) -> dict[str, Any]:
        """Return what is known of a log now."""
        query = urlencode({"log_path": str(path), "wait": "false"})
        found: dict[str, Any] = self.request("GET", f"/logs?{query}")[1]
        return found

    def memory_mb(self, name: str = "VmRSS") -> float:
        """Return a figure of the process's memory."""
        text = Path(f"/proc/{self.process.pid}/status").read_text(encoding="ascii")
        return int(text.partition(f"{name}:")[2].split()[0]) / 1024

    def position(self, path: Path) -> int:
        """Return up to where the process has read a file."""
        for link in Path(f"/proc/{self.process.pid}/fd").iterdir():
            if link.exists() and link.resolve() == path:
                text = Path(f"/proc/{self.process.pid}/fdinfo/{link.name}").read_text("ascii")
                return int(text.split()[1])
        return 0

    def cpu_s(self) -> float:
        """Return the CPU seconds that the process has used."""
        stat = Path(f"/proc/{self.process.pid}/stat").read_text(encoding="utf-8")
        fields = stat.rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        """End it."""
        self.connection.close()
        self.process.terminate()
        self.process.wait()


def rates(service: Service, root: Path, count: int) -> None:
    """Measure requests per second."""
    log = root / "known.log"
    log.write_text(END)
    service.submit(log, "terminal", is_complete=True)
    for name, send in (
        (
            "submissions, each of a new log",
            lambda n: service.submit(root / f"{n}.log", "track_only"),
        ),
        ("polls of a finished log", lambda _: service.ask(log)),
    ):
        began, used = time.perf_counter(), service.cpu_s()
        for number in range(count):
            send(number)
        rate = count / (time.perf_counter() - began)
        cpu_ms = round(1000 * (service.cpu_s() - used) / count, 3)
        figure(name, "1/s", [rate], requests=count, cpu_ms=cpu_ms)


def latency(service: Service, root: Path, size_mb: float, repeats: int) -> None:
    """Measure from the last byte of a followed log to the verdict."""
    block = "".join(STEP.format(r=r, i=1) for r in range(_LOG_RANKS))
    seconds = []
    for number in range(repeats):
        log = root / f"grown-{size_mb:g}-{number}.log"
        log.touch()
        service.submit(log, "progressive")
        with log.open("w") as out:
            for _ in range(max(1, int(size_mb * 1e6 / len(block)))):
                out.write(block)
            out.flush()
            # A real job writes no faster than it is read: the fault comes when the reader is there.
            while service.position(log) < log.stat().st_size:
                time.sleep(0.01)
            service.connection.close()  # the service closes one that is quiet for 5 s
            out.write(END)
        ended = time.perf_counter()
        service.submit(log, "terminal", is_complete=True)
        while (found := service.ask(log))["status"] != "completed":
            assert time.perf_counter() - ended < LIMIT_S, found
            time.sleep(0.01)
        seconds.append(time.perf_counter() - ended)
        assert found["attribution"]["reason_code"] == "gpu.oom", found
        log.unlink()
    figure(f"verdict, followed log of {size_mb:g} MB", "s", seconds)


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--mb", type=float, default=200.0)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--requests", type=int, default=2000)
    options = parser.parse_args()
    starts: list[float] = []
    cpu: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(3):
            root = Path(folder, str(number)).resolve()
            root.mkdir()
            service = Service(root)
            starts.append(service.start_s)
            cpu.append(service.start_cpu_s)
            if number < 2:
                service.close()
        try:
            figure("start", "s", starts)
            figure("start, CPU", "s", cpu)
            figure("memory, idle", "MB", [service.memory_mb()])
            rates(service, root, options.requests)
            latency(service, root, 0.03, options.repeats)
            latency(service, root, options.mb, max(1, options.repeats // 3))
            figure("memory, afterwards", "MB", [service.memory_mb()])
            figure("memory, highest", "MB", [service.memory_mb("VmHWM")])
        finally:
            service.close()


if __name__ == "__main__":
    main()
