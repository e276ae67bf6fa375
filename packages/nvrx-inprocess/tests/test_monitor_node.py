# SPDX-License-Identifier: Apache-2.0
"""The monitor's process with real ranks, a real store and real signals."""

import contextlib
import os
import queue
import signal
import stat
import struct
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
from fork_server import ForkServer
from monitor_lab import Lab, environ_of_monitor, open_files, wait_gone, with_torch
from torch.distributed import TCPStore

from nvidia_resiliency_ext.inprocess._monitor import messages, store_threads
from nvidia_resiliency_ext.inprocess._monitor.messages import MonitorSettings
from nvidia_resiliency_ext.inprocess._monitor.start import NodeDirectory
from nvidia_resiliency_ext.inprocess._monitor.store_threads import StoreWorker
from nvidia_resiliency_ext.inprocess._protocol.iteration_store import IterationStore
from nvidia_resiliency_ext.shared_utils import procfs
from nvidia_resiliency_ext.shared_utils.wire import receive_message, send_message, send_with_fds

pytestmark = pytest.mark.slow

PROGRAMS = Path(__file__).parent / "programs"
# A user's store factory, whose module notes when another thread imports at the same time.
MEETING = """
import contextlib
import threading

both = threading.Barrier(2)
together = []


def meet():
    with contextlib.suppress(threading.BrokenBarrierError):
        both.wait(0.2)
        together.append(True)
"""
FACTORY = """
import meeting
from torch.distributed import HashStore as make

meeting.meet()
"""
FAST = {
    "interval_s": 0.02,
    "heartbeat_interval_s": 0.1,
    "heartbeat_timeout_s": 2.0,
    "termination_grace_s": 0.2,
}


@pytest.fixture(scope="module")
def light_server():
    """Run the ranks in processes that have imported what they need, which is not torch."""
    server = ForkServer(["monitor_modules"])
    yield server
    server.close()


@pytest.fixture(scope="module")
def port():
    """Host a store for all calls of this module."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield store.port
    del store


@pytest.fixture
def make(light_server, port, tmp_path):
    """Return what makes a lab; it is cleaned up, and leaves nothing behind."""
    labs = []

    def make_lab(world, port=port, **settings):
        labs.append(Lab(light_server, port, world, tmp_path, **settings))
        return labs[-1]

    yield make_lab
    for lab in labs:
        lab.end_ranks()
    for lab in labs:
        lab.close()


@pytest.fixture
def host(fork_server):
    """Start a store in a process of its own; return it with its port."""
    with fork_server.running(PROGRAMS / "store_host.py") as process:
        yield process, int(process.output.readline())


def iteration_store(lab) -> IterationStore:
    """Return an iteration store of the lab's call."""
    store = TCPStore("127.0.0.1", lab.port, is_master=False, timeout=timedelta(seconds=20))
    return IterationStore(store, lab.prefix)


def test_exception_restarts_all_ranks(make) -> None:
    """One rank's report interrupts all, all go on together, complete and leave."""
    lab = make(2)
    ranks = lab.up()
    ranks[1].do("report", "EXCEPTION")
    for rank in ranks:
        assert rank.expect("Interrupted", 0) == ["Interrupted", 0, [[1, "EXCEPTION"]]]
        rank.do("arrive")
    for rank in ranks:
        assert rank.expect("Decided", 0) == ["Decided", 0, [0, 1], [], [[1, "EXCEPTION"]]]
    lab.begin(1)
    lab.finish(1, [0, 1])


def test_killed_rank_is_terminated_and_the_rest_goes_on(make) -> None:
    """SIGKILL of a rank, also of the one that started the monitor, is one lost rank."""
    lab = make(3)
    first, *rest = lab.up()
    first.kill()
    for rank in rest:
        assert rank.expect("Interrupted", 0)[2] == [[0, "TERMINATED"]]
        rank.do("arrive")
    for rank in rest:
        assert rank.expect("Decided", 0)[2:4] == [[1, 2], [0]]
    lab.begin(1, [1, 2])
    lab.finish(1, [1, 2])


