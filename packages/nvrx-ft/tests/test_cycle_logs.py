# SPDX-License-Identifier: Apache-2.0
"""Cycle logs with real pipes, processes, files and log servers."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import logging
import operator
import os
import queue
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import ports
import pytest

from nvidia_resiliency_ext.fault_tolerance import per_cycle_logs
from nvidia_resiliency_ext.fault_tolerance._config.launch_config import (
    LogFunnelPorts,
    LogServerPlan,
)
from nvidia_resiliency_ext.fault_tolerance._logs import outlet as outlets
from nvidia_resiliency_ext.fault_tolerance._logs import sinks
from nvidia_resiliency_ext.fault_tolerance._logs.collector import CycleLogs
from nvidia_resiliency_ext.fault_tolerance._logs.lines import LineAssembler
from nvidia_resiliency_ext.fault_tolerance._logs.outlet import Backlog
from nvidia_resiliency_ext.fault_tolerance._logs.reader import open_pipe
from nvidia_resiliency_ext.fault_tolerance._logs.servers import (
    LogServer,
    LogServers,
    _end_together,
    servers_of,
)
from nvidia_resiliency_ext.shared_utils.clock import SystemClock
from nvidia_resiliency_ext.shared_utils.errors import ChildStartError, NvrxError
from nvidia_resiliency_ext.shared_utils.event_loop import EventLoop

DEADLINE_S = 60.0
Logs = Callable[..., CycleLogs]


def wait_until(condition: Callable[[], object], what: str) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, what
        threading.Event().wait(0.01)


@pytest.fixture
def logs(tmp_path: Path) -> Iterator[Logs]:
    """Make cycle logs below the test's folder; they are closed in the end."""
    with contextlib.ExitStack() as stack:

        def make(path: str | None = None, **settings: object) -> CycleLogs:
            made = CycleLogs(path or str(tmp_path / "job.log"), **settings)  # type: ignore[arg-type]
            stack.callback(made.close, 0.1)
            return made

        yield make


def run_writer(made: CycleLogs, rank: int, code: str) -> subprocess.Popen[bytes]:
    """Start a program whose output is a rank's."""
    writing = made.open_pipe(rank)
    try:
        return subprocess.Popen([sys.executable, "-S", "-c", code], stdout=writing, stderr=writing)
    finally:
        os.close(writing)


# --- pipes and files --------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["os._exit(3)", "os.kill(os.getpid(), 9)"])
def test_the_last_megabyte_before_a_death_is_in_the_log(
    logs: Logs, tmp_path: Path, end: str
) -> None:
    """What a worker wrote right before it was killed is there to the last byte."""
    made = logs()
    made.begin_cycle(0, 1)
    code = f"import os; os.write(1, b'%063d\\n' % 7 * 16384); os.write(2, b'last'); {end}"
    run_writer(made, 0, code).wait(DEADLINE_S)
    assert made.close()
    text = (tmp_path / "job_cycle0.log").read_bytes()
    assert text.count(b"\n") == 16385
    assert text.endswith(b"7\n0: last\n")


def test_streams_of_a_rank_keep_their_order_and_ranks_their_lines(
    logs: Logs, tmp_path: Path
) -> None:
    """stdout and stderr are one; lines of different ranks are never mixed."""
    made = logs()
    made.begin_cycle(0, 12)
    code = "import os\nfor n in range(3000): os.write(1 + n % 2, b'n %d %d\\n' % (n, n * n))"
    for one in [run_writer(made, rank, code) for rank in (2, 11)]:
        one.wait(DEADLINE_S)
    assert made.close()
    found = (tmp_path / "job_cycle0.log").read_text().splitlines()
    for rank in (" 2: ", "11: "):
        mine = [line.removeprefix(rank) for line in found if line.startswith(rank)]
        assert mine == [f"n {n} {n * n}" for n in range(3000)]
    assert len(found) == 6000


