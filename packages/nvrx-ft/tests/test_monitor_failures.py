# SPDX-License-Identifier: Apache-2.0
"""What goes wrong inside the monitor, its handle or the rank's link costs nobody else anything."""

import contextlib
import errno
import logging
import os
import re
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from queue import SimpleQueue

import pytest
from monitored_ranks import Node, wait_until

from nvidia_resiliency_ext.fault_tolerance import FaultToleranceConfig
from nvidia_resiliency_ext.fault_tolerance._core.acceptor import RefusalLog
from nvidia_resiliency_ext.fault_tolerance._monitor import handle as sweep
from nvidia_resiliency_ext.fault_tolerance._monitor import messages as control
from nvidia_resiliency_ext.fault_tolerance._monitor import messages as rank_messages
from nvidia_resiliency_ext.fault_tolerance._monitor.handle import MonitorHandle, MonitorStartError
from nvidia_resiliency_ext.fault_tolerance._monitor.link import LinkError, RankLink
from nvidia_resiliency_ext.fault_tolerance._monitor.server import MonitorServer
from nvidia_resiliency_ext.fault_tolerance._monitor.slot import SlotLayout, SlotMemory, read_slot
from nvidia_resiliency_ext.fault_tolerance.rank_monitor_server import LineHandler
from nvidia_resiliency_ext.shared_utils import procfs
from nvidia_resiliency_ext.shared_utils.children import start_child
from nvidia_resiliency_ext.shared_utils.event_loop import WorkerThread
from nvidia_resiliency_ext.shared_utils.unix_sockets import Channel
from nvidia_resiliency_ext.shared_utils.wire import (
    receive_message,
    send_message,
    send_with_fds,
)

pytestmark = pytest.mark.slow

CONFIG = FaultToleranceConfig().to_dict()


@pytest.fixture
def node(tmp_path):
    """Return a function that starts a node with the given configuration."""
    nodes = []

    def start(count=1, **config):
        nodes.append(Node(tmp_path, count, **config))
        return nodes[-1]

    yield start
    for started in nodes:
        started.close()


@pytest.fixture
def stray():
    """Return a process that carries the id of a run."""
    environment = {**os.environ, "NVRX_RUN_ID": f"test-{os.getpid()}-{time.monotonic_ns()}"}
    child = subprocess.Popen(
        [sys.executable, "-c", "input()"], env=environment, stdin=subprocess.PIPE
    )
    child.run_id = environment["NVRX_RUN_ID"]
    wait_until(lambda: procfs.environ_value(child.pid, "NVRX_RUN_ID") == child.run_id)
    yield child
    child.kill()
    child.wait()
    child.stdin.close()


class BrokenServer(MonitorServer):
    """A server with a defect in its loop."""

    def _next_wake(self):
        raise ZeroDivisionError("a defect")


def test_a_monitor_that_fails_sweeps_nothing(stray):
    """An exception ends the monitor, and the processes of the run live on."""
    ours, theirs = socket.socketpair()
    with ours:
        server = BrokenServer(
            control.Start(config=CONFIG, socket_paths=[], run_id=stray.run_id), theirs
        )
        with pytest.raises(ZeroDivisionError):
            server.run()
    assert stray.poll() is None


@pytest.mark.parametrize("words", [b"\xff\xff\xff\xff", b"\x00\x00\x00\x03{]}"])
def test_garbage_from_a_launcher_that_lives_is_no_order_to_sweep(stray, words):
    """A monitor that does not understand its launcher leaves, and the run's processes live on."""
    ours, theirs = socket.socketpair()
    with ours:
        start = control.Start(config=CONFIG, socket_paths=[], run_id=stray.run_id)
        server = MonitorServer(start, theirs)
        server.announce()
        ours.sendall(words)
        server.run()
    assert stray.poll() is None


class BrokenPort:
    """A rank's port that cannot be closed."""

    def close(self):
        raise PermissionError("a defect")


def test_a_port_that_cannot_be_closed_does_not_keep_the_sweep_away(stray):
    """Whatever goes wrong in a rank's own end, the run's processes are ended when it is ordered."""
    ours, theirs = socket.socketpair()
    with ours:
        start = control.Start(config=CONFIG, socket_paths=[], run_id=stray.run_id)
        server = MonitorServer(start, theirs)
        server.ports.append(BrokenPort())
        server._is_leaving = server._is_told_to_leave = True
        server.run()
    assert stray.wait(timeout=150) == -signal.SIGKILL