def test_stopped_rank_times_out_and_is_killed(make) -> None:
    """SIGSTOP: soft timeout, hard timeout, and the process is ended although it is stopped."""
    lab = make(2, **FAST, soft_timeout_s=2.0, hard_timeout_s=4.0, barrier_timeout_s=20.0)
    ranks = lab.up()
    wait_for_nodes(lab, {0, 1})
    ranks[1].kill(signal.SIGSTOP)
    assert ranks[0].expect("Interrupted", 0)[2] == [[1, "SOFT_TIMEOUT"]]
    ranks[0].do("arrive")
    assert ranks[1].wait() in {-signal.SIGTERM, -signal.SIGKILL}
    made = ranks[0].expect("Decided", 0)
    assert made[2:4] == [[0], [1]]
    assert [1, "HARD_TIMEOUT"] in made[4]


def test_silent_ping_is_a_hang(make) -> None:
    """Who has pinged once must go on, even if its main thread runs."""
    lab = make(2, **FAST, soft_timeout_s=2.0, hard_timeout_s=30.0, barrier_timeout_s=60.0)
    ranks = lab.up()
    ranks[0].do("ping")
    assert ranks[1].expect("Interrupted", 0)[2] == [[0, "SOFT_TIMEOUT"]]


def test_killed_monitor_is_replaced_and_nobody_is_interrupted(make) -> None:
    """After SIGKILL of the monitor the ranks have another one, and the call goes on."""
    lab = make(2)
    ranks = lab.up()
    ranks[0].do("completed")
    old = lab.monitor_pid(0)
    os.kill(old, signal.SIGKILL)
    assert wait_gone(old, 5.0)
    new = old
    deadline = time.monotonic() + 20.0
    while new == old and time.monotonic() < deadline:
        new = lab.monitor_pid(0)
    assert new != old
    # What had been said before is known to the new one: rank 0 need not complete again.
    ranks[1].do("completed")
    for rank in ranks:
        rank.expect("Completed", 0)
    assert not [line for rank in ranks for line in rank.received if line[0] == "Interrupted"]


def test_stopped_monitor_is_replaced_and_nobody_is_interrupted(make) -> None:
    """A monitor that is stopped in the middle of a call is ended by its ranks, and replaced."""
    lab = make(2, heartbeat_interval_s=0.2, heartbeat_timeout_s=3.0)
    ranks = lab.up()
    old = lab.monitor_pid(0)
    os.kill(old, signal.SIGSTOP)
    for rank in ranks:
        # What is said to a stopped monitor is said to its successor.
        rank.do("completed")
    for rank in ranks:
        rank.expect("Completed", 0)
    assert {lab.monitor_pid(0), lab.monitor_pid(1)}.isdisjoint({old})
    assert wait_gone(old, 5.0)
    assert not [line for rank in ranks for line in rank.received if line[0] == "Interrupted"]


def test_monitor_stopped_before_the_call_is_named(make) -> None:
    """A rank that comes to a stopped monitor gets an error in time, which names what to end."""
    lab = make(2, heartbeat_timeout_s=90.0)  # rank 0 does not end it before rank 1 gives up
    lab.start(0, 1)
    (pid,) = lab.attach(0)
    os.kill(pid, signal.SIGSTOP)
    try:
        lab.ranks[1].do("attach")
        _, name, text = lab.ranks[1].expect("error")
    finally:
        os.kill(pid, signal.SIGCONT)
    assert name == "InternalError"
    assert "/monitor.sock: " in text
    assert "end the process that listens there" in text


def test_monitor_killed_with_a_rank(make) -> None:
    """The new monitor finds out that a rank died with the old one."""
    lab = make(3)
    ranks = lab.up()
    wait_for_nodes(lab, {0, 1, 2})
    ranks[2].kill()
    os.kill(lab.monitor_pid(0), signal.SIGKILL)
    for rank in ranks[:2]:
        assert rank.expect("Interrupted", 0)[2] == [[2, "TERMINATED"]]
        rank.do("arrive")
    for rank in ranks[:2]:
        assert rank.expect("Decided", 0)[2:4] == [[0, 1], [2]]
    lab.begin(1, [0, 1])
    lab.finish(1, [0, 1])


def wait_for_nodes(lab, ranks) -> None:
    """Wait until the ranks stand in the registry of the call."""
    there = iteration_store(lab)
    deadline = time.monotonic() + 20.0
    known: set[int] = set()
    while known != ranks and time.monotonic() < deadline:
        threading.Event().wait(0.02)  # a test's look: the registry has no event
        known = {rank for node in there.nodes() for rank in node.ranks}
    assert known == ranks


