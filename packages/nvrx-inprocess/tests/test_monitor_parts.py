# SPDX-License-Identifier: Apache-2.0
"""The monitor's smaller parts: page, names, messages, node directory, files, traffic."""

import errno
import fcntl
import itertools
import os
import pathlib
import random
import socket
import stat
import sys
import threading
import time
import tracemalloc
from datetime import timedelta
from types import SimpleNamespace

import psutil
import pytest

from nvidia_resiliency_ext.inprocess import monitor_process, sibling_monitor
from nvidia_resiliency_ext.inprocess._monitor import messages, program, serving, store_threads
from nvidia_resiliency_ext.inprocess._monitor import page as page_module
from nvidia_resiliency_ext.inprocess._monitor import start as start_module
from nvidia_resiliency_ext.inprocess._monitor.messages import MonitorSettings
from nvidia_resiliency_ext.inprocess._monitor.page import PageError, PageView, Phase, ProgressPage
from nvidia_resiliency_ext.inprocess._monitor.start import NodeDirectory
from nvidia_resiliency_ext.inprocess._monitor.store_threads import Registration
from nvidia_resiliency_ext.inprocess._protocol.decision import Decision, NodeEntry, encode_decision
from nvidia_resiliency_ext.inprocess.attribution import Interruption
from nvidia_resiliency_ext.shared_utils.children import start_child
from nvidia_resiliency_ext.shared_utils.clock import ManualClock
from nvidia_resiliency_ext.shared_utils.errors import DeadlineExceededError, UnsafePathError
from nvidia_resiliency_ext.shared_utils.unix_sockets import Channel

# --- page ---


@pytest.fixture(params=["memfd", "file"])
def page(request, monkeypatch):
    """Return a page in each kind of memory."""
    if request.param == "file":
        monkeypatch.setenv("NVRX_FORCE_NO_MEMFD", "1")
    made = ProgressPage.create()
    yield made
    made.close()


@pytest.fixture
def view(page):
    """Return the monitor's view of the page."""
    made = PageView(os.dup(page.fd))
    yield made
    made.close()


def test_page_shows_what_was_written(page, view) -> None:
    """Stamps, protection, phase and epoch are read by a process that has the descriptor."""
    first = view.read()
    assert (first.manual_s, first.is_protected, first.phase) == (None, True, Phase.IDLE)
    page.stamp_auto()
    page.stamp_manual()
    page.phase = Phase.AT_BARRIER
    seen = view.read()
    assert seen.auto_s >= first.auto_s
    assert seen.manual_s is not None
    assert seen.phase is Phase.AT_BARRIER
    page.rearm()
    again = view.read()
    assert again.manual_s is None
    assert again.epoch == seen.epoch + 1


def test_protection_nests(page, view) -> None:
    """The inner end of a block without timeouts does not switch them on; a rearm does."""
    page.disable_timeouts()
    page.disable_timeouts()
    page.enable_timeouts()
    assert not view.read().is_protected
    page.stamp_manual()
    before = view.read()
    page.enable_timeouts()
    after = view.read()
    assert after.is_protected
    assert after.manual_s >= before.manual_s
    page.disable_timeouts()
    page.rearm()
    assert view.read().is_protected
    page.enable_timeouts()
    assert view.read().is_protected


def test_page_cannot_be_shrunk() -> None:
    """No holder of the descriptor can take the memory away from under the other."""
    page = ProgressPage.create()
    with pytest.raises(PermissionError):
        os.ftruncate(page.fd, 0)
    assert fcntl.fcntl(page.fd, 1034) & 2
    page.close()


def test_foreign_memory_is_no_page() -> None:
    """Short, empty or overwritten memory raises, whatever it is."""
    for size in (0, 8, 4096):
        fd = os.memfd_create("foreign")
        os.ftruncate(fd, size)
        with pytest.raises(PageError):
            PageView(fd)
        with pytest.raises(OSError, match="Bad file"):
            os.fstat(fd)


def test_ping_allocates_nothing(page) -> None:
    """A hundred thousand pings leave no memory behind."""
    only_ours = [tracemalloc.Filter(True, page_module.__file__)]  # other threads allocate, too
    page.stamp_manual()
    tracemalloc.start()
    for _ in range(100_000):
        page.stamp_manual()
    snapshot = tracemalloc.take_snapshot().filter_traces(only_ours)
    tracemalloc.stop()
    assert sum(trace.size for trace in snapshot.traces) < 1000


# --- names and arguments ---