def test_a_sweep_ends_what_forks_all_the_time():
    """A process that hands over to a child every millisecond is ended through its group."""
    program = (
        "import os, time\n"
        "print(os.getpgid(0), flush=True)\n"
        "while True:\n    time.sleep(0.001)\n    if os.fork():\n        os._exit(0)\n"
    )
    run_id = f"test-{os.getpid()}-{time.monotonic_ns()}"
    with subprocess.Popen(
        [sys.executable, "-c", program],
        env={**os.environ, "NVRX_RUN_ID": run_id},
        stdout=subprocess.PIPE,
        start_new_session=True,
    ) as forker:
        group = int(forker.stdout.readline())
        try:
            forker.wait(20.0)
            assert sweep.sweep(run_id, (), spared=(), limit_s=30) == []
            # End of file: no process holds the stream any more.
            assert select.select([forker.stdout], [], [], 60.0)[0], "one of them goes on"
            assert forker.stdout.read() == b""
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
    assert procfs.pids_in_groups([group]) == []


def test_a_sweep_without_descriptors_left_goes_on(stray, monkeypatch):
    """A process for which no descriptor is left in one round is killed in the next."""
    held = sweep.PidHandle
    refusals = [OSError(errno.EMFILE, os.strerror(errno.EMFILE))]

    def hold(pid):
        if refusals:
            raise refusals.pop()
        return held(pid)

    monkeypatch.setattr(sweep, "PidHandle", hold)
    assert sweep.sweep(stray.run_id, (), spared=(), limit_s=30) == []
    assert stray.wait(timeout=150) == -signal.SIGKILL


def test_a_thread_that_cannot_start_is_tried_again(monkeypatch):
    """At the limit of threads a job waits, and runs when a later one gets a thread."""
    slow, results = WorkerThread(), []
    start = threading.Thread.start
    refusals = [RuntimeError("can't start new thread")]

    def refuse(thread):
        if refusals:
            raise refusals.pop()
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError):
        slow.submit(lambda: 1, results.append)
    slow.submit(lambda: 2, results.append)
    while len(results) < 2:
        assert select.select([slow], [], [], 30)[0]
        slow.collect()
    assert results == [1, 2]
    slow.close(30)


def test_a_line_that_cannot_travel_does_not_end_the_monitor():
    """A log line that does not fit into a frame is lost, and the next one comes through."""
    ours, theirs = socket.socketpair()
    lines = SimpleQueue()
    lines.put(control.LogLine(20, "x" * (2 << 20)))
    lines.put(control.LogLine(20, "short"))
    server = MonitorServer(
        control.Start(config=CONFIG, socket_paths=[], run_id="none-such"), theirs, lines
    )
    server.announce()
    thread = threading.Thread(target=server.run)
    thread.start()
    server.slow.wake()
    try:
        assert isinstance(receive_message(ours, control.LAUNCHER_MESSAGES, 20.0), control.Ready)
        got = receive_message(ours, control.LAUNCHER_MESSAGES, 20.0)
    finally:
        server.leave()
        thread.join(20.0)
        ours.close()
    assert got == control.LogLine(20, "short")


@pytest.mark.parametrize("character", ["x", "\N{GRINNING FACE}", "\0"])
def test_long_log_lines_are_cut(character):
    """A line of any length and any characters becomes a message that fits into a frame."""
    lines = SimpleQueue()
    record = logging.LogRecord("nvrx", 20, "", 0, character * (2 << 20), None, None)
    LineHandler(lines).emit(record)
    line = lines.get()
    assert control.LAUNCHER_MESSAGES.encode(line)
    assert line.text.endswith(f"({2 << 20} characters)")


