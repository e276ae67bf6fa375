# SPDX-License-Identifier: Apache-2.0
"""The aborts that are built in, with stand-in backends where there is no device."""

import contextlib
import datetime as dt
import errno
import importlib.machinery
import json
import logging
import os
import resource
import select
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
from fork_server import ForkServer

from nvidia_resiliency_ext.inprocess import abort
from nvidia_resiliency_ext.inprocess import abort as aborts
from nvidia_resiliency_ext.inprocess._unblock import gloo, groups
from nvidia_resiliency_ext.inprocess._unblock import groups as destroyed
from nvidia_resiliency_ext.inprocess._unblock.gloo import UnreadConnections
from nvidia_resiliency_ext.inprocess.state import State
from nvidia_resiliency_ext.shared_utils.abort_hooks import register_abort_hook
from nvidia_resiliency_ext.shared_utils.trace_collector import NoFlightRecorderError

pytestmark = pytest.mark.slow

STATE = State(1, 4, iteration=3).freeze()
PROGRAM = Path(__file__).parent / "programs" / "gloo_ranks.py"
SIZES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")


class StandInBackend:
    """A backend as torch has them, without a device."""

    def __init__(self, action: Callable[[], object], kind: str = "nccl") -> None:
        self.action = action
        self.kind = kind

    def name(self) -> str:
        return self.kind

    def abort(self) -> None:
        self.action()


class OlderStandInBackend:
    """A backend as torch had them before 2.6."""

    def __init__(self, action: Callable[[], object]) -> None:
        self._shutdown = action


class StandInGroup:
    """A process group with one backend per device."""

    def __init__(self, **backends: object) -> None:
        self.backends = backends
        self._device_types = [*backends, "meta"]

    def _get_backend(self, device: object) -> object:
        try:
            return self.backends[device.type]  # type: ignore[attr-defined]
        except KeyError:
            raise RuntimeError("no backend for it") from None


Use = Callable[..., list[str]]


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Use:
    """Have groups stand in for torch's; returns what happens."""
    happened: list[str] = []

    def use(*stand_ins: StandInGroup) -> list[str]:
        monkeypatch.setattr(groups, "all_groups", lambda: list(stand_ins))
        return happened

    monkeypatch.setattr(destroyed.destroyed_groups, "destroy", lambda: happened.append("destroyed"))
    for name in (*SIZES, "NVRX_FR_TRACE_PATH"):
        monkeypatch.delenv(name, raising=False)
    return use


def test_stand_in_backends_are_aborted_all_at_once(use: Use) -> None:
    """Each waits for the others, as NCCL's do: one after the other would never end."""
    all_started = threading.Barrier(5)
    happened: list[str] = []

    def meet() -> None:
        all_started.wait(30)
        happened.append("aborted")

    shared = StandInBackend(meet)
    given = [
        StandInGroup(cuda=StandInBackend(meet), cpu=StandInBackend(meet, "other")),
        StandInGroup(cuda=shared),
        StandInGroup(cuda=shared, cpu=StandInBackend(meet)),
        StandInGroup(cuda=OlderStandInBackend(meet)),
    ]
    destroyed = use(*given)
    assert abort.AbortTorchDistributed()(STATE) is STATE
    assert happened == ["aborted"] * 5
    assert destroyed == ["destroyed"]


def test_failing_stand_in_backend_does_not_stop_the_others(use: Use) -> None:
    """The others are aborted, the groups destroyed; then the failure is raised."""
    happened: list[str] = []

    def fail() -> None:
        raise OSError("broken")

    destroyed = use(
        StandInGroup(cuda=StandInBackend(fail)),
        StandInGroup(cuda=StandInBackend(lambda: happened.append("aborted"))),
    )
    with pytest.raises(OSError, match="broken"):
        abort.AbortTorchDistributed()(STATE)
    assert happened == ["aborted"]
    assert destroyed == ["destroyed"]


def test_stuck_stand_in_backend_is_left_behind(use: Use) -> None:
    """An abort that does not end costs the time given and no more."""
    go_on, ended = threading.Event(), threading.Event()

    def hang() -> None:
        go_on.wait(30)
        ended.set()

    destroyed = use(StandInGroup(cuda=StandInBackend(hang)))
    limited = abort.AbortTorchDistributed(timeout=dt.timedelta(seconds=0.05))
    with pytest.raises(aborts.AbortTimeoutError, match="has not ended"):
        limited(STATE)
    go_on.set()
    assert ended.wait(30)
    for thread in threading.enumerate():
        if thread.name.startswith("nvrx-abort"):
            thread.join(30)
    assert destroyed == ["destroyed"]


