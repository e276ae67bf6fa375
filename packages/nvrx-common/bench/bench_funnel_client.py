# SPDX-License-Identifier: Apache-2.0
"""Measures the client of the log funnel with the real root server: speed, delay, losses by kills.

Each figure is a JSON line. `us` is one call with a 100-byte line while a server takes them;
`lines_per_s` is from the first call until all lines are in the file; `floor_lines_per_s` is one
`os.write` per line to a file, without any funnel. The latency is from the call until the line is in
the file. The campaigns kill the root, a leaf before it, or the client, with SIGKILL and count lines
lost and doubled. The servers always run under `--python`.

usage: bench_funnel_client.py [--python PY] [--against PY] [--repeats 5] [--trials 20]
                              [--only throughput,latency,restart,leaf_restart,client_kill]
"""

from __future__ import annotations

import json
import os
import signal
import socket
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import _measure

_DEADLINE_S = 90.0
_RATE = 2000
_CAMPAIGN_LINES = 16_000
_KILL_AFTER_S = 5.0
_BACK_AFTER_S = 0.5

_THROUGHPUT = r"""
import json, os, sys, time
from nvidia_resiliency_ext.shared_utils.grpc_log_client import LogFunnelClient
endpoint, path, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
line = b"x" * 99 + b"\n"
fd = os.open(path + ".floor", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
start = time.perf_counter()
for _ in range(count // 10):
    os.write(fd, line)
floor_s = (time.perf_counter() - start) * 10
client = LogFunnelClient(endpoint, node_id="bench", spill_dir=path + ".spill")
target = client.open(path)
target.write(line)
target.flush()
write = target.write
start = time.perf_counter()
for _ in range(count):
    write(line)
written_s = time.perf_counter() - start
target.flush(60.0)
all_s = time.perf_counter() - start
assert os.path.getsize(path) == (count + 1) * 100
client.close()
print(json.dumps({"us": written_s / count * 1e6, "lines_per_s": count / all_s,
                  "floor_lines_per_s": count / floor_s}))
"""

_LATENCY = r"""
import json, os, sys, threading, time
from nvidia_resiliency_ext.shared_utils.grpc_log_client import LogFunnelClient
endpoint, path, rate, seconds = sys.argv[1], sys.argv[2], float(sys.argv[3]), float(sys.argv[4])
client = LogFunnelClient(endpoint, node_id="bench", spill_dir=path + ".spill")
target = client.open(path)
target.write(b"y" * 99 + b"\n")
target.flush()
sent, seen, ended = [], [], threading.Event()
def look():
    size = 100
    while not (ended.is_set() and len(seen) == len(sent)):
        now_size = os.path.getsize(path)
        now = time.perf_counter()
        while size < now_size:
            size += 100
            seen.append(now)
        time.sleep(0.0005)
watcher = threading.Thread(target=look)
watcher.start()
start = time.perf_counter()
for number in range(int(rate * seconds)):
    left = start + number / rate - time.perf_counter()
    if left > 0:
        time.sleep(left)
    sent.append(time.perf_counter())
    target.write(b"%08d %s\n" % (number, b"y" * 90))
target.flush()
ended.set()
watcher.join()
client.close()
delays = sorted(b - a for a, b in zip(sent, seen))
print(json.dumps({"p50_ms": delays[len(delays) // 2] * 1e3,
                  "p99_ms": delays[len(delays) * 99 // 100] * 1e3}))
"""

_WRITER = r"""
import os, sys, time
from nvidia_resiliency_ext.shared_utils.grpc_log_client import LogFunnelClient
endpoint, path, count, rate = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
client = LogFunnelClient(endpoint, node_id="bench", spill_dir=path + ".spill")
target = client.open(path)
fed = os.open(path + ".fed", os.O_WRONLY | os.O_CREAT)
print("go", flush=True)
start = time.monotonic()
for number in range(count):
    target.write(b"%08d %s\n" % (number, b"z" * 90))
    if number % 10 == 9:
        os.pwrite(fed, b"%08d" % (number + 1), 0)
    if number % 50 == 49:
        time.sleep(max(0.0, start + (number + 1) / rate - time.monotonic()))
client.close(60.0)
"""


class _Server:
    """A server, a leaf where it has an upstream; it may be killed and started at the same port."""

    def __init__(self, python: str, logs: str, upstream: str = "") -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.endpoint = f"127.0.0.1:{self.port}"
        module = f"nvidia_resiliency_ext.shared_utils.grpc_log_{'leaf_' if upstream else ''}server"
        self._command = [python, "-m", module, "--host=127.0.0.1", f"--port={self.port}"]
        self._command += [f"--allowed-root={logs}", "--graceful-shutdown-timeout=2"]
        self._command += [f"--upstream={upstream}"] if upstream else []
        self.start()

    def start(self) -> None:
        quiet = subprocess.DEVNULL
        self._process = subprocess.Popen(self._command, stdout=quiet, stderr=quiet, cwd="/")
        limit = time.monotonic() + _DEADLINE_S
        while time.monotonic() < limit:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1.0).close()
            except OSError:
                time.sleep(0.02)
            else:
                return
        raise SystemExit("the server does not start")

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def end(self) -> None:
        self._process.terminate()
        self._process.wait(_DEADLINE_S)