def test_a_reused_descriptor_number_gets_no_event_of_its_predecessor():
    """A descriptor that is closed and whose number is opened again in one round is not called."""
    server = MonitorServer(control.Start(config=CONFIG, socket_paths=[]), None)
    pairs = [socket.socketpair() for _ in range(2)]
    numbers = [pair[0].fileno() for pair in pairs]
    idle, idle_end = socket.socketpair()
    seen = []

    def replace_other(other):
        seen.append(other)
        server.loop.unwatch(numbers[other])
        os.dup2(idle.fileno(), numbers[other])
        server.loop.watch(numbers[other], lambda: seen.append("new"))
        server.leave()

    for this, other in ((0, 1), (1, 0)):
        pairs[this][1].send(b"x")
        server.loop.watch(numbers[this], lambda other=other: replace_other(other))
    server.run()
    assert len(seen) == 1, "neither the other one, which is closed, nor the idle one in its place"
    for sock in (*pairs[0], *pairs[1], idle, idle_end):
        sock.close()


def test_waking_a_closed_thread_writes_nowhere():
    """After `close`, `wake` does not write into whoever has the descriptor's number now."""
    slow = WorkerThread()
    slow.close()
    read_fd, write_fd = os.pipe()
    others = [os.pipe() for _ in range(2)]
    try:
        slow.wake()
        readers = [read_fd, *(pipe[0] for pipe in others)]
        assert select.select(readers, [], [], 0)[0] == []
        slow.close()
        os.fstat(write_fd)
    finally:
        for fd in (read_fd, write_fd, *others[0], *others[1]):
            os.close(fd)


def test_descriptors_are_sent_without_waiting_whatever_the_socket_says():
    """A full socket that somebody made blocking holds up no message with descriptors."""
    ends = [Channel(end, control.LAUNCHER_MESSAGES) for end in socket.socketpair()]
    try:
        ends[0].sock.setblocking(True)
        for _ in range(50):
            ends[0].send(control.LogLine(20, "x" * 60_000), [ends[0].fileno()])
        assert ends[0].wants_to_write
    finally:
        for end in ends:
            end.close()


def test_a_monitor_that_dies_at_once_leaves_nothing(monkeypatch):
    """When the process ends before it took its order, process and socket are given back."""
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(MonitorStartError, match="did not take its order"):
        MonitorHandle.launch(CONFIG, [], run_id="x" * 900_000)