def test_backend_behind_a_shell_of_stand_in_backends(use: Use) -> None:
    """What checks calls in debug mode is passed by, the backend itself is aborted."""
    happened: list[str] = []
    shell = types.SimpleNamespace(wrapped_pg=StandInBackend(lambda: happened.append("aborted")))
    use(StandInGroup(cuda=shell))
    abort.AbortTorchDistributed()(STATE)
    assert happened == ["aborted"]


def test_static_methods_with_stand_in_backends(use: Use) -> None:
    """Backends can be aborted without the rest: all of them, or that of one group and device."""
    happened: list[str] = []
    one = StandInGroup(cuda=StandInBackend(lambda: happened.append("one")))
    two = StandInGroup(cuda=StandInBackend(lambda: happened.append("two")))
    destroyed = use(one, two)
    abort.AbortTorchDistributed.shutdown_all_process_group_backends()
    assert sorted(happened) == ["one", "two"]
    happened.clear()
    abort.AbortTorchDistributed.shutdown_process_group_backend(one, "cuda")
    abort.AbortTorchDistributed.shutdown_process_group_backend(one, "cpu")
    assert happened == ["one"]
    assert destroyed == []


class StandInCollector:
    """Notes when it takes and saves."""

    happened: list[str]

    def __init__(self, path: str) -> None:
        self.path = path

    def take(self) -> dict[str, str]:
        self.happened.append(f"taken for {self.path}")
        return {"path": self.path}

    def save(self, dump: dict[str, str]) -> str:
        self.happened.append("saved")
        return dump["path"]


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch, use: Use) -> list[str]:
    """A stand-in recorder and one stand-in backend; returns what happens."""
    happened = use(StandInGroup(cuda=StandInBackend(lambda: happened.append("aborted"))))
    made = type("Collector", (StandInCollector,), {"happened": happened})
    monkeypatch.setattr(aborts, "TorchFRTraceCollector", made)
    monkeypatch.setattr(aborts, "_RECORDER_TIMEOUT", dt.timedelta(seconds=30))
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "100")
    return happened


def join_recorders() -> None:
    for thread in threading.enumerate():
        if thread.name == "nvrx-flight-record":
            thread.join(30)


def test_record_is_taken_before_and_saved_after(recorder: list[str], tmp_path: Path) -> None:
    """The recorder is read before anything is aborted, and its file written after everything."""
    abort.AbortTorchDistributed(str(tmp_path))(STATE)
    join_recorders()
    assert recorder == [f"taken for {tmp_path}/iter_3", "aborted", "destroyed", "saved"]