def test_a_cycle_begins_while_the_last_one_is_read(logs: Logs, tmp_path: Path) -> None:
    """Each cycle has its own file; a pipe that somebody holds delays no other."""
    made = logs()
    made.begin_cycle(0, 1)
    held = made.open_pipe(0)
    os.write(held, b"begun, not ended")
    started = time.monotonic()
    made.begin_cycle(1, 1)
    run_writer(made, 0, "print('one')").wait(DEADLINE_S)
    assert time.monotonic() - started < DEADLINE_S
    first, second = tmp_path / "job_cycle0.log", tmp_path / "job_cycle1.log"
    ended = "0: begun, not ended\n"
    wait_until(lambda: first.exists() and first.read_text() == ended, "the first's last line")
    with pytest.raises(BrokenPipeError):
        os.write(held, b"too late")
    os.close(held)
    # The end waits no longer than it was told.
    wait_until(lambda: second.exists() and second.read_text() == "0: one\n", "the second's line")
    assert made.close()


def test_a_file_is_there_before_the_first_line(logs: Logs, tmp_path: Path) -> None:
    """Whoever follows the log of a cycle finds it when the cycle begins."""
    made = logs(str(tmp_path / "new" / "job"))
    made.begin_cycle(4, 1)
    wait_until((tmp_path / "new" / "job_cycle4.log").exists, "the log")


def test_a_log_that_takes_nothing_stops_nobody(
    logs: Logs, caplog: pytest.LogCaptureFixture
) -> None:
    """On a full disk a worker writes on, and the loss is said at the end."""
    made = logs()
    reading, writing = open_pipe()
    made._reader.add(reading, LineAssembler(), made._outlet.open("/dev/full"))
    worker = subprocess.Popen(
        [
            sys.executable,
            "-S",
            "-c",
            "import os\nfor _ in range(200): os.write(1, b'x\\n' * 50000)",
        ],
        stdout=writing,
    )
    os.close(writing)
    assert worker.wait(DEADLINE_S) == 0
    wait_until(lambda: "its lines wait" in caplog.text, "the first try to write")
    assert not made.close(0.3)
    assert "No space left" in caplog.text


def test_a_log_that_takes_nothing_for_a_while_gets_everything_then(tmp_path: Path) -> None:
    """Lines wait in memory and in files while a log hangs, and come in order afterwards."""
    may_go_on, taken = threading.Event(), bytearray()

    class Slow:
        def write(self, data: memoryview) -> int:
            may_go_on.wait(DEADLINE_S)
            taken.extend(data[:100_000])
            return min(len(data), 100_000)

        def close(self, _timeout_s: float = 0.0) -> bool:
            return True

    backlog = Backlog(1 << 20, str(tmp_path))
    outlet = outlets.Outlet(lambda _path: Slow(), backlog)
    target = outlet.open("x")
    sent = b""
    for number in range(60):
        block = b"%07d\n" % number * 10_000
        outlet.put(target, block)
        sent += block
    assert backlog.spilled_bytes > 2 << 20
    may_go_on.set()
    assert outlet.close(DEADLINE_S)
    assert bytes(taken) == sent


def test_a_hung_log_does_not_hold_up_the_end() -> None:
    """A log whose writing never returns costs the end its time limit and no more."""
    may_go_on = threading.Event()

    class Hung:
        def write(self, data: memoryview) -> int:
            may_go_on.wait(DEADLINE_S)
            return len(data)

        def close(self, _timeout_s: float = 0.0) -> bool:
            return True

    outlet = outlets.Outlet(lambda _path: Hung(), Backlog(1 << 20, "/nowhere"))
    outlet.put(outlet.open("x"), b"a\n")
    started = time.monotonic()
    assert not outlet.close(0.2)
    assert time.monotonic() - started < DEADLINE_S / 2
    may_go_on.set()


def test_pipes_hold_a_megabyte_where_the_kernel_gives_it() -> None:
    """A worker can write so much while nobody reads; a refused size is made smaller."""
    reading, writing = open_pipe()
    size = fcntl.fcntl(writing, fcntl.F_GETPIPE_SZ)
    assert size >= 1 << 16
    limit = int(Path("/proc/sys/fs/pipe-max-size").read_text())
    if os.geteuid() == 0:
        assert size == min(1 << 20, limit)
    os.close(reading)
    os.close(writing)