def test_an_interrupted_start_leaves_nothing(monkeypatch, tmp_path):
    """Whatever ends the wait for a monitor, its process and socket are given back."""

    def interrupt(*_):
        raise KeyboardInterrupt

    def launch():
        signal.setitimer(signal.ITIMER_REAL, 2.0)
        MonitorHandle.launch(CONFIG, [""], ready_limit_s=60.0)

    before = signal.signal(signal.SIGALRM, interrupt)
    program = tmp_path / "never_ready"
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    try:
        with pytest.raises(KeyboardInterrupt):
            launch()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def test_messages_that_come_with_ready_are_kept(tmp_path):
    """What the monitor says while its parent waits for `Ready` is returned by the next look."""
    ours, theirs = socket.socketpair()
    layout = SlotLayout(())
    memory = SlotMemory.create(layout, directory=str(tmp_path), name="slot")
    messages = control.LAUNCHER_MESSAGES
    first, step = control.RankJoined(0, 0, 1), control.FirstStep(0, 1.0)
    data = messages.encode(first) + messages.encode(control.Ready()) + messages.encode(step)
    send_with_fds(theirs, data, [memory.fd])
    child = start_child([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    handle = MonitorHandle(child, Channel(ours, messages), layout, [0])
    try:
        handle.wait_ready(20.0)
        assert handle.receive() == [first, step]
        assert handle.receive() == []
    finally:
        handle.close()
        child.stdin.close()
        theirs.close()
        memory.close()


def test_a_link_that_is_closed_during_the_handshake_takes_nothing(socket_folder):
    """A session that comes after `close` is refused by the rank, and its descriptors are closed."""
    path = str(socket_folder / "m.sock")
    taken, problems = [], []
    link = RankLink(
        path,
        make_hello=lambda: (rank_messages.Hello(rank=0, pid=os.getpid()), []),
        take=lambda *given: taken.append(given),
        on_lost=lambda: False,
        on_restored=lambda: None,
    )

    def open_link():
        try:
            link.open(20.0)
        except LinkError as exc:
            problems.append(str(exc))

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        thread = threading.Thread(target=open_link)
        thread.start()
        peer, _ = listener.accept()
        with peer:
            receive_message(peer, rank_messages.RANK_MESSAGES, 20.0)
            link.close()
            read_fd, write_fd = os.pipe()
            accepted = rank_messages.Accepted(1, {}, [])
            data = rank_messages.RANK_MESSAGES.encode(accepted)
            send_with_fds(peer, data, [write_fd, write_fd])
            os.close(write_fd)
            thread.join(20.0)
    assert (taken, problems) == ([], ["the link was closed while it was being made"])
    assert os.read(read_fd, 1) == b"", "no copy of the writing end is open any more"
    os.close(read_fd)


def free_number(pid, count):
    """Return the lowest number below which a process has `count` unused descriptors."""
    used = {int(name) for name in os.listdir(f"/proc/{pid}/fd")}
    number = free = 0
    while free < count:
        free += number not in used
        number += 1
    return number


@pytest.mark.parametrize("left", [1, 2, 3, 5])
def test_a_monitor_without_descriptors_watches_the_rank_once_it_has_some(node, left):
    """A session is either watched or refused, however few descriptors the monitor has left."""
    it = node(rank_section_timeouts={"step": 0.5})
    pid = it.monitor.child.pid
    limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (free_number(pid, left), limits[1]))
    rank = it.rank()
    rank.order("init")
    # The rank tries for some seconds; the monitor gets room in the middle of that.
    select.select([rank.process.stdout], [], [], 1.5)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
    assert rank.answer() == "ok"
    rank.order("open step")
    assert it.hang()["pid"] == rank.pid


def test_a_rank_takes_its_state_into_a_new_monitors_slot(node):
    """Without memfd the slot is a file; a new monitor makes its own, and open sections move."""
    limits = {"outer": 10.0, "inner": 60.0}
    it = node(env={"NVRX_FORCE_NO_MEMFD": "1"}, rank_section_timeouts=limits)
    assert not [name for name in os.listdir(it.run_dir.path) if "slot" in name]
    rank = it.rank()
    rank.do("init", "iteration 7", "beat", "open outer")
    it.expect(control.RankJoined)
    slot = os.fstat(it.monitor._memories[0].fd)
    os.kill(it.monitor.child.pid, signal.SIGKILL)
    it.monitor.child.wait(60.0)
    it.monitor.close()
    it.messages.clear()
    it.start_monitor()
    it.expect(control.RankJoined)
    assert os.fstat(it.monitor._memories[0].fd).st_ino != slot.st_ino
    it.expect(control.FirstStep)
    view = read_slot(it.monitor.slots[0], it.monitor.layout)
    assert (set(view.open_sections), view.iteration, view.heartbeat_count) == ({"outer"}, 7, 1)
    rank.do("open inner", "close inner")
    report = it.hang()
    assert (report["section"], report["limit"], report["iteration"]) == ("outer", 10.0, 7)


SERVE = """
import gc, os, signal, sys
from nvidia_resiliency_ext.fault_tolerance import FaultToleranceConfig, RankMonitorServer
from nvidia_resiliency_ext.fault_tolerance.rank_monitor_server import RankMonitorLogger
mine = lambda *_: os.write(1, b"mine\\n")  # print is not reentrant
for sig in (signal.SIGCHLD, signal.SIGUSR1):
    signal.signal(sig, mine)
class Ready:
    def set(self):
        print("ready", flush=True)
before = len(os.listdir("/proc/self/fd"))
RankMonitorServer(
    FaultToleranceConfig(), sys.argv[1], Ready(), RankMonitorLogger(), False
).serve()
gc.collect()  # the mapping of the slot goes with its last reader
print("served", len(os.listdir("/proc/self/fd")) - before, signal.set_wakeup_fd(-1), flush=True)
signal.raise_signal(signal.SIGUSR1)
"""


def test_serving_in_a_main_thread_lends_and_gives_back(socket_folder):
    """Others' signals do not make the loop spin; handlers and descriptors come back."""
    program = subprocess.Popen(
        [sys.executable, "-c", SERVE, str(socket_folder / "m.sock")],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert program.stdout.readline() == "ready\n"
        os.kill(program.pid, signal.SIGCHLD)
        assert program.stdout.readline() == "mine\n"

        def cpu_s():
            fields = Path(f"/proc/{program.pid}/stat").read_text().rsplit(")", 1)[1].split()
            return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

        before = cpu_s()
        select.select([program.stdout], [], [], 1.0)
        assert cpu_s() - before < 0.15
        os.kill(program.pid, signal.SIGUSR1)
        assert program.stdout.readline() == "served 0 -1\n"
        assert program.stdout.readline() == "mine\n"
        assert program.wait(20.0) == 0
    finally:
        program.kill()
        program.wait()
        program.stdout.close()


FORK = """
import os, sys
from nvidia_resiliency_ext.fault_tolerance import FaultToleranceConfig, RankMonitorServer
process = RankMonitorServer.run_in_subprocess(FaultToleranceConfig(), sys.argv[1])
pid = os.fork()
if pid == 0:
    sys.exit(0)
os.waitpid(pid, 0)
process.join(1.0)
print(process.is_alive())
"""


def test_the_end_of_a_forked_child_does_not_end_the_parents_monitor(socket_folder):
    """A monitor belongs to the process that started it, not to that process's forks."""
    result = subprocess.run(
        [sys.executable, "-c", FORK, str(socket_folder / "m.sock")],
        capture_output=True,
        text=True,
        timeout=150,
        check=True,
    )
    assert result.stdout == "True\n"


def test_a_monitor_that_leaves_unasked_keeps_the_run_directory(node):
    """The next monitor listens in the same directory, and the ranks go on with it."""
    it = node(rank_section_timeouts={"step": 60.0})
    rank = it.rank()
    rank.do("init")
    it.monitor._channel.sock.send(b"\xff\xff\xff\xff")
    assert it.monitor.child.wait(60.0).code == 0
    it.monitor.close()
    it.messages.clear()
    it.start_monitor()
    it.expect(control.RankJoined)
    rank.do("open step", "close step")
    it.expect(control.FirstStep)


def test_an_ordinary_end_sweeps_also_when_orphans_are_kept(node):
    """`orphan_workers=keep` is about a dead launcher: `Leave` ends what is left over."""
    it = node(orphan_workers="keep")
    rank = it.rank()
    rank.do("init")
    assert it.monitor.leave(60.0)
    assert rank.wait_dead() == -signal.SIGKILL


def test_a_report_tells_the_culprit_from_its_victims(node):
    """When all ranks exceed one limit, state and beginning say which of them hung."""
    it = node(2, rank_section_timeouts={"step": 1.0})
    culprit, victim = it.rank(0), it.rank(1)
    for rank in (culprit, victim):
        rank.do("init")
    with it.unjudged():
        culprit.do("open step")
        os.kill(culprit.pid, signal.SIGSTOP)
        victim.do("open step")
        before = time.monotonic()
    reports = {report["rank"]: report for report in (it.hang(), it.hang())}
    assert reports[0]["state"] == "T"
    assert reports[1]["state"] in "SRD"
    assert before - 10.0 < reports[0]["since"] < reports[1]["since"] < before


def test_one_rank_of_a_node_writes_the_lines_of_layered_restarts(node, caplog):
    """The first local rank's sessions appear in the launcher's log, its neighbours' do not."""
    caplog.set_level(logging.INFO, logger="nvrx")
    it = node(2, order={"is_restarter_logger": True})
    for _ in range(2):
        ranks = it.rank(0), it.rank(1)
        for rank in ranks:
            rank.do("init", "beat")
            it.expect(control.FirstStep)
        for rank in ranks:
            rank.do("shutdown")
            it.expect(control.RankLeft)
    assert it.monitor.leave(60.0)
    lines = [r.getMessage() for r in caplog.records if "[NestedRestarter]" in r.getMessage()]
    start = "[NestedRestarter] name=[InJob] state="
    assert [line.removeprefix(start) for line in lines] == [
        "initialize",
        "handling stage=starting",
        "handling stage=completed",
        "handling stage=starting",
        "aborted",
    ]


LAUNCHED = """
import os, sys, time
from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient
client = RankMonitorClient()
client.init_workload_monitoring()
client.start_section("step")
client.end_section("step")
if os.environ["NVRX_CYCLE"] == "0":
    if os.environ["RANK"] == "1":
        while not os.path.exists(os.environ["RANK_0_WORKS"]):
            time.sleep(0.01)
        client.start_section("step")
    else:
        open(os.environ["RANK_0_WORKS"], "w").close()
    os.write(1, f"run {os.environ['NVRX_RUN_ID']}\\n".encode())  # in one piece, also with -u
    time.sleep(600)
client.shutdown_workload_monitoring()
"""


@pytest.mark.parametrize("environment", [{}, {"NVRX_FORCE_NO_MEMFD": "1"}], ids=["memfd", "file"])
def test_a_monitor_for_each_rank_under_the_launcher(tmp_path, clean_environment, environment):
    """With one monitor per rank a hang is found, the job restarts, and nothing is left."""
    script = tmp_path / "train.py"
    script.write_text(LAUNCHED)
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    words = ["--nproc-per-node=2", "--max-restarts=1", "--ft-monitor-mode=per-rank"]
    words += ["--ft-rank-section-timeouts=step:1.0", "--ft-rank-out-of-section-timeout=60"]
    result = subprocess.run(
        [sys.executable, "-m", "nvidia_resiliency_ext.fault_tolerance.launcher", *words, script],
        env={
            **os.environ,
            **environment,
            "TMPDIR": str(temporary),
            "OMP_NUM_THREADS": "1",
            "RANK_0_WORKS": str(tmp_path / "rank_0_works"),
            "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "torch"),
        },
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    log = result.stderr
    assert result.returncode == 0, log
    assert re.search(r"in section 'step' for \d+\.", log)
    assert "restarting because rank 1" in log
    places = [
        log.index(f"name=[InJob] {line}")
        for line in (
            "state=initialize",
            "state=handling stage=starting",
            "state=handling stage=completed",
        )
    ]
    assert places == sorted(places)
    assert log.count("name=[InJob] state=initialize") == 1, "one monitor speaks for the node"
    run_ids = {line.split()[-1] for line in result.stdout.splitlines() if "run " in line}
    assert len(run_ids) == 1
    assert procfs.processes_with_environ("NVRX_RUN_ID", run_ids.pop()) == []
    assert list(temporary.iterdir()) == []


def test_limits_of_a_month_do_not_end_the_monitor(node):
    """Limits beyond what the kernel can wait for at once are taken, and the rank is watched."""
    far = 3e6
    it = node(
        workload_check_interval=far,
        rank_heartbeat_timeout=far,
        initial_rank_heartbeat_timeout=far,
        rank_section_timeouts={},
    )
    rank = it.rank()
    rank.do("init", "beat")
    it.expect(control.FirstStep)
    rank.close()
    it.expect(control.RankLeft)


def test_a_monitor_answers_a_change_of_cycle(node):
    """The launcher's word about a cycle is answered: a sign of life."""
    it = node()
    it.monitor.send(control.CycleChanged(7))
    assert it.expect(control.CycleChanged) == control.CycleChanged(7)


def test_refusals_are_logged_a_few_times_and_then_counted(caplog):
    """Of many refusals in a minute five are logged, and the number of the others afterwards."""
    refusals = RefusalLog("the socket of local rank 2")
    assert refusals.next_check is None
    for number in range(100):
        refusals.record(10.0 + number * 0.1, f"refused {number}")
    assert [r.getMessage() for r in caplog.records] == [f"refused {n}" for n in range(5)]
    assert refusals.next_check == 70.0
    refusals.check(69.9)
    refusals.check(70.0)
    assert caplog.records[-1].getMessage() == "95 more refusals at the socket of local rank 2"
    refusals.record(75.0, "again")
    refusals.check(140.0)
    assert caplog.records[-1].getMessage() == "again"


def test_a_port_does_not_log_every_refusal(node, caplog):
    """Who asks for a taken session over and over leaves five lines, and the rest as a number."""
    it = node(rank_section_timeouts={"step": 60.0})
    it.rank().do("init")
    hello = rank_messages.Hello(rank=0, pid=os.getpid())
    for _ in range(20):
        with it.connect() as sock:
            send_message(sock, rank_messages.RANK_MESSAGES, hello, 20.0)
            answer = receive_message(sock, rank_messages.RANK_MESSAGES, 20.0)
            assert isinstance(answer, rank_messages.Refused)
    it.monitor.leave(20.0)
    lines = [r.getMessage() for r in caplog.records if r.name == "nvrx"]
    assert sum("was refused" in line for line in lines) == 5
    assert sum(line.startswith("15 more refusals") for line in lines) == 1