def test_lost_node_is_seen_by_its_neighbour(make) -> None:
    """Monitor and ranks of one node killed together: the others go on without them."""
    lab = make(3, **FAST)
    lab.start(0, 1, node="a")
    lab.start(2, node="b")
    pids = lab.attach(0, 1, 2)
    assert pids[0] == pids[1] != pids[2]
    lab.begin(0)
    wait_for_nodes(lab, {0, 1, 2})
    os.kill(pids[2], signal.SIGKILL)
    lab.ranks[2].kill()
    killed = time.monotonic()
    for rank in (0, 1):
        assert lab.ranks[rank].expect("Interrupted", 0)[2] == [[2, "UNRESPONSIVE"]]
        lab.ranks[rank].do("arrive")
    for rank in (0, 1):
        assert lab.ranks[rank].expect("Decided", 0)[2:4] == [[0, 1], [2]]
    assert time.monotonic() - killed < FAST["heartbeat_timeout_s"] + 20.0
    lab.begin(1, [0, 1])
    lab.finish(1, [0, 1])


def test_time_counts_from_the_start_of_the_iteration(make) -> None:
    """Who is stuck from the start is found at the soft timeout, not an interval later."""
    lab = make(1, **{**FAST, "interval_s": 20.0}, soft_timeout_s=2.2, hard_timeout_s=60.0)
    lab.start(0)
    lab.attach(0)
    lab.ranks[0].do("freeze")
    lab.ranks[0].expect("frozen")
    wait_for_nodes(lab, {0})  # by then it has been looked at
    began = time.monotonic()
    lab.begin(0)
    assert lab.ranks[0].expect("Interrupted", 0)[2] == [[0, "SOFT_TIMEOUT"]]
    assert 2.1 < time.monotonic() - began < 15.0


def test_nothing_polls(make) -> None:
    """However long the intervals are, a fault is known to all ranks at once."""
    slow = {"interval_s": 20.0, "heartbeat_interval_s": 20.0, "heartbeat_timeout_s": 60.0}
    lab = make(4, last_call_wait_s=0.0, **slow)
    ranks = lab.up()
    ranks[3].do("report", "EXCEPTION")
    for rank in ranks:
        rank.expect("Interrupted", 0, limit_s=15.0)


def test_last_call_ends_when_all_have_reported(make) -> None:
    """Nobody waits for reports of ranks that have all reported, or ended."""
    lab = make(4, **{**FAST, "last_call_wait_s": 30.0})
    ranks = lab.up()
    began = time.monotonic()
    ranks[3].kill()
    ranks[2].do("leave", True)
    for rank in ranks[:2]:
        rank.do("report", "EXCEPTION")
    for rank in ranks[:2]:
        assert len(rank.expect("Interrupted", 0)[2]) == 4
    assert time.monotonic() - began < 20.0


def test_rank_that_never_came_is_not_waited_for(make) -> None:
    """A rank that ended after all had met and before its monitor knew it is lost in time."""
    lab = make(2, **FAST)
    lab.start(0)
    lab.attach(0)
    lab.ranks[0].do("begin", 0, 0, 2, [0, 1])
    assert lab.ranks[0].expect("Interrupted", 0)[2] == [[1, "UNRESPONSIVE"]]
    lab.ranks[0].do("arrive")
    assert lab.ranks[0].expect("Decided", 0)[2] == [0]


def test_monitor_that_dies_while_a_rank_comes(make) -> None:
    """A rank that has come to a monitor which then ends is served by the next one."""
    lab = make(2, **FAST)
    lab.start(0, 1)
    [dying] = lab.attach(0)
    lab.ranks[1].do("monitor")
    lab.ranks[1].expect("monitor")  # it has imported all, and comes at once
    os.kill(dying, signal.SIGSTOP)
    lab.ranks[1].do("attach")
    deadline = time.monotonic() + 20.0
    while not any(name.startswith("socket:") for name in open_files(lab.ranks[1].pid)):
        assert time.monotonic() < deadline
        threading.Event().wait(0.01)  # a test's look: another process's connection has no event
    with contextlib.suppress(ProcessLookupError):  # rank 0 may have ended it
        os.kill(dying, signal.SIGKILL)
    assert lab.ranks[1].expect("attached")[1] != dying


