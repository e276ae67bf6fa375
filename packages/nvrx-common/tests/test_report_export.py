# SPDX-License-Identifier: Apache-2.0
"""Figures for Prometheus and OpenTelemetry, and the live view of a running job."""

import contextlib
import fcntl
import gzip
import http.server
import os
import pty
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from recorded_job import RecordedJob

from nvidia_resiliency_ext.shared_utils._report.metrics import metrics_of
from nvidia_resiliency_ext.shared_utils._report.text import draw, new_lines
from nvidia_resiliency_ext.shared_utils.events import (
    CycleStart,
    EventLog,
    Fault,
    FirstStep,
    JobEnd,
    JobStart,
    Progress,
)
from nvidia_resiliency_ext.shared_utils.report import build_timeline, main, render_prometheus

pytestmark = pytest.mark.slow

_COMMAND = [sys.executable, "-m", "nvidia_resiliency_ext.shared_utils.report"]
_DEADLINE_S = 60.0


def _story(job_id: str = "7") -> RecordedJob:
    job = RecordedJob(job_id=job_id).at(0, JobStart(), None).at(1, CycleStart(world_size=2))
    job.at(5, FirstStep(dur_s=4.0), rank=0).at(5, FirstStep(dur_s=4.0), rank=1)
    job.at(50, Fault(cause="killed", what="signal 9", late_s=0.1), rank=1)
    return job.at(60, CycleStart(world_size=2), 1).at(65, FirstStep(dur_s=4.0), 1, rank=0)


def test_prometheus_text() -> None:
    """Every line has the form that Prometheus reads; a name is declared before its values."""
    timeline = build_timeline(
        [_story('a"b\\c\nd').at(99, JobEnd(result="failed", exit_code=1), None).file()]
    )
    text = render_prometheus(timeline)
    declared: set[str] = set()
    for line in text.splitlines():
        declaration = re.fullmatch(r"# (HELP|TYPE) ([a-z_]+) .+", line)
        if declaration:
            if declaration[1] == "TYPE":
                assert declaration[2] not in declared
                declared.add(declaration[2])
            continue
        value = re.fullmatch(r'([a-z_]+)(\{[a-z_]+="(?:[^"\\\n]|\\[\\"n])*"\})? ([0-9.e+-]+)', line)
        assert value, line
        assert value[1] in declared
        float(value[3])
    assert 'nvrx_faults_total{cause="killed"} 1\n' in text
    assert 'nvrx_restarts_total{layer="in-job"} 1\n' in text
    assert "nvrx_job_running 0\n" in text
    assert "nvrx_job_exit_code 1\n" in text
    total = sum(float(each) for each in re.findall(r"nvrx_spent_seconds\{.*\} (.+)", text))
    assert total == pytest.approx(99)


def test_names_that_read_alike_are_one() -> None:
    """No value stands twice in the text: the collector would refuse all of it."""
    job = _story()
    for number, cause in enumerate(("a\x01", "a\x02", "y" * 300 + "1", "y" * 300 + "2")):
        job.at(70 + number, Fault(cause=cause), 1)
    lines = render_prometheus(build_timeline([job.file()])).splitlines()
    names = [line.rpartition(" ")[0] for line in lines if not line.startswith("#")]
    assert len(names) == len(set(names))
    assert 'nvrx_faults_total{cause="a\ufffd"} 2' in lines


def test_counters_only_grow() -> None:
    """While a job goes on, no counter falls."""
    job = _story().at(70, JobEnd(result="success"), None)
    before: dict[object, float] = {}
    for length in range(1, len(job.records) + 1):
        part = RecordedJob()
        part.records = job.records[:length]
        for metric in metrics_of(build_timeline([part.file()])):
            for of, value in metric.values.items():
                key = (metric.name, of)
                assert metric.kind == "gauge" or value >= before.get(key, 0.0)
                before[key] = value


@pytest.fixture
def recorded(tmp_path: Path) -> Iterator[EventLog]:
    """Return the log of a job that is running."""
    log = EventLog.create(tmp_path / "ev", src="launcher", job_id="7", launch_id="a", host="n1")
    log.record(JobStart(nnodes=1, nproc=1), cycle=None)
    log.record(CycleStart(world_size=1, nodes="n1"), cycle=0)
    yield log
    log.close()


@pytest.fixture
def directory(recorded: EventLog, tmp_path: Path) -> str:
    """Return the directory of that log."""
    return str(tmp_path / "ev")


def test_prometheus_file(directory: str, tmp_path: Path) -> None:
    """The file is written whole, and a device is written to instead of replaced."""
    target = tmp_path / "nvrx.prom"
    assert main([directory, "--prometheus", str(target)]) == 0
    assert "nvrx_job_running 1\n" in target.read_text()
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["nvrx.prom"]
    assert main([directory, "--prometheus", "/dev/null"]) == 0
    assert Path("/dev/null").is_char_device()