def test_arguments_travel_as_text() -> None:
    """Plain values and timedeltas come back; anything else is named in the error."""
    kwargs = {"port": 1, "timeout": timedelta(seconds=1.5), "host": "h", "path": pathlib.Path("/x")}
    assert messages.load_kwargs(messages.dump_kwargs(kwargs)) == {**kwargs, "path": "/x"}
    with pytest.raises(messages.UnnameableError, match="object"):
        messages.dump_kwargs({"store": object()})


def test_functions_travel_as_names() -> None:
    """What stands at the top of a module is found again, also through its file alone."""
    name, file = messages.name_of(socket.create_connection)
    assert messages.load_named(name, file) is socket.create_connection
    assert messages.load_named("pathlib:Path.cwd")() == pathlib.Path.cwd()
    for unnameable in (lambda: None, SimpleNamespace()):
        with pytest.raises(messages.UnnameableError, match="store_factory"):
            messages.name_of(unnameable)


def test_main_program_is_loaded_under_another_name(tmp_path) -> None:
    """A factory of the main script is found without running the script."""
    script = tmp_path / "main.py"
    script.write_text(
        "VALUE = 7\ndef make():\n    return VALUE\nif __name__ == '__main__':\n    1/0\n"
    )
    try:
        assert messages.load_named("__main__:make", str(script))() == 7
        assert messages.load_named("no_such_module_xyz:make", str(script))() == 7
    finally:
        sys.modules.pop("__nvrx_main__", None)
        sys.modules.pop("no_such_module_xyz", None)
    with pytest.raises(messages.UnnameableError):
        messages.load_named("__main__:make")


# --- messages ---


def test_every_message_travels() -> None:
    """Each message of a rank survives the wire."""
    hello = messages.Hello(1, MonitorSettings("p", "m:f"), 3, 8, messages.Begun(2, 1, 4, "0,5"))
    for message in (
        hello,
        messages.Reported(2, Interruption.EXCEPTION),
        messages.Completed(2),
        messages.Arrived(2),
        messages.Left(True, False),
    ):
        payload = messages.FROM_RANK.encode_payload(message)
        assert messages.FROM_RANK.decode(payload) == message
    assert hello.begun.participants == "0,5"


def test_large_decision_fits_a_message() -> None:
    """A decision about 50,000 ranks of which every second is lost goes through one frame."""
    numbers = {rank: rank for rank in range(0, 50_000, 2)}
    text = encode_decision(Decision(50_000, numbers, tuple(range(1, 50_000, 2)), ()))
    payload = messages.TO_RANK.encode_payload(messages.Decided(4, text))
    decided = messages.TO_RANK.decode(payload)
    assert decided.decision.numbers == numbers


@pytest.mark.parametrize("seed", range(30))
def test_channel_survives_anything(seed) -> None:
    """Random bytes end a channel or wait for more; nothing else happens."""
    draw = random.Random(seed)
    ours, theirs = socket.socketpair()
    channel = Channel(ours, messages.FROM_RANK, messages.TO_RANK)
    valid = messages.FROM_RANK.encode(messages.Completed(1))
    for _ in range(50):
        data = bytearray(valid)
        if draw.random() < 0.5:
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        try:
            theirs.sendall(data[: draw.randrange(1, len(data) + 1)])
        except OSError:
            break
        for message in channel.receive():
            assert isinstance(message, messages.Completed)
        if channel.is_over:
            break
    channel.close()
    theirs.close()


# --- node directory ---


@pytest.fixture
def short_path(socket_folder):
    """Return a folder with a path short enough for sockets."""
    return str(socket_folder)


@pytest.fixture
def environ(short_path):
    """Return the environment of a job that meets below a short path."""
    return {"XDG_RUNTIME_DIR": short_path}


def test_all_of_a_job_meet(environ) -> None:
    """Job, cycle and address name the place; it is 0700, and the same for all."""
    base = {**environ, "MASTER_ADDR": "a", "MASTER_PORT": "1", "SLURM_JOB_ID": "7"}
    places = [
        NodeDirectory.find(each).path
        for each in (base, {**base, "MASTER_PORT": "2"}, {**base, "NVRX_CYCLE": "1"})
    ]
    assert len(set(places)) == 3
    assert NodeDirectory.find(dict(base)).path == places[0]
    assert all(stat.S_IMODE(os.stat(path).st_mode) == 0o700 for path in places)