def test_record_path_from_the_environment(
    recorder: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a path of its own it uses `NVRX_FR_TRACE_PATH`."""
    monkeypatch.setenv("NVRX_FR_TRACE_PATH", str(tmp_path))
    abort.AbortTorchDistributed()(STATE)
    join_recorders()
    assert recorder[0] == f"taken for {tmp_path}/iter_3"


@pytest.mark.parametrize("size", ["", "0", "-1"])
def test_no_record_without_a_buffer(
    recorder: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: str
) -> None:
    """A recorder that is off is not read."""
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", size)
    abort.AbortTorchDistributed(str(tmp_path))(STATE)
    assert recorder == ["aborted", "destroyed"]


@pytest.mark.parametrize("name", SIZES)
def test_buffer_size_that_is_no_number(
    recorder: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """It is an error that names the variable, raised when all else is done."""
    monkeypatch.setenv(name, "many")
    with pytest.raises(ValueError, match=f"{name}='many'"):
        abort.AbortTorchDistributed(str(tmp_path))(STATE)
    assert recorder == ["aborted", "destroyed"]


@pytest.mark.parametrize("what", ["take", "save"])
def test_failing_record_stops_nothing(
    recorder: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    what: str,
) -> None:
    """A recorder that cannot be read or saved is logged, and the abort is done."""

    def fail(*_args: object) -> None:
        raise OSError("full")

    monkeypatch.setattr(StandInCollector, what, fail)
    try:
        abort.AbortTorchDistributed(str(tmp_path))(STATE)
    except OSError:
        assert what == "take"
    join_recorders()
    assert [each for each in recorder if "taken" not in each] == ["aborted", "destroyed"]
    assert "full" in caplog.text


def test_torch_without_a_recorder(
    recorder: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is logged once, with the folder that stays empty; no abort fails for it."""

    def fail(_collector: object) -> None:
        raise NoFlightRecorderError("this torch has no flight recorder")

    monkeypatch.setattr(StandInCollector, "take", fail)
    aborting = abort.AbortTorchDistributed(str(tmp_path))
    for _ in range(3):
        assert aborting(STATE) is STATE
    assert recorder == ["aborted", "destroyed"] * 3
    told = [each.getMessage() for each in caplog.records if "flight record" in each.getMessage()]
    assert told == [
        f"no flight records will be saved in {tmp_path}: this torch has no flight recorder"
    ]


def test_record_that_does_not_answer(
    recorder: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recorder that hangs is given up, and the abort goes on."""
    go_on = threading.Event()
    monkeypatch.setattr(aborts, "_RECORDER_TIMEOUT", dt.timedelta(seconds=0.01))
    monkeypatch.setattr(StandInCollector, "take", lambda _self: go_on.wait(30))
    with pytest.raises(aborts.AbortTimeoutError, match="flight-record"):
        abort.AbortTorchDistributed(str(tmp_path))(STATE)
    go_on.set()
    join_recorders()
    assert recorder == ["aborted", "destroyed"]


def test_nothing_to_abort() -> None:
    """Without a process group nothing happens and nothing fails."""
    assert abort.AbortTorchDistributed()(STATE) is STATE
    abort.AbortTorchDistributed.shutdown_all_process_group_backends()


@pytest.fixture
def connection() -> Iterator[tuple[socket.socket, socket.socket]]:
    """A TCP connection of the program's own."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        two, _ = server.accept()
    with one, two:
        yield one, two
    gloo.release_gloo_connections()


def test_other_sockets_are_left_alone(connection: tuple[socket.socket, socket.socket]) -> None:
    """A process without gloo has nothing ended, whatever sockets it has."""
    one, two = connection
    assert gloo.end_gloo_connections() == 0
    one.sendall(b"x")
    assert two.recv(1) == b"x"


def test_loop_that_never_rests(
    connection: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Connections of a gloo thread that is always at work are found, too, and soon."""
    monkeypatch.setattr(gloo, "thread_name", lambda _: "gloo_tcp_loop")
    monkeypatch.setattr(gloo, "system_call", lambda _: ())
    reading, writing = os.pipe()
    with select.epoll() as loop, select.epoll() as other, socket.create_server(("", 0)) as listener:
        for descriptor in (reading, listener.fileno(), connection[0].fileno()):
            loop.register(descriptor)
        other.register(connection[1].fileno())
        began = time.monotonic()
        assert gloo.end_gloo_connections() == 1
        assert time.monotonic() - began < 60.0
    os.close(reading)
    os.close(writing)
    assert connection[0].recv(1) == b""


def test_loop_that_never_rests_beside_a_like_one(
    connection: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What another thread waits for is not taken for that of a gloo thread that is always at work.

    Though it has a pipe, a listener and a connection, as gloo's has.
    """
    real = gloo.thread_name
    busy = str(threading.get_native_id())
    monkeypatch.setattr(
        gloo, "thread_name", lambda task: "gloo_tcp_loop" if task == busy else real(task)
    )
    with contextlib.ExitStack() as stack:
        looked = []
        for one in connection:
            loop = stack.enter_context(select.epoll())
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            reading, writing = os.pipe()
            stack.callback(os.close, reading)
            stack.callback(os.close, writing)
            for each in (reading, listener, one):
                loop.register(each, select.EPOLLIN)
            looked.append((loop, writing))
        other, wakes = looked[1]
        thread = threading.Thread(target=other.poll)
        thread.start()
        try:
            deadline = time.monotonic() + 30
            while gloo._wait(str(thread.native_id)) is None:
                assert time.monotonic() < deadline
                time.sleep(0.001)  # nothing tells when it begins to wait
            assert gloo.end_gloo_connections() == 1
            assert connection[0].recv(1) == b""
            connection[1].setblocking(False)
            with pytest.raises(BlockingIOError):
                connection[1].recv(1)
        finally:
            os.write(wakes, b"x")
            thread.join()


def test_number_that_is_something_else_by_now(
    connection: tuple[socket.socket, socket.socket], tmp_path: Path
) -> None:
    """Files, pipes, listeners, Unix sockets and closed numbers are not touched."""
    one, two = socket.socketpair()
    with (
        one,
        two,
        socket.create_server(("127.0.0.1", 0)) as listener,
        (tmp_path / "f").open("w") as f,
    ):
        assert not gloo._end(f.fileno())
        assert not gloo._end(listener.fileno())
        assert not gloo._end(one.fileno())
        one.sendall(b"x")
        assert two.recv(1) == b"x"
        closed = f.fileno()
    assert not gloo._end(closed)
    assert gloo._end(connection[0].fileno())
    assert connection[0].recv(1) == b""


@pytest.fixture
def unread() -> Iterator[UnreadConnections]:
    """Connections that are let go of only when that is asked for."""
    kept = UnreadConnections(600.0)
    yield kept
    kept.release()


def _has_thread(name: str) -> bool:
    return any(thread.name == name for thread in threading.enumerate())


def test_peer_of_an_ended_connection_can_write(
    connection: tuple[socket.socket, socket.socket], unread: UnreadConnections
) -> None:
    """What had come is read, then the end; the peer sees it when the connection is released.

    Though the reader closes its socket meanwhile.
    """
    one, two = connection
    two.sendall(b"before")
    assert one.recv(100, socket.MSG_PEEK) == b"before"
    for _ in range(2):
        unread.add("socket:[1]", one.dup())
    assert one.recv(100) == b"before"
    assert one.recv(100) == b""
    one.sendall(b"answer")
    one.close()
    for _ in range(3):
        two.sendall(b"after")
    assert two.recv(100) == b"answer"
    two.setblocking(False)
    with pytest.raises(BlockingIOError):
        two.recv(100)
    two.settimeout(30)
    unread.release()
    with contextlib.suppress(ConnectionResetError):
        assert two.recv(100) == b""
    assert not _has_thread("nvrx-unread")


def test_peer_that_nobody_lets_go_of(connection: tuple[socket.socket, socket.socket]) -> None:
    """A peer sees the end later without a call: it may not be stopped, and wait for this rank."""
    one, two = connection
    two.settimeout(30)
    UnreadConnections(0.05).add("socket:[1]", one.dup())
    assert two.recv(100) == b""


def test_descriptors_are_left_to_others(
    connection: tuple[socket.socket, socket.socket],
    unread: UnreadConnections,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where three quarters of the descriptors are in use both sides are ended at once."""
    one, two = connection
    other, its_peer = socket.socketpair()
    with other, its_peer:
        first = other.dup()
        limit = ((first.fileno() + 1) * 4 + 2) // 3  # three quarters of it are one more
        monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
        unread.add("socket:[1]", first)
        unread.add("socket:[2]", one.dup())
        two.settimeout(30)
        assert two.recv(1) == b""
        its_peer.setblocking(False)
        with pytest.raises(BlockingIOError):
            its_peer.recv(1)


def test_connection_that_no_thread_could_end_later(
    connection: tuple[socket.socket, socket.socket],
    unread: UnreadConnections,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where no thread can be started both sides are ended at once, and all goes on."""

    def fail(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    one, two = connection
    two.settimeout(30)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        unread.add("socket:[1]", one.dup())
    assert two.recv(1) == b""
    unread.release()


def test_groups_go_where_no_descriptor_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that can look at nothing forgets its groups all the same."""
    distributed = pytest.importorskip("torch.distributed")
    happened: list[str] = []

    def fail(_path: str) -> list[str]:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(distributed, "destroy_process_group", lambda: happened.append("destroyed"))
    with monkeypatch.context() as patch:
        patch.setattr(os, "listdir", fail)
        destroyed.forget_unfinished()
    assert happened == ["destroyed"]


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_forked_process_ends_its_own_connections(
    connection: tuple[socket.socket, socket.socket], unread: UnreadConnections
) -> None:
    """A peer of a forked process sees the end in time, though the parent had one to end, too."""
    one, two = connection
    other, its_peer = socket.socketpair()
    two.settimeout(30)
    with other, its_peer:
        unread.add("socket:[1]", other.dup())
        unread._linger_s = 0.05  # of the child's
        child = os.fork()
        if child == 0:
            with contextlib.suppress(BaseException):
                unread.add("socket:[2]", one.dup())
                time.sleep(30)
            os._exit(0)
        try:
            assert two.recv(1) == b""
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def output_of(server: ForkServer, *command: object, **environment: str) -> str:
    """Run a program; return what it writes."""
    with server.running(*command, environ={**os.environ, **environment}) as program:
        code = program.wait(200)
        assert code == 0, program.errors.read()
        return program.output.read()


def gloo_ranks(server: ForkServer, *arguments: str, **environment: str) -> list[dict[str, object]]:
    with ports.claimed() as port:
        text = output_of(server, PROGRAM, port, *arguments, **environment)
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [(), ("unnamed",)], ids=["named", "unnamed"])
def test_real_ranks_are_unblocked(
    fork_server: ForkServer, arguments: tuple[str, ...], tmp_path: Path
) -> None:
    """Four ranks, groups that are pinned: all are out at once, and nothing else is broken.

    With several groups, and with one over another interface; the second form finds gloo as in
    versions whose threads have no name.
    """
    sizes = {"TORCH_FR_BUFFER_SIZE": "100", "NVRX_FR_TRACE_PATH": str(tmp_path)}
    records = gloo_ranks(fork_server, *arguments, **sizes)
    assert len(records) == 8
    for record in records:
        assert record["sum"] == 4.0
        assert record["error"]
        assert record["pins"]
        assert not record["initialized"]
        assert record["server"], "a connection of the program was ended"
        assert record["store"], "the connection to the store was ended"
        assert record["unblocked_s"] < 60.0  # type: ignore[operator]
        assert record["abort_s"] < 60.0  # type: ignore[operator]
    dumps = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("_dump_*"))
    assert [str(path) for path in dumps] == [f"iter_0/_dump_{rank}.json" for rank in range(4)]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["abort", "destroy"])
def test_reducer_that_is_freed_while_gloo_fails(fork_server: ForkServer, how: str) -> None:
    """What frees the reducer, with the interpreter's lock, does not wait for who wants that lock.

    Nothing of the groups is left afterwards.
    """
    assert output_of(fork_server, PROGRAM.with_name("gloo_reducer.py"), how) == "20 True 0\n"


@pytest.mark.slow
def test_busy_ranks_are_unblocked(fork_server: ForkServer) -> None:
    """Ranks that are at collectives are out at once, whatever is under way between them.

    Eight times: gloo forgets an operation whose message could not be written.
    """
    records = gloo_ranks(fork_server, "busy")
    assert len(records) == 32
    for record in records:
        assert record["error"]
        assert record["unblocked_s"] < 60.0  # type: ignore[operator]


def test_engine_that_is_not_installed() -> None:
    """Without TransformerEngine nothing happens."""
    assert abort.AbortTransformerEngine()(STATE) is STATE


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Install a stand-in TransformerEngine; returns what is called."""

    def install(fp8_module: str, error: Exception | None = None) -> list[str]:
        called: list[str] = []

        def destroy_ub() -> None:
            called.append("destroy_ub")
            if error is not None:
                raise error

        manager = types.SimpleNamespace(reset=lambda: called.append("reset"))
        modules: dict[str, dict[str, object]] = {
            "transformer_engine": {},
            "transformer_engine.pytorch": {},
            "transformer_engine.pytorch.module": {},
            "transformer_engine.pytorch.module.base": {"destroy_ub": destroy_ub},
            fp8_module: {"FP8GlobalStateManager": manager},
        }
        for name, content in modules.items():
            module = types.ModuleType(name)
            module.__path__ = []  # type: ignore[attr-defined]
            module.__spec__ = importlib.machinery.ModuleSpec(name, None)
            vars(module).update(content)
            monkeypatch.setitem(sys.modules, name, module)
        return called

    return install


@pytest.mark.parametrize("module", ["fp8", "quantization"])
def test_stand_in_engine(engine: Callable[..., list[str]], module: str) -> None:
    """User buffers are destroyed and the FP8 state is reset, where older and newer versions are."""
    called = engine(f"transformer_engine.pytorch.{module}")
    assert abort.AbortTransformerEngine()(STATE) is STATE
    assert called == ["destroy_ub", "reset"]


def test_failing_stand_in_engine(engine: Callable[..., list[str]]) -> None:
    """The FP8 state is reset even if the buffers cannot be destroyed."""
    called = engine("transformer_engine.pytorch.fp8", OSError("broken"))
    with pytest.raises(OSError, match="broken"):
        abort.AbortTransformerEngine()(STATE)
    assert called == ["destroy_ub", "reset"]


def test_checkpoint_workers(caplog: pytest.LogCaptureFixture) -> None:
    """All registered hooks run; what one raises is raised after the others; none is fine, too."""
    caplog.set_level(logging.CRITICAL, logger="nvrx")
    called: list[str] = []

    def fail() -> None:
        raise OSError("broken")

    assert abort.AbortPersistentCheckpointProcesses()(STATE) is STATE
    undo = [
        register_abort_hook("test one", fail),
        register_abort_hook("test two", lambda: called.append("two")),
    ]
    try:
        with pytest.raises(OSError, match="broken"):
            abort.AbortPersistentCheckpointProcesses()(STATE)
    finally:
        for each in undo:
            each()
    assert called == ["two"]


@pytest.mark.gpu
def test_nccl_collective_is_ended() -> None:
    """A collective that waits on the device for a rank that does not come ends with the abort."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    program = PROGRAM.with_name("nccl_abort.py")
    done = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "done" in done.stdout
