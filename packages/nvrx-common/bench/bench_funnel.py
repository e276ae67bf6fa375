# SPDX-License-Identifier: Apache-2.0
"""Measures the root of the log funnel on the wire: lines/s until in the file, memory, delay.

Each figure is a JSON line. Clients send messages made before the clock starts, so the server is
measured; `floor` is the same with a gRPC servicer that does nothing, in threads and in an event
loop, and with one that does nothing but write each message as it came. `idle` opens streams that
say nothing and times HealthCheck: the first one comes in behind all of them, in the moment in which
they are accepted. Clients run under `--python`.

usage: bench_funnel.py [--python PY] [--against PY] [--repeats 5] [--only one,many,latency,idle]
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import _measure

_DEADLINE_S = 100.0
_MODULE = "nvidia_resiliency_ext.shared_utils.grpc_log_server"

_FLOOR = r"""
import asyncio, os, sys
from concurrent import futures
import grpc, grpc.aio
kind, port = sys.argv[1], sys.argv[2]
SERVICE = "nvidia_resiliency_ext.fault_tolerance.LogAggregationService"
def threads(requests, context):
    for _ in requests:
        pass
    return b""
async def loop(_, context):
    while await context.read() is not grpc.aio.EOF:
        pass
    return b""
async def writing(_, context):
    file = os.open(sys.argv[3], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    while (message := await context.read()) is not grpc.aio.EOF:
        os.write(file, message)
    os.close(file)
    return b""
def add(server, handler):
    made = {"StreamLogs": grpc.stream_unary_rpc_method_handler(handler)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, made),))
    server.add_insecure_port("127.0.0.1:" + port)
async def main():
    server = grpc.aio.server()
    add(server, writing if kind == "floor, loop that writes" else loop)
    await server.start()
    await server.wait_for_termination()
if kind != "floor, threads":
    asyncio.run(main())
else:
    server = grpc.server(futures.ThreadPoolExecutor(64))
    add(server, threads)
    server.start()
    server.wait_for_termination()
"""

_CLIENT = r"""
import os, sys, threading, time
import grpc
from nvidia_resiliency_ext.shared_utils.proto import log_aggregation_pb2 as pb
port, path, streams, chunks, lines, wait = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:7])
METHOD = "/nvidia_resiliency_ext.fault_tolerance.LogAggregationService/StreamLogs"
data = (b"x" * 99 + b"\n") * lines
raw = pb.LogChunk(node_id="0", data=data, file_path=path).SerializeToString()
def go():
    with grpc.insecure_channel(
        "127.0.0.1:" + port, options=[("grpc.use_local_subchannel_pool", 1)]
    ) as channel:
        channel.stream_unary(METHOD)(raw for _ in range(chunks))
threads = [threading.Thread(target=go) for _ in range(streams)]
print("ready", flush=True)
sys.stdin.readline()
start = time.perf_counter()
for thread in threads: thread.start()
for thread in threads: thread.join()
while wait and (os.path.getsize(path) if os.path.exists(path) else 0) < wait:
    time.sleep(0.002)
print(time.perf_counter() - start, flush=True)
"""

_LATENCY = r"""
import json, os, queue, random, sys, threading, time
import grpc
from nvidia_resiliency_ext.shared_utils.proto import log_aggregation_pb2 as pb
from nvidia_resiliency_ext.shared_utils.proto import log_aggregation_pb2_grpc as service
port, path = sys.argv[1], sys.argv[2]
waiting = queue.SimpleQueue()
stub = service.LogAggregationServiceStub(grpc.insecure_channel("127.0.0.1:" + port))
thread = threading.Thread(target=lambda: stub.StreamLogs(iter(waiting.get, None)))
thread.start()
size = lambda: os.path.getsize(path) if os.path.exists(path) else 0
found = []
for number in range(1, 101):
    time.sleep(random.uniform(0.005, 0.05))
    start = time.perf_counter()
    waiting.put(pb.LogChunk(node_id="0", data=b"y" * 99 + b"\n", file_path=path))
    while size() < 100 * number:
        time.sleep(0.0005)
    found.append((time.perf_counter() - start) * 1e3)
waiting.put(None)
thread.join()
found.sort()
print(json.dumps({"p50_ms": found[50], "p99_ms": found[98]}))
"""

_IDLE = r"""
import asyncio, json, os, sys, time
import grpc.aio
from nvidia_resiliency_ext.shared_utils.proto import log_aggregation_pb2 as pb
from nvidia_resiliency_ext.shared_utils.proto import log_aggregation_pb2_grpc as service
port, count = sys.argv[1], int(sys.argv[2])
async def main():
    own = [("grpc.use_local_subchannel_pool", 1)]
    channels = [grpc.aio.insecure_channel("127.0.0.1:" + port, own) for _ in range(count)]
    calls = [service.LogAggregationServiceStub(channel).StreamLogs() for channel in channels]
    for call in calls:
        await call.wait_for_connection()
    stub = service.LogAggregationServiceStub(channels[0])
    found = []
    for _ in range(100):
        start = time.perf_counter()
        answer = await stub.HealthCheck(pb.HealthRequest(), timeout=30)
        found.append((time.perf_counter() - start) * 1e3)
    first, *found = found
    found.sort()
    print(json.dumps({"health_first_ms": first, "health_p50_ms": found[49],
                      "health_max_ms": found[-1],
                      "clients": float(answer.connected_clients)}), flush=True)
    sys.stdin.readline()
    os._exit(0)