def test_place_is_the_launchers_where_there_is_one(environ, short_path) -> None:
    """The launcher removes its directory with all that is in it: nothing of ours stays."""
    launchers = os.path.join(short_path, "run")
    os.mkdir(launchers, 0o700)
    environ["FT_LAUNCHER_IPC_SOCKET"] = os.path.join(launchers, "launcher.sock")
    assert os.path.dirname(NodeDirectory.find(environ).path) == launchers
    environ["FT_LAUNCHER_IPC_SOCKET"] = os.path.join(short_path, "gone", "launcher.sock")
    assert os.path.dirname(NodeDirectory.find(environ).path) == short_path


def test_place_that_others_own_is_passed_over(environ, short_path) -> None:
    """A name that is taken by a file, a link or an open directory is not used."""
    first = NodeDirectory.find(environ).path
    os.rename(first, first + "-moved")
    os.symlink(first + "-moved", first)
    environ["TMPDIR"] = os.path.join(short_path, "second")
    os.mkdir(environ["TMPDIR"], 0o700)
    assert NodeDirectory.find(environ).path.startswith(environ["TMPDIR"])
    os.unlink(first)
    os.mkdir(first)
    os.chmod(first, 0o777)
    assert NodeDirectory.find(environ).path.startswith(environ["TMPDIR"])
    with pytest.raises(UnsafePathError):
        NodeDirectory(first)._open_lock()


def test_lock_has_a_deadline(environ) -> None:
    """A wait for a lock that is never freed ends with an error, and the lock stays usable."""
    place = NodeDirectory.find(environ)
    with place.locked(1.0):
        with pytest.raises(DeadlineExceededError):
            NodeDirectory(place.path)._lock(0.05)
        with pytest.raises(DeadlineExceededError):
            NodeDirectory(place.path)._lock(0.0)
    with place.locked(10.0):
        pass
    for thread in threading.enumerate():
        if thread.name == "nvrx-lock":
            thread.join(10.0)


def test_all_tries_for_a_lock_share_one_deadline(environ, monkeypatch) -> None:
    """However often the directory is removed meanwhile: the time is that of all tries together."""
    place = NodeDirectory.find(environ)
    left_s: list[float] = []
    is_current = iter([False, False, True])
    monkeypatch.setattr(start_module, "lock_file", lambda _fd, left: left_s.append(left))
    monkeypatch.setattr(NodeDirectory, "_is_current", lambda *_: next(is_current))
    os.close(place._lock(10.0))
    assert 10.0 >= left_s[0] > left_s[1] > left_s[2] > 0.0


def test_lock_survives_removal(environ) -> None:
    """Who waited for the lock of a directory that was removed gets that of a new one."""
    place = NodeDirectory.find(environ)
    entered = threading.Event()

    def enter() -> None:
        with place.locked(10.0):
            entered.set()

    waiter = threading.Thread(target=enter)
    with place.locked(1.0):
        waiter.start()
        place.remove()
    waiter.join(10.0)
    assert entered.is_set()
    assert os.path.isdir(place.path)


def test_lock_is_not_made_in_a_directory_that_goes(environ, monkeypatch) -> None:
    """Who comes while a directory is being removed gets a new one, which stays."""
    place = NodeDirectory.find(environ)
    removed = []
    really = start_module.remove_tree_at

    def remove_slowly(name: str, directory: int) -> None:
        with NodeDirectory.find(environ).locked(1.0):
            removed.append(name)
        really(name, directory)

    monkeypatch.setattr(start_module, "remove_tree_at", remove_slowly)
    with place.locked(1.0):
        place.remove()
    assert len(removed) == 1
    assert os.path.exists(os.path.join(place.path, "lock"))
    assert [entry for entry in os.listdir(os.path.dirname(place.path)) if "nvrx-ip-" in entry] == [
        os.path.basename(place.path)
    ]


def test_stale_siblings_are_removed(environ) -> None:
    """Directories without a monitor go, that of a living one stays."""
    places = [NodeDirectory.find({**environ, "MASTER_PORT": str(port)}) for port in (1, 2, 3)]
    with places[1].locked(1.0):
        listener = places[1].listen()
    places[0].remove_stale_siblings()
    assert [os.path.exists(place.path) for place in places] == [True, True, False]
    # Nobody came to the living one: it would have to wait for the other's end.
    listener.settimeout(0.0)
    with pytest.raises(BlockingIOError):
        listener.accept()
    listener.close()
    places[0].remove_stale_siblings()
    assert not os.path.exists(places[1].path)


# --- accepting ---