def test_the_launchers_own_streams_go_into_a_log_and_come_back(tmp_path: Path) -> None:
    """For a time stdout and stderr are in the file, unchanged; then they are as before."""
    code = f"""
import os, subprocess, sys
from nvidia_resiliency_ext.fault_tolerance._logs.collector import CycleLogs
print("before", flush=True)
logs = CycleLogs({str(tmp_path / "job.log")!r})
logs.capture_own_streams({str(tmp_path / "own.log")!r})
print("  1 mem")
print("to stderr", file=sys.stderr)
holding = subprocess.Popen(["sleep", "60"])  # holds the streams' pipe open
assert logs.close()
holding.kill(); holding.wait()
print("after")
"""
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "before\nafter\n", "")
    assert sorted((tmp_path / "own.log").read_text().splitlines()) == ["  1 mem", "to stderr"]
    assert time.monotonic() - started < 30


def open_below(folder: Path) -> list[str]:
    """Return the files below a folder that this process has open."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.append(os.readlink(f"/proc/self/fd/{number}"))
    return [path for path in found if Path(path).is_relative_to(folder)]


def test_fifty_cycles_leave_nothing_open(logs: Logs, tmp_path: Path) -> None:
    """Descriptors and threads do not grow with cycles."""
    made = logs()

    def open_now() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    for cycle in range(50):
        made.begin_cycle(cycle, 1)
        writing = made.open_pipe(0)
        os.write(writing, b"x\n")
        os.close(writing)
        if cycle in (5, 49):
            wait_until(lambda: len(made._reader._pipes) == 0, "the pipe's end")
            # The log of the last cycle is closed, and the one of this cycle open.
            here = str(tmp_path / f"job_cycle{cycle}.log")
            wait_until(lambda here=here: open_below(tmp_path) == [here], "the last cycle's end")
            if cycle == 5:
                early = open_now()
    # A pipe is forgotten just before it is closed.
    wait_until(
        lambda: all(map(operator.le, open_now(), early)), "as few descriptors as after five cycles"
    )


def test_memory_stays_within_its_limit(tmp_path: Path) -> None:
    """100 MB of lines at full speed cost the reading process less than 80 MiB."""
    code = f"""
import os, subprocess, sys, threading
from nvidia_resiliency_ext.fault_tolerance._logs.collector import CycleLogs
logs = CycleLogs({str(tmp_path / "job.log")!r})
logs.begin_cycle(0, 1)
before = int(open("/proc/self/statm").read().split()[1])
writing = logs.open_pipe(0)
line = b"%-100s\\n" % b"step 12345 loss 2.345"
worker = subprocess.Popen([sys.executable, "-S", "-c",
    f"import os\\nfor _ in range(1600): os.write(1, {{line!r}} * 640)"], stdout=writing)
os.close(writing)
worker.wait()
assert logs.close()
high = [line for line in open("/proc/self/status") if line.startswith("VmHWM")][0]
print(int(high.split()[1]) * 1024 - before * os.sysconf("SC_PAGESIZE"))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert int(done.stdout) < 80 << 20
    assert (tmp_path / "job_cycle0.log").stat().st_size > 100_000_000


# --- log servers ------------------------------------------------------------------------------


def server_plan(folder: Path, leaves: int, port: int, grace_s: float = 5.0) -> LogServerPlan:
    """Return a plan whose logs lie in the folder."""
    return LogServerPlan(
        ports=LogFunnelPorts(port, leaves),
        allowed_roots=(str(folder),),
        leaf_queue_chunks=100,
        log_prefix=str(folder / "server"),
        grace_s=grace_s,
    )


def test_servers_follow_the_ports(tmp_path: Path) -> None:
    """One server is a root; several are leaves below a root that has twice their time."""
    (root,) = servers_of(server_plan(tmp_path, 1, 5000), "127.0.0.1")
    assert (root.name, root.port, root.grace_s) == ("root", 5000, 5.0)
    root, *leaves = servers_of(server_plan(tmp_path, 2, 5000), "::1")
    assert (root.port, root.grace_s) == (5002, 10.0)
    assert [leaf.port for leaf in leaves] == [5000, 5001]
    assert leaves[1].argv[leaves[1].argv.index("--upstream") + 1] == "[::1]:5002"
    assert leaves[1].argv[leaves[1].argv.index("--max-queue-chunks") + 1] == "100"
    assert str(tmp_path) in root.argv