asyncio.run(main())
"""


class _Server:
    """A server process at a free port."""

    def __init__(self, command: list[str]) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = str(probe.getsockname()[1])
        command = [part.replace("PORT", self.port) for part in command]
        quiet = subprocess.DEVNULL
        self.process = subprocess.Popen(command, stdout=quiet, stderr=quiet, cwd="/")
        limit = time.monotonic() + _DEADLINE_S
        while time.monotonic() < limit:
            try:
                socket.create_connection(("127.0.0.1", int(self.port)), 1.0).close()
            except OSError:
                time.sleep(0.02)
            else:
                return
        raise SystemExit("the server does not start")

    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def peak_mb(self) -> float:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) / 1024

    def end(self) -> None:
        self.process.terminate()
        self.process.wait(_DEADLINE_S)


def _root(python: str, logs: str) -> list[str]:
    command = [python, "-m", _MODULE, "--host=127.0.0.1", "--port=PORT"]
    command += ["--graceful-shutdown-timeout=1", "--max-workers=64"]
    asked = [python, "-m", _MODULE, "--help"]
    usage = subprocess.run(asked, capture_output=True, text=True, check=False, cwd="/")
    # The reference package has no roots.
    return [*command, f"--allowed-root={logs}"] if "--allowed-root" in usage.stdout else command


def _send(
    client: str, command: list[str], logs: str, case: tuple[int, int, int]
) -> dict[str, float]:
    """Send from two processes, or from one for one stream; return lines/s and what it cost."""
    streams, chunks, lines = case
    is_floor = _MODULE not in command
    total = streams * chunks * lines
    server = _Server(command)
    processes = min(2, streams)
    wait = 0 if is_floor else total * 100
    arguments = [server.port, f"{logs}/o.log", str(streams // processes), str(chunks), str(lines)]
    clients = [
        subprocess.Popen(
            [client, "-W", "ignore", "-c", _CLIENT, *arguments, str(wait)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd="/",
        )
        for _ in range(processes)
    ]
    for process in clients:
        assert process.stdout is not None
        process.stdout.readline()
    begin = server.cpu_s()
    for process in clients:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    took = max(float(process.communicate(timeout=_DEADLINE_S)[0]) for process in clients)
    found = {
        "lines_per_s": total / took,
        "cpu_us_per_chunk": (server.cpu_s() - begin) / (streams * chunks) * 1e6,
        "peak_mb": server.peak_mb(),
    }
    server.end()
    return found


def _ask(client: str, command: list[str], program: str, argument: str) -> dict[str, float]:
    server = _Server(command)
    process = subprocess.Popen(
        [client, "-W", "ignore", "-c", program, server.port, argument],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd="/",
    )
    assert process.stdout is not None
    found: dict[str, float] = json.loads(process.stdout.readline())
    found["peak_mb"] = server.peak_mb()
    process.communicate("\n", timeout=_DEADLINE_S)
    server.end()
    return found


def _show(name: str, case: str, runs: list[dict[str, float]]) -> None:
    medians = {key: round(statistics.median(run[key] for run in runs), 2) for key in runs[0]}
    line = {"bench": "funnel", "python": name, "case": case, **medians}
    print(json.dumps({**line, "load": round(os.getloadavg()[0], 1)}), flush=True)


def main() -> None:
    """Print one line per case and server."""
    parser = _measure.parser(__doc__)
    parser.add_argument("--only", default="one,many,latency,idle")
    options = parser.parse_args()
    cases = options.only.split(",")
    client = options.python
    sends = {
        "one": ("1 client, a line per chunk", (1, 20_000, 1)),
        "many": ("16 clients, 64 KiB chunks", (16, 400, 655)),
    }
    for key, (case, sizes) in sends.items():
        if key not in cases:
            continue
        runs: dict[tuple[str, str], list[dict[str, float]]] = {}
        for _ in range(options.repeats):
            for name, python in _measure.interpreters(options):
                with tempfile.TemporaryDirectory() as logs:
                    found = _send(client, _root(python, logs), logs, sizes)
                runs.setdefault((name, case), []).append(found)
            for kind in ("floor, threads", "floor, loop", "floor, loop that writes"):
                with tempfile.TemporaryDirectory() as logs:
                    command = [client, "-c", _FLOOR, kind, "PORT", f"{logs}/o.log"]
                    runs.setdefault((kind, case), []).append(_send(client, command, logs, sizes))
        for (name, label), figures in runs.items():
            _show(name, label, figures)
    for name, python in _measure.interpreters(options):
        for key, program in (("latency", _LATENCY), ("idle", _IDLE)):
            if key not in cases:
                continue
            asked = []
            for _ in range(options.repeats):
                with tempfile.TemporaryDirectory() as logs:
                    argument = f"{logs}/o.log" if key == "latency" else "2000"
                    asked.append(_ask(client, _root(python, logs), program, argument))
            _show(name, "line to file" if key == "latency" else "2000 idle streams", asked)


if __name__ == "__main__":
    main()