class FullListener(socket.socket):
    """A listener of a process without free descriptors; remembers when it was asked (s)."""

    def __init__(self) -> None:
        super().__init__(socket.AF_UNIX, socket.SOCK_STREAM)
        self.asked: list[float] = []

    def accept(self):
        self.asked.append(time.monotonic())
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def test_full_descriptor_table_does_not_spin(tmp_path) -> None:
    """A client that cannot be accepted is asked for again after a pause, not in every round."""
    with FullListener() as listener, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        client.connect(str(tmp_path / "s"))
        monitor = program.Monitor(listener, NodeDirectory(str(tmp_path)), os.getpid())
        try:
            while len(listener.asked) < 3:
                monitor._loop.run_once(until=time.monotonic() + 10.0)
        finally:
            monitor.close()
    pauses = [after - before for before, after in itertools.pairwise(listener.asked)]
    assert min(pauses) >= program._ACCEPT_PAUSE_S


# --- store threads ---


def test_closed_store_worker_does_not_connect_again(monkeypatch) -> None:
    """A connection that breaks after the worker was closed ends its thread."""
    opened = []

    def connect(_) -> object:
        opened.append(object())
        return opened[-1]

    monkeypatch.setattr(store_threads, "open_iteration_store", connect)
    worker = store_threads.StoreWorker(MonitorSettings("p", "m:f"), lambda _: None, lambda _: None)
    is_closed = threading.Event()

    def break_when_closed(_) -> None:
        assert is_closed.wait(20.0)
        raise ConnectionError

    worker.submit(break_when_closed)
    worker.close()
    is_closed.set()
    worker._thread.join(20.0)
    assert not worker._thread.is_alive()
    assert len(opened) == 1


# --- takeover ---


class NoStore:
    """A store worker that does nothing."""

    pending = 0
    is_open = True

    def __init__(self, *_) -> None:
        pass

    def submit(self, *_) -> None:
        pass

    follow = submit

    started_s = broken_s = None

    def close(self) -> None:
        pass


class SignalledProcesses(set):
    """Processes that live on whatever they are sent, which is noted."""

    def __init__(self) -> None:
        super().__init__()
        self.signalled = []

    def hold(self, pid, start_ticks=0):
        self.add(pid)
        return start_ticks

    def signal(self, pid, _) -> None:
        self.signalled.append(pid)


def test_who_left_a_call_that_is_over_is_left_alone(monkeypatch) -> None:
    """A new monitor ends no rank that left normally before it came, and does not stay for it."""
    clock = ManualClock()
    monkeypatch.setattr(serving, "StoreWorker", NoStore)
    monkeypatch.setattr(serving, "OutcomeReader", NoStore)
    monkeypatch.setattr(serving, "time", clock)
    settings = MonitorSettings("p", "m:f", hard_timeout_s=1.0, termination_grace_s=0.0)
    processes = SignalledProcesses()
    parts = SimpleNamespace(post=None), processes, SimpleNamespace()
    call = serving.Serving(*parts, settings, 2)
    # Rank 1 left, the monitor died, rank 0 comes to the new one and leaves, too.
    for rank, pid in ((0, os.getpid()), (1, os.getppid())):
        call._adopt(rank, pid, 0, has_left=False)
    call._do(call._membership.begun(0, 0, 0, 2, frozenset({0, 1})))
    call._on_message(0, messages.Completed(0))
    call.outcome(0, is_completed=True)
    call._on_message(0, messages.Left(is_lost=False, is_discarded=False))
    for _ in range(10):
        clock.advance(1.0)
        call.tick(clock.monotonic())
    assert processes.signalled == []
    call.is_over(clock.monotonic())
    clock.advance(settings.barrier_timeout_s + settings.heartbeat_timeout_s)
    assert call.is_over(clock.monotonic())


# --- traffic ---


class CountingIterationStore:
    """An iteration store that counts operations."""

    def __init__(self) -> None:
        self.count = 0
        self.lease = 0

    def nodes(self):
        self.count += 1
        return [NodeEntry(0, {0: (1, 7)}), NodeEntry(1, {1: (2, 7)})]

    def register_node(self, _) -> None:
        self.count += 2

    def renew_lease(self, _) -> None:
        self.count += 1

    def leases(self, node_ids):
        self.count += 1
        self.lease += 1
        return dict.fromkeys(node_ids, self.lease)


class NoThread:
    """A store worker that does everything at once."""

    def __init__(self) -> None:
        self.iteration_store = CountingIterationStore()

    def submit(self, run, done=None) -> None:
        result = run(self.iteration_store)
        if done is not None:
            done(result)