@contextlib.contextmanager
def running_servers(
    folder: Path, leaves: int, grace_s: float = 5.0
) -> Iterator[tuple[LogServers, EventLoop, int]]:
    """Run log servers; the block gets them, their loop and the first port."""
    token = folder / "token"
    token.write_text("secret\n")
    token.chmod(0o600)
    clock = SystemClock()
    loop = EventLoop(clock)
    with ports.claimed(1 + leaves) as port:
        plan = server_plan(folder, leaves, port, grace_s)
        servers = LogServers(plan, "127.0.0.1", str(token), os.environ, loop, clock)
        servers.start()
        try:
            yield servers, loop, port
        finally:
            servers.stop()
            loop.close()


def address(folder: Path, port: int) -> sinks.FunnelSink:
    """Return where a client of `running_servers` sends to."""
    return sinks.FunnelSink(f"127.0.0.1:{port}", "node", str(folder / "token"))


def test_lines_reach_the_files_of_a_log_server(
    logs: Logs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With leaves and a root the same lines are in the same files."""
    monkeypatch.setenv("NVRX_NODE_LOCAL_TMPDIR", str(tmp_path / "spill"))
    with running_servers(tmp_path, 2) as (_, _, port):
        made = logs(funnel=address(tmp_path, port + 1))
        for cycle in range(2):
            made.begin_cycle(cycle, 1)
            run_writer(made, 0, "import os; os.write(1, b'%06d\\n' % 5 * 90000)").wait(DEADLINE_S)
        assert made.close(DEADLINE_S)
    for cycle in range(2):
        text = (tmp_path / f"job_cycle{cycle}.log").read_text()
        assert text == "0: 000005\n" * 90000


@pytest.mark.slow
def test_a_log_server_that_dies_starts_again_and_nothing_is_lost(
    logs: Logs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A killed server is started anew by the loop; its clients send what it did not write."""
    monkeypatch.setenv("NVRX_NODE_LOCAL_TMPDIR", str(tmp_path / "spill"))
    file = tmp_path / "job_cycle0.log"
    with running_servers(tmp_path, 1) as (servers, loop, port):
        made = logs(funnel=address(tmp_path, port))
        made.begin_cycle(0, 1)
        writing = made.open_pipe(0)
        os.write(writing, b"before\n")
        wait_until(lambda: file.exists() and file.read_text(), "the first line")
        (server,) = servers._servers
        first = server.child
        assert first is not None
        os.kill(first.pid, signal.SIGKILL)
        os.write(writing, b"between\n")
        deadline = time.monotonic() + DEADLINE_S
        while server.child in (first, None):
            assert time.monotonic() < deadline, "a new server"
            loop.run_once(until=time.monotonic() + 0.1)
        os.write(writing, b"after\n")
        os.close(writing)
        assert made.close(DEADLINE_S)
    assert file.read_text() == "0: before\n0: between\n0: after\n"


class Later:
    """A loop that keeps what is to be done later."""

    def __init__(self) -> None:
        self.calls: list[tuple[float, Callable[[], None]]] = []

    def call_at(self, at: float, callback: Callable[[], None]) -> None:
        """Keep it."""
        self.calls.append((at, callback))


class StoppedClock(SystemClock):
    """A clock at which it is always 0 o'clock."""

    def monotonic(self) -> float:
        """Return 0."""
        return 0.0


@pytest.mark.parametrize(
    "problem",
    [OSError(24, "Too many open files"), ChildStartError(("a",), "fork")],
    ids=["files", "fork"],
)
def test_a_log_server_whose_start_fails_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, problem: Exception
) -> None:
    """A start that fails for a while costs longer pauses, and not the server."""
    loop = Later()
    plan = server_plan(tmp_path, 1, 5000)
    servers = LogServers(plan, "127.0.0.1", "", {}, loop, StoppedClock())  # type: ignore[arg-type]
    started: list[str] = []

    def start(server: LogServer) -> None:
        started.append(server.name)
        if len(started) < 4:
            raise problem

    monkeypatch.setattr(servers, "_start", start)
    servers._start_again(servers._servers[0])
    for at, callback in loop.calls:
        callback()
        assert at == 0.5 * 2 ** (len(started) - 2)
    assert started == ["root"] * 4