def test_threads_import_for_their_stores_in_turn(tmp_path: Path, monkeypatch) -> None:
    """Two threads that import torch at once are a deadlock to Python, which loses the store."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "meeting.py").write_text(MEETING)
    factories = ("one_store", "other_store")
    for name in factories:
        (tmp_path / f"{name}.py").write_text(FACTORY)
    opened = []

    def open_store(name: str) -> None:
        settings = SimpleNamespace(
            store_factory=f"{name}:make", store_file="", store_kwargs="{}", prefix=""
        )
        opened.append(store_threads.open_iteration_store(settings))

    threads = [threading.Thread(target=open_store, args=(name,)) for name in factories]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20.0)
    meeting = sys.modules["meeting"]
    for name in ("meeting", *factories):
        del sys.modules[name]
    assert (len(opened), meeting.together) == (2, [])


@pytest.mark.parametrize("is_with_torch", [False, True])
def test_torch_is_imported_where_it_is_needed(make, port, is_with_torch) -> None:
    """Only for a store that the user's own factory makes; the wrapper's own needs none."""
    lab = make(2, **(with_torch(port) if is_with_torch else {}), **FAST)
    lab.up()
    lab.ranks[0].do("report", "EXCEPTION")
    for rank in (0, 1):
        assert lab.ranks[rank].expect("Interrupted", 0)[2] == [[0, "EXCEPTION"]]
    assert procfs.maps_name(lab.monitor_pid(0), "libtorch") is is_with_torch


def test_two_that_come_at_once_have_one_monitor(make) -> None:
    """However many ranks come at once, one monitor is started."""
    lab = make(4)
    lab.start(0, 1, 2, 3, options=["prestart"])
    for rank in lab.all:
        rank.expect("started")
    assert len(set(lab.attach(0, 1, 2, 3))) == 1


def test_next_call_has_the_same_monitor(make) -> None:
    """The monitor stays between calls of a process, and serves a call of other ranks beside it."""
    lab = make(1)
    [rank] = lab.up()
    pid = lab.monitor_pid(0)
    lab.finish(0, [0])
    other = make(1)
    other.environ = lab.environ
    other.up()
    assert other.monitor_pid(0) == pid
    assert rank.is_running()


def test_lost_leaver_is_missed_and_discarded_one_is_not(make) -> None:
    """Leaving is acknowledged at once, interrupts the others, and discarding does not."""
    lab = make(3)
    ranks = lab.up()
    ranks[0].do("leave", True)
    assert ranks[0].expect("left") == ["left", True]
    for rank in ranks[1:]:
        assert rank.expect("Interrupted", 0)[2] == [[0, "BASE_EXCEPTION"]]
        rank.do("arrive")
    for rank in ranks[1:]:
        assert rank.expect("Decided", 0)[2:4] == [[1, 2], [0]]
    lab.begin(1, [1])
    ranks[2].do("leave", True, True)
    assert ranks[2].expect("left") == ["left", True]
    lab.finish(1, [1])
    assert not [line for line in ranks[1].received if line[:2] == ["Interrupted", 1]]


def test_lost_store_is_reported(make, host) -> None:
    """When the store's host dies, every rank receives the loss."""
    process, port = host
    lab = make(2, port=port, **FAST)
    ranks = lab.up()
    wait_for_nodes(lab, {0, 1})
    process.kill()
    for rank in ranks:
        assert rank.expect("StoreLost")[2]


def test_operations_of_a_lost_store_are_not_waited_for(make, host, monkeypatch, caplog) -> None:
    """What waits for a store that is lost will not be done: it keeps no monitor, no connection."""
    caplog.set_level("DEBUG", "nvrx")  # a handler keeps the records, and not what they tell of
    process, port = host
    posted: queue.SimpleQueue = queue.SimpleQueue()
    lost: list[str] = []
    store_worker = StoreWorker(
        MonitorSettings(**make(1, port=port, **FAST).settings), posted.put, lost.append
    )
    store_worker.submit(lambda iteration_store: iteration_store.nodes())
    posted.get(timeout=60)()
    assert store_worker.pending == 0
    monkeypatch.setattr(store_threads, "_CONNECT_LIMIT", timedelta(seconds=0.2))
    process.kill()
    for _ in range(3):
        store_worker.submit(lambda iteration_store: iteration_store.nodes())
    while not lost:
        posted.get(timeout=60)()
    assert store_worker.pending == 0