def test_idle_traffic_of_a_node() -> None:
    """A node with one rank costs two store operations per heartbeat interval at most."""
    settings = MonitorSettings("p", "m:f", heartbeat_interval_s=1.0, heartbeat_timeout_s=30.0)
    store_worker = NoThread()
    lost = []
    registration = Registration(settings, store_worker, lost.extend, lambda *_: None)
    registration.came(0, 1, 1)
    registration.tick(0.0, {0, 1})
    start = store_worker.iteration_store.count
    beats = 1000
    for second in range(1, beats + 1):
        registration.tick(float(second), {0, 1})
    waits = beats / 10  # one wait for the outcome in ten seconds
    assert store_worker.iteration_store.count - start + waits <= 2 * beats
    assert lost == []


# --- public functions over the parts ---


def test_is_process_active() -> None:
    """A process that runs is active; a zombie and a gone one are not."""
    with start_child(["/bin/cat"], stdin=-1) as child:
        process = psutil.Process(child.pid)
        assert monitor_process.is_process_active(process)
        child.stdin.close()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert not monitor_process.is_process_active(process)
        child.wait()
        assert not monitor_process.is_process_active(process)


@pytest.mark.parametrize("program", ["trap '' TERM; read x", "kill -STOP $$; read x", "read x"])
def test_terminate_process(program, caplog) -> None:
    """Deaf and stopped processes end, too, after the grace."""
    import logging

    with start_child(["/bin/sh", "-c", program], stdin=-1) as child:
        process = psutil.Process(child.pid)
        monitor_process.terminate_process(
            process, timedelta(seconds=0.2), logging.getLogger("nvrx.test")
        )
        assert child.wait(10.0) is not None


def test_daemonize_fn(tmp_path) -> None:
    """The function runs in a process that is not ours, with what it was given."""
    (tmp_path / "given").touch()
    before = psutil.Process().children()
    monitor_process.daemonize_fn(os.link, (str(tmp_path / "given"), str(tmp_path / "made")))
    look = threading.Event()
    for _ in range(1000):
        if (tmp_path / "made").exists():
            break
        look.wait(0.02)  # a test's look: another process makes it
    assert (tmp_path / "made").exists()
    assert psutil.Process().children() == before
    with pytest.raises(TypeError):
        monitor_process.daemonize_fn(lambda: None)


class HeartbeatStore:
    """What the threads of `sibling_monitor` use of a store."""

    def __init__(self) -> None:
        self.beats: dict[int, float] = {}
        self.said = []
        self.event = threading.Event()

    def send_heartbeat(self, rank) -> None:
        self.beats[rank] = self.beats.get(rank, 0.0) + 1.0
        self.event.set()

    def get_heartbeat(self, rank):
        return self.beats.get(rank, 0.0)

    def get_initial_ranks(self, ranks):
        return [rank + 10 for rank in ranks]

    def record_interrupted(self, records) -> None:
        self.said.append(("interrupted", [record.rank for record in records]))

    def record_terminated_ranks(self, ranks) -> None:
        self.said.append(("terminated", list(ranks)))

    def iteration_barrier(self, ranks, count, _) -> None:
        self.said.append(("iteration", list(ranks), count))

    def termination_barrier(self, ranks, count, _) -> None:
        self.said.append(("termination", list(ranks), count))
        self.event.set()


def test_heartbeat_renews() -> None:
    """The heartbeat of a rank is sent at once and again, until it is shut down."""
    store = HeartbeatStore()
    beat = sibling_monitor.Heartbeat(1, store, timedelta(seconds=0.01), timedelta(seconds=1))
    beat.start()
    for _ in range(3):
        assert store.event.wait(10.0)
        store.event.clear()
    beat.shutdown()
    assert store.beats.keys() == {1}


def test_sibling_monitor_accounts_for_a_lost_rank() -> None:
    """A heartbeat that stops is reported, and arrived for at both barriers."""
    store = HeartbeatStore()
    watcher = sibling_monitor.SiblingMonitor(
        store, 0, 2, 12, timeout=timedelta(seconds=0.1), interval=timedelta(seconds=0.01)
    )
    watcher.start()
    assert store.event.wait(20.0)
    watcher.shutdown()
    assert store.said[:4] == [
        ("interrupted", [1]),
        ("terminated", [1]),
        ("iteration", [1], 2),
        ("termination", [11], 12),
    ]