def test_a_log_server_that_does_not_end_in_time_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the log says is done, before the server above it is asked to end."""
    monkeypatch.setattr("nvidia_resiliency_ext.fault_tolerance._logs.servers._KILL_MARGIN_S", 0)
    (server,) = servers_of(server_plan(tmp_path, 1, 5000), "127.0.0.1")
    sent: list[int] = []
    child = types.SimpleNamespace(signal=sent.append, wait=lambda _: None)
    _end_together([(dataclasses.replace(server, grace_s=0.0), child)])  # type: ignore[list-item]
    assert sent == [signal.SIGTERM, signal.SIGKILL]


def test_lines_of_a_cycle_that_is_over_wait_for_the_server_without_limit() -> None:
    """A server that is away for long gets them, too; only the job's end ends the wait."""
    limits: queue.SimpleQueue[float | None] = queue.SimpleQueue()

    class Target:
        def close(self, deadline_s: float | None) -> None:
            limits.put(deadline_s)

    sinks.RemoteFile(Target()).close()  # type: ignore[arg-type]
    assert limits.get(timeout=DEADLINE_S) is None


@pytest.mark.parametrize("leaves", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.no_second_try
def test_a_host_that_goes_before_its_job_leaves_the_lines_to_the_next(
    logs: Logs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leaves: int
) -> None:
    """Servers end at once though nodes are connected; the next ones get every line, once."""
    monkeypatch.setenv("NVRX_NODE_LOCAL_TMPDIR", str(tmp_path / "spill"))
    file = tmp_path / "job_cycle0.log"
    with running_servers(tmp_path, leaves, grace_s=40.0) as (servers, loop, port):
        made = logs(funnel=address(tmp_path, port))
        made.begin_cycle(0, 1)
        writing = made.open_pipe(0)
        os.write(writing, b"before\n")
        wait_until(lambda: file.exists() and file.read_text(), "the first line")
        os.write(writing, b"between\n")
        began = time.monotonic()
        servers.stop(at_once=True)
        assert time.monotonic() - began < 20.0, "they were given 40 s"
        again = server_plan(tmp_path, leaves, port)
        clock = SystemClock()
        following = LogServers(again, "127.0.0.1", str(tmp_path / "token"), os.environ, loop, clock)
        following.start()
        os.write(writing, b"after\n")
        os.close(writing)
        try:
            assert made.close(DEADLINE_S)
        finally:
            following.stop()
    assert file.read_text() == "0: before\n0: between\n0: after\n"


def test_without_a_log_server_the_lines_go_into_files_here(logs: Logs, tmp_path: Path) -> None:
    """Lines wait for a token that is to come, and are written here when there is no server."""
    funnel = sinks.FunnelSink("127.0.0.1:1", "node", str(tmp_path / "no-token"))
    made = logs(funnel=funnel)
    made.begin_cycle(0, 1)
    run_writer(made, 0, "print('a')").wait(DEADLINE_S)
    wait_until(lambda: not made._reader._pipes, "the pipe's end")
    assert not (tmp_path / "job_cycle0.log").exists()
    funnel.write_files_instead()
    assert made.close()
    assert (tmp_path / "job_cycle0.log").read_text() == "0: a\n"


def test_a_taken_port_is_an_error_in_one_sentence(tmp_path: Path) -> None:
    """Nothing is started where a port is in use, and the message names the flag."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        plan = server_plan(tmp_path, 1, other.getsockname()[1])
        clock = SystemClock()
        loop = EventLoop(clock)
        with pytest.raises(NvrxError, match="--ft-log-server-port"):
            LogServers(plan, "127.0.0.1", "", os.environ, loop, clock).start()
        loop.close()


# --- the public names -------------------------------------------------------------------------


def test_the_public_module_loads_nothing_until_it_is_used() -> None:
    """Importing it imports neither torch nor grpc, and every name is there."""
    code = (
        "import sys; from nvidia_resiliency_ext.fault_tolerance import per_cycle_logs as module;"
        "assert not {'torch', 'grpc', 'subprocess'} & set(sys.modules);"
        "assert dir(module) == module.__all__;"
        "module.ReaderConfig; module.MultiplexingReaderThread; module.GrpcWriterThread;"
        "assert not {'torch', 'grpc'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_log_specifications_serve_an_agent_of_torchs_kind(tmp_path: Path) -> None:
    """reify, handlers, update and clean up write each cycle's lines into its file."""
    specs = per_cycle_logs.PipeBasedLogsSpecs(str(tmp_path / "job.log"))
    assert specs.get_cycle_log_file(1) == str(tmp_path / "job_cycle1.log")
    for cycle in range(2):
        job = {"WORLD_SIZE": "12", "TORCHELASTIC_RESTART_COUNT": str(cycle)}
        envs = {local: {**job, "RANK": str(8 + local)} for local in range(2)}
        destination = specs.reify(envs)
        assert all(Path(path).parent.is_dir() for path in destination.error_files.values())
        code = "import os,sys; print('cycle', os.environ['TORCHELASTIC_RESTART_COUNT'])"
        handlers = {
            local: per_cycle_logs.PipeSubprocessHandler(
                sys.executable, ("-c", code), env, None, None, local
            )
            for local, env in envs.items()
        }
        specs.update_reader_for_cycle(handlers)
        for handler in handlers.values():
            assert handler.proc.wait(DEADLINE_S) == 0
        specs.clear_all_pipes_from_reader()
    folder = specs.root_log_dir
    specs.cleanup()
    assert not Path(folder).exists()
    for cycle in range(2):
        found = sorted((tmp_path / f"job_cycle{cycle}.log").read_text().splitlines())
        assert found == [f" 8: cycle {cycle}", f" 9: cycle {cycle}"]


@pytest.mark.parametrize(
    ("base", "settings"),
    [
        ("relative.log", {}),
        ("/a.log", {"launcher_pipe_fd": 3}),
        ("/a.log", {"grpc_server_address": "h:1"}),
    ],
)
def test_half_a_log_specification_is_refused(base: str, settings: dict[str, object]) -> None:
    """What belongs together is given together, and a path is absolute."""
    with pytest.raises(ValueError, match=r"launcher_log_file|node_id|absolute"):
        per_cycle_logs.PipeBasedLogsSpecs(base, **settings)  # type: ignore[arg-type]


def test_a_queue_of_lines_is_sent_to_a_log_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer thread sends pairs of path and lines, and ends when they are there; text, too."""
    monkeypatch.setenv("NVRX_NODE_LOCAL_TMPDIR", str(tmp_path / "spill"))
    monkeypatch.setenv("NVRX_LOG_FUNNEL_TOKEN_FILE", str(tmp_path / "token"))
    with running_servers(tmp_path, 1) as (_, _, port):
        lines: queue.Queue[tuple[str, bytes | str] | None] = queue.Queue(100)
        thread = per_cycle_logs.GrpcWriterThread(
            lines, f"127.0.0.1:{port}", "node", logging.getLogger("nvrx")
        )
        thread.start()
        for number in range(100):
            lines.put((str(tmp_path / f"{number % 2}.log"), b"%d\n" % number))
        lines.put((str(tmp_path / "1.log"), "\udcff\n"))  # a byte that is no text
        thread.shutdown()
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
    expected = [b"%d" % number for number in range(1, 100, 2)]
    assert (tmp_path / "1.log").read_bytes().split() == [*expected, b"\xff"]


def test_without_descriptors_a_pipe_is_an_error(logs: Logs) -> None:
    """At the limit of descriptors opening a pipe fails, and nothing else does."""
    made = logs()
    made.begin_cycle(0, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest - 1, hard))
    opened: list[int] = []

    def open_all() -> None:
        while len(opened) < highest:
            opened.append(made.open_pipe(0))

    try:
        with pytest.raises(OSError, match="Too many open files"):
            open_all()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in opened:
            os.close(fd)
    assert made.close()