def test_store_that_hangs_holds_up_no_timeout(make, host) -> None:
    """While the store is stopped a stuck rank is killed, leaving is quick, the loss reported."""
    process, port = host
    # The loss comes last: until then the store only hangs.
    fast = {**FAST, "heartbeat_timeout_s": 12.0}
    lab = make(3, port=port, **fast, soft_timeout_s=2.0, hard_timeout_s=4.0, barrier_timeout_s=20.0)
    ranks = lab.up()
    wait_for_nodes(lab, {0, 1, 2})
    os.kill(process.pid, signal.SIGSTOP)
    ranks[1].kill(signal.SIGSTOP)
    assert ranks[1].wait() in {-signal.SIGTERM, -signal.SIGKILL}
    ranks[2].do("leave", True)
    assert ranks[2].expect("left") == ["left", True], "the monitor did not take note within 5 s"
    text = ranks[0].expect("StoreLost")[2]
    assert f"the store at 127.0.0.1:{port}: it has not answered for 12 s (heartbeat_timeout" in text


def test_hostile_clients(make) -> None:
    """The monitor refuses garbage, half frames, floods, silent clients and liars, and serves on."""
    lab = make(2, **FAST)
    lab.start(0)
    lab.attach(0)
    place = NodeDirectory.find(lab.environ)
    socks = [place.connect() for _ in range(80)]
    socks[-1].sendall(b"\xff" * 100)
    socks[-2].sendall(struct.pack(">I", 50) + b"half")
    socks[-3].sendall(struct.pack(">I", 4) + b"null")
    hello = messages.Hello(1, MonitorSettings(**lab.settings), 0, 2, None)
    send_message(socks[-4], messages.FROM_RANK, hello, 1.0)  # without a page
    fd = os.memfd_create("short")
    data = messages.FROM_RANK.encode(hello)
    send_with_fds(socks[-5], data, [fd], 1.0)
    os.ftruncate(fd, 4096)
    send_with_fds(socks[-6], data, [fd], 1.0)
    os.close(fd)
    answers = [receive_message(socks[at], messages.TO_RANK, 10.0) for at in (-4, -5, -6)]
    assert all(isinstance(answer, messages.Refused) for answer in answers)
    flood = place.connect()
    flood.settimeout(10.0)
    with pytest.raises(ConnectionError):
        _flood(flood, data)
    lab.start(1)
    lab.attach(1)
    lab.begin(0)
    lab.finish(0, [0, 1])
    for sock in [*socks, flood]:
        sock.close()
    # It would wait for the end of this very process, which has come to it.
    for pid in lab.monitors:
        os.kill(pid, signal.SIGKILL)


def _flood(sock, data) -> None:
    while True:
        sock.sendall(data * 100)


def test_another_process_cannot_take_a_rank(make) -> None:
    """A second process with the same initial rank is refused, and the first keeps its place."""
    lab = make(2)
    lab.up()
    [impostor] = lab.start(0)
    impostor.do("attach")
    kind, name, text = impostor.expect("error")
    assert (kind, name) == ("error", "InternalError")
    assert "RANK=0 belongs to process" in text


@pytest.mark.parametrize(
    "environ",
    [
        {"NVRX_FORCE_NO_PIDFD": "1"},
        {"NVRX_FORCE_NO_MEMFD": "1"},
        {"TMPDIR": "/sys", "XDG_RUNTIME_DIR": "/proc/nothing"},
    ],
    ids=["no-pidfd", "no-memfd", "read-only-places"],
)
def test_narrow_hosts(make, environ) -> None:
    """Without pidfds, memfds or a usable TMPDIR a dead rank is seen all the same."""
    lab = make(2, **FAST)
    first, second = lab.up(environ=environ)
    second.kill()
    assert first.expect("Interrupted", 0)[2] == [[1, "TERMINATED"]]