class _Collector(http.server.BaseHTTPRequestHandler):
    bodies: list[bytes]
    status = 200

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        type(self).bodies.append(body)
        self.send_response(self.status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *args: object) -> None:
        """Print nothing."""


def _serve(status: int) -> tuple[http.server.HTTPServer, type[_Collector]]:
    collector = type("Collector", (_Collector,), {"bodies": [], "status": status})
    return http.server.HTTPServer(("127.0.0.1", 0), collector), collector


@pytest.mark.parametrize("status", [200, 400])
def test_otlp(status: int, directory: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A collector gets every figure over OTLP; one that refuses is one line and exit code 2."""
    pytest.importorskip(
        "opentelemetry.exporter.otlp.proto.http", reason="the extra otel is missing"
    )
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
        ExportMetricsServiceRequest,
    )

    server, collector = _serve(status)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        code = main([directory, "--otlp", f"http://127.0.0.1:{server.server_port}"])
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert code == (0 if status == 200 else 2)
    request = ExportMetricsServiceRequest.FromString(collector.bodies[0])
    scope = request.resource_metrics[0].scope_metrics[0]
    names = {metric.name for metric in scope.metrics}
    assert {"nvrx_job_running", "nvrx_faults_total", "nvrx_spent_seconds"} - names <= {
        "nvrx_faults_total"
    }
    attributes = {each.key: each.value for each in request.resource_metrics[0].resource.attributes}
    assert attributes["nvrx.job_id"].string_value == "7"
    if status != 200:
        assert "did not take" in capsys.readouterr().err


def _answer_without_end(peer: socket.socket) -> None:
    peer.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 10000000000\r\n\r\n")
    while True:
        peer.sendall(b"x" * 65536)


def _slow_header(peer: socket.socket) -> None:
    peer.sendall(b"HTTP/1.1 200 OK\r\nX: ")
    while True:
        peer.sendall(b"x")
        time.sleep(0.05)  # how slowly this peer talks


_IMPATIENT = """
import sys
from nvidia_resiliency_ext.shared_utils._report import metrics as otlp
from nvidia_resiliency_ext.shared_utils.report import main
otlp._WHOLE_TIMEOUT_S = float(sys.argv.pop())
sys.exit(main())
"""


@pytest.mark.parametrize(
    ("talk", "whole_s", "code"),
    [
        (_answer_without_end, 20.0, 0),
        (_slow_header, 2.0, 2),
        (lambda peer: peer.sendall(b"\xff\n" * 10_000), 20.0, 2),
    ],
    ids=["endless", "slow", "garbage"],
)
def test_hostile_collector(
    talk: Callable[[socket.socket], object], whole_s: float, code: int, directory: str
) -> None:
    """Whatever a collector answers, the program ends in time with at most one line."""
    pytest.importorskip(
        "opentelemetry.exporter.otlp.proto.http", reason="the extra otel is missing"
    )
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    peer, _ = listener.accept()
                    with peer, contextlib.suppress(OSError):
                        peer.settimeout(10)
                        peer.recv(65536)
                        talk(peer)

        thread = threading.Thread(target=serve)
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        # In a process of its own, as a thread is left behind.
        command = [sys.executable, "-c", _IMPATIENT, directory, "--otlp", url, str(whole_s)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(30)
    assert (done.returncode, done.stderr.count("\n")) == (code, 1 if code else 0)


def test_otlp_without_the_extra(
    directory: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without the extra the message says what to install."""
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.metric_exporter", None)
    assert main([directory, "--otlp", "http://127.0.0.1:9"]) == 2
    said = capsys.readouterr().err
    assert "nvrx-common[otel]" in said
    assert said.count("\n") == 1


def test_screen_fits() -> None:
    """What is drawn fits the terminal, and carries no control characters of the record."""
    job = _story()
    for number in range(30):
        job.at(70 + number, Fault(cause="killed", what="\x1b[31m\n"), rank=number)
    timeline = build_timeline([job.file()])
    for width, height in ((80, 24), (40, 10), (200, 60)):
        screen = draw(timeline, width, height, now=timeline.end + 3)
        plain = screen.replace("\x1b[H", "").replace("\x1b[K", "").replace("\x1b[J", "")
        lines = plain.splitlines()
        assert len(lines) < height
        assert max(map(len, lines)) <= width
        assert plain.replace("\n", "").isprintable()
        assert "last event 3.00 s ago" in lines[0] or width == 40


def test_news_are_told_once() -> None:
    """Each cycle, fault and restart is told when it is known, and then no more."""
    job = _story().at(70, Progress(iteration=1, steps=1, window_s=1.0), 1, rank=0)
    before = None
    told: list[str] = []
    for length in range(1, len(job.records) + 1):
        part = RecordedJob()
        part.records = job.records[:length]
        timeline = build_timeline([part.file()])
        told += new_lines(before, timeline)
        before = timeline
    assert len(told) == len(set(told)) == 4
    assert [line[20:27] for line in told] == ["cycle 0", "cycle 0", "cycle 1", "restart"]
    assert "killed rank 1 on n1: signal 9" in told[1]


def test_follow_a_pipe(recorded: EventLog, directory: str, tmp_path: Path) -> None:
    """Where there is no terminal, new lines come as they happen, and the report at the end."""
    page = tmp_path / "live.html"
    with subprocess.Popen(
        [*_COMMAND, directory, "--follow", "--html", str(page)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert "cycle 0 begins on n1" in process.stdout.readline()
        recorded.record(Fault(cause="killed", what="signal 9"), cycle=0, rank=0)
        assert "killed rank 0 on n1: signal 9" in process.stdout.readline()
        recorded.record(JobEnd(result="failed", exit_code=1), cycle=None)
        rest = process.stdout.read()
        assert process.wait(_DEADLINE_S) == 0
    assert "ended: failed (exit code 1)" in rest
    assert "killed" in page.read_text()


def test_follow_ends_when_nobody_reads(recorded: EventLog, directory: str) -> None:
    """A view whose reader has left does not stay until the job ends."""
    with subprocess.Popen(
        [*_COMMAND, directory, "--follow"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        recorded.record(Fault(cause="killed", what="signal 9"), cycle=0, rank=0)
        assert process.wait(_DEADLINE_S) == 0
        assert process.stderr.read() == b""


def test_follow_outlives_a_failing_export(
    recorded: EventLog, directory: str, tmp_path: Path
) -> None:
    """A file that cannot be written for a while is said once, and written when it can be again."""
    place = tmp_path / "later"
    command = [*_COMMAND, directory, "--follow", "--prometheus", str(place / "x.prom")]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert "cycle 0 begins" in process.stdout.readline()
        recorded.record(Fault(cause="killed", what="signal 9"), cycle=0, rank=0)
        assert "killed" in process.stdout.readline()
        place.mkdir()
        recorded.record(JobEnd(result="failed", exit_code=1), cycle=None)
        assert "ended: failed" in process.stdout.read()
        assert process.wait(_DEADLINE_S) == 0
        assert process.stderr.read().count("\n") == 1
    assert 'nvrx_faults_total{cause="killed"} 1' in (place / "x.prom").read_text()


def _read_until(terminal: int, text: str) -> str:
    deadline = time.monotonic() + _DEADLINE_S
    found = ""
    while text not in found:
        ready, _, _ = select.select([terminal], [], [], max(0.0, deadline - time.monotonic()))
        assert ready, f"{text!r} did not come; this did: {found!r}"
        found += os.read(terminal, 65536).decode()
    return found


@pytest.mark.parametrize("end", ["job", "interrupt"])
def test_follow_on_a_terminal(end: str, directory: str, recorded: EventLog) -> None:
    """On a real terminal the report is drawn in place, until the job ends or Ctrl-C is pressed."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 70, 0, 0))
    # Of a test run in the background it is ignored, and so it would be in the program.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        process = subprocess.Popen([*_COMMAND, directory, "--follow"], stdin=theirs, stdout=theirs)
    finally:
        signal.signal(signal.SIGINT, before)
    os.close(theirs)
    try:
        first = _read_until(ours, "Ctrl-C")
        assert first.startswith("\x1b[2J\x1b[H")
        recorded.record(Fault(cause="hang_section", what="step"), cycle=0, rank=0)
        _read_until(ours, "hang_section")
        if end == "job":
            recorded.record(JobEnd(result="success", exit_code=0), cycle=None)
            _read_until(ours, "ended: success")
        else:
            process.send_signal(signal.SIGINT)
        assert process.wait(_DEADLINE_S) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def test_follow_waits_for_the_record(tmp_path: Path) -> None:
    """A directory that is not there yet is waited for, which is said once on stderr."""
    directory = tmp_path / "later"
    with subprocess.Popen(
        [*_COMMAND, str(directory), "--follow"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        said = process.stderr.readline()
        assert said == f"nvrx-report: no record at {directory} yet: waiting for it\n"
        log = EventLog.create(directory, src="launcher", job_id="7", launch_id="a", host="n1")
        log.record(CycleStart(world_size=1, nodes="n1"), cycle=0)
        assert process.stdout is not None
        assert "cycle 0 begins" in process.stdout.readline()
        log.record(JobEnd(result="success", exit_code=0), cycle=None)
        log.close()
        assert process.wait(_DEADLINE_S) == 0
        assert process.stderr.read() == ""