def _run(python: str, program: str, arguments: list[str]) -> dict[str, float]:
    done = subprocess.run(
        [python, "-W", "ignore", "-c", program, *arguments],
        capture_output=True,
        text=True,
        timeout=_DEADLINE_S,
        cwd="/",
        check=False,
    )
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def _medians(
    server: str, python: str, program: str, arguments: list[str], repeats: int
) -> dict[str, float]:
    runs = []
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as logs:
            root = _Server(server, logs)
            try:
                runs.append(_run(python, program, [root.endpoint, f"{logs}/o.log", *arguments]))
            finally:
                root.end()
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


def _count(path: Path) -> tuple[int, int]:
    """Return how many lines a file has, and how many different ones."""
    numbers = [line[:8] for line in path.read_bytes().splitlines()]
    return len(numbers), len(set(numbers))


def _restart_trial(server: str, python: str, *, through_leaf: bool) -> dict[str, int]:
    """Kill the server that the client talks to while it writes; count what is in the file."""
    with tempfile.TemporaryDirectory() as logs:
        root, log = _Server(server, logs), Path(logs, "o.log")
        victim = _Server(server, logs, root.endpoint) if through_leaf else root
        arguments = [victim.endpoint, str(log), str(_CAMPAIGN_LINES), str(_RATE)]
        writer = subprocess.Popen(
            [python, "-W", "ignore", "-c", _WRITER, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd="/",
        )
        assert writer.stdout is not None
        writer.stdout.readline()
        time.sleep(_KILL_AFTER_S)
        victim.kill()
        time.sleep(_BACK_AFTER_S)
        victim.start()
        writer.communicate(timeout=_DEADLINE_S)
        if through_leaf:
            victim.end()
        root.end()
        lines, different = _count(log)
        return {"lost": _CAMPAIGN_LINES - different, "doubled": lines - different}


def _client_kill_trial(server: str, python: str) -> dict[str, int]:
    with tempfile.TemporaryDirectory() as logs:
        root, log = _Server(server, logs), Path(logs, "o.log")
        arguments = [root.endpoint, str(log), "60000", "4000"]
        writer = subprocess.Popen(
            [python, "-W", "ignore", "-c", _WRITER, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd="/",
        )
        assert writer.stdout is not None
        writer.stdout.readline()
        time.sleep(2.0)
        writer.send_signal(signal.SIGKILL)
        writer.communicate()
        root.end()
        fed = int(Path(f"{log}.fed").read_text())
        lines, different = _count(log)
        return {"fed": fed, "lost": max(0, fed - different), "doubled": lines - different}


def _show(case: str, name: str, figures: dict[str, float]) -> None:
    rounded = {key: round(value, 3) for key, value in figures.items()}
    load = round(os.getloadavg()[0], 1)
    print(
        json.dumps(
            {"bench": "funnel_client", "python": name, "case": case, **rounded, "load": load}
        ),
        flush=True,
    )


def _campaign(case: str, name: str, trials: list[dict[str, int]]) -> None:
    figures: dict[str, float] = {"trials": len(trials)}
    for key in trials[0]:
        figures[f"{key}_median"] = statistics.median(trial[key] for trial in trials)
        figures[f"{key}_max"] = max(trial[key] for trial in trials)
    _show(case, name, figures)


def main() -> None:
    """Print one line per case and interpreter."""
    parser = _measure.parser(__doc__)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--lines", type=int, default=1_000_000)
    parser.add_argument("--only", default="throughput,latency,restart,leaf_restart,client_kill")
    options = parser.parse_args()
    cases = options.only.split(",")
    for name, python in _measure.interpreters(options):
        if "throughput" in cases:
            lines = [str(options.lines)]
            found = _medians(options.python, python, _THROUGHPUT, lines, options.repeats)
            _show("throughput", name, found)
        if "latency" in cases:
            for case, rate, seconds in (("single lines", "5", "6"), ("2000 lines/s", "2000", "4")):
                arguments = [rate, seconds]
                found = _medians(options.python, python, _LATENCY, arguments, options.repeats)
                _show(f"latency, {case}", name, found)
        for key, case in (("restart", "root"), ("leaf_restart", "leaf")):
            if key in cases:
                trials = [
                    _restart_trial(options.python, python, through_leaf=case == "leaf")
                    for _ in range(options.trials)
                ]
                _campaign(f"{case} killed and restarted", name, trials)
        if "client_kill" in cases:
            trials = [_client_kill_trial(options.python, python) for _ in range(options.trials)]
            _campaign("client killed after 2 s", name, trials)


if __name__ == "__main__":
    main()