def test_files_are_private_and_go(make, tmp_path) -> None:
    """Log and pid files are 0600, follow no link, say what they must, and the pid file goes."""
    target = tmp_path / "precious"
    target.write_text("precious")
    (tmp_path / "log.1").symlink_to(target)
    (tmp_path / "pid.1").symlink_to(target)
    (tmp_path / "log.0").write_text("old")
    lab = make(2, log_file=str(tmp_path / "log.{rank}"), pid_file=str(tmp_path / "pid.{rank}"))
    lab.up()
    log, pid = tmp_path / "log.0", tmp_path / "pid.0"
    assert int(pid.read_text()) == lab.monitor_pid(0)
    for path in (log, pid):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    text = log.read_text()
    assert "old" not in text
    assert f"target_pid={lab.ranks[0].pid}" in text
    assert "monitor_process" in text
    assert target.read_text() == "precious"
    lab.finish(0, [0, 1])
    lab.close()
    assert not pid.exists()
    assert "is over" in log.read_text()


def test_it_inherits_nothing(make, tmp_path) -> None:
    """The monitor is nobody's child, in `/`, with its own session and none of a rank's files."""
    lab = make(1)
    with (tmp_path / "open").open("w") as file:
        os.set_inheritable(file.fileno(), True)
        [rank] = lab.start(0)
    lab.attach(0)
    pid = lab.monitor_pid(0)
    found = procfs.read_stat(pid)
    assert found.ppid not in {os.getpid(), rank.pid}
    assert found.sid != procfs.read_stat(rank.pid).sid
    assert os.readlink(f"/proc/{pid}/cwd") == "/"
    status = Path(f"/proc/{pid}/status").read_text()
    assert "Umask:\t0077" in status
    own = {"/dev/null", str(tmp_path / "monitor-0.log")}

    def holds_only_its_own():
        # It may be importing, looking at a process or writing in the node's directory just now.
        files = {name for name in open_files(pid) if name.startswith("/") and "memfd:" not in name}
        return {name for name in files if "/nvrx-ip-" not in name} <= own

    deadline = time.monotonic() + 20.0
    while not holds_only_its_own():
        assert time.monotonic() < deadline, open_files(pid)
    assert not os.path.exists(f"/proc/{rank.pid}/task/{rank.pid}/children") or not (
        Path(f"/proc/{rank.pid}/task/{rank.pid}/children").read_text().split()
    )


def test_nothing_is_left(make) -> None:
    """When the ranks have ended the monitor ends, and its directory is gone."""
    lab = make(2)
    ranks = lab.up()
    place = NodeDirectory.find(lab.environ)
    assert environ_of_monitor(lab.monitor_pid(0))["fds"] <= 24
    for rank in ranks:
        rank.kill()
        rank.wait()
    lab.close()
    assert not os.path.exists(place.path)


def test_removed_directory_is_not_made_again(make) -> None:
    """A monitor whose directory somebody removed serves on, and leaves none behind."""
    lab = make(2)
    lab.up()
    place = NodeDirectory.find(lab.environ)
    with place.locked(5.0):
        place.remove()
    lab.finish(0, [0, 1])
    lab.close()
    assert not os.path.exists(place.path)


def test_unfit_directory_keeps_no_monitor(make) -> None:
    """A monitor whose directory was opened to everybody ends with its ranks, and leaves it."""
    lab = make(1)
    lab.up()
    place = NodeDirectory.find(lab.environ)
    os.chmod(place.path, 0o777)
    lab.finish(0, [0])
    lab.close()
    assert os.path.exists(place.path)


def test_socket_of_another_user_is_refused(make, monkeypatch, socket_folder) -> None:
    """A rank does not talk to a socket that another user owns."""
    from nvidia_resiliency_ext.inprocess._monitor import start
    from nvidia_resiliency_ext.inprocess.exception import InternalError
    from nvidia_resiliency_ext.shared_utils.clock import Deadline

    if os.geteuid() != 0:
        pytest.skip("only root can be two users")
    place = NodeDirectory(str(socket_folder / "p"))
    with place.locked(1.0), place.listen():
        monkeypatch.setattr(NodeDirectory, "find", lambda _: place)
        monkeypatch.setattr("os.geteuid", lambda: 12345)
        with pytest.raises(InternalError, match="not ours"):
            start.connect_or_start(Deadline.after(1.0), {})
        monkeypatch.undo()
