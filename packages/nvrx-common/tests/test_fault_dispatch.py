# SPDX-License-Identifier: Apache-2.0
"""Faults have fixed numbers, can be added, drawn alike on all ranks, refused and cancelled."""

import contextlib
import copy
import logging
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from nvidia_resiliency_ext.shared_utils import inject_fault as faults
from nvidia_resiliency_ext.shared_utils._faults import dispatch, resources
from nvidia_resiliency_ext.shared_utils._faults.kinds import draw_plan
from nvidia_resiliency_ext.shared_utils.clock import ManualClock
from nvidia_resiliency_ext.shared_utils.inject_fault import Fault, dispatch_fault_injection

_NUMBERS = {
    "GPU_ERROR": 1, "GPU_SLEEP": 2, "WORKLOAD_EXC": 3, "ASYNC_EXC": 4, "SIGNAL_EXC": 5,
    "OS_ABORT": 6, "LOCK_GIL": 7, "SEGFAULT": 8, "SIGINT": 9, "SIGKILL": 10, "SIGTERM": 11,
    "SIGSTOP": 12, "HANG": 100, "SLOWDOWN": 101, "CPU_SPIN": 102, "NET_DROP": 103, "OOM_CPU": 104,
    "OOM_GPU": 105, "DISK_FULL": 106, "CLOCK_SKEW": 107,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _forget_registered() -> Iterator[None]:
    """Take back what a test registers, and what its faults do until their threads end."""
    yield
    for thread in threading.enumerate():
        if thread.name.startswith("nvrx-fault-"):
            thread.join(20)
    for name in Fault._member_names_[len(_NUMBERS) :]:
        del Fault._value2member_map_[Fault._member_map_.pop(name).value]
        delattr(Fault, name)
    del Fault._member_names_[len(_NUMBERS) :]
    dispatch._handlers.clear()
    faults.clear_workload_exception()


def _wait(condition: threading.Event) -> None:
    assert condition.wait(20)


def test_numbers() -> None:
    """Names and numbers are those that other programs exchange."""
    assert {each.name: each.value for each in Fault} == _NUMBERS
    assert all(Fault(int(float(each.value))) is each for each in Fault)
    assert set(dispatch.PREPARERS) | set(dispatch.SIGNALS) == set(Fault)


def test_registered_name() -> None:
    """A new name is a fault like any other: by name, attribute, number, iteration and pickle."""
    fault = faults.register_fault("DROP_COFFEE", lambda *_: None)
    other = faults.register_fault("OTHER", print)
    assert (fault.name, fault.value, other.value) == ("DROP_COFFEE", 108, 109)
    assert Fault["DROP_COFFEE"] is fault
    assert Fault.DROP_COFFEE is fault  # type: ignore[attr-defined]
    assert Fault(108) is fault
    assert [*Fault][-2:] == [fault, other]
    assert next(reversed(Fault)) is other
    assert len(Fault) == len([*Fault]) == len(_NUMBERS) + 2
    assert fault in Fault
    assert Fault.SIGINT in Fault
    assert Fault.__members__["OTHER"] is other
    assert "OTHER" in dir(Fault)
    assert (str(fault), repr(fault)) == ("Fault.DROP_COFFEE", "<Fault.DROP_COFFEE: 108>")
    assert pickle.loads(pickle.dumps(fault)) is copy.deepcopy(fault) is fault
    assert isinstance(fault, Fault)
    assert {fault: 1}[fault] == 1
    assert faults.register_fault("OTHER", repr) is other
    assert faults.register_fault("SIGINT", repr) is Fault.SIGINT


def test_unknown_faults() -> None:
    """What is no fault is refused as an enum refuses it, and by the dispatch."""
    with pytest.raises(KeyError):
        Fault["COFFEE"]
    with pytest.raises(ValueError, match="500"):
        Fault(500)
    with pytest.raises(AttributeError):
        _ = Fault.COFFEE  # type: ignore[attr-defined]
    for unknown in ("SIGINT", 9, None, []):
        with pytest.raises(RuntimeError, match="unknown fault"):
            dispatch_fault_injection(unknown, 0, None)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["two words", "", "_private", "mro", "name", "value", "1ST"])
def test_names_that_cannot_be(name: str) -> None:
    """A name that an enum cannot have is refused, and nothing is registered."""
    with pytest.raises(ValueError, match="cannot be the name"):
        faults.register_fault(name, print)
    assert len(Fault) == len(_NUMBERS)


def test_bad_registrations() -> None:
    """A handler that cannot be called and a name that is none are type errors."""
    with pytest.raises(TypeError, match="cannot be"):
        faults.register_fault("COFFEE", None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="name"):
        faults.register_fault(13, print)  # type: ignore[arg-type]
    assert len(Fault) == len(_NUMBERS)


@pytest.mark.parametrize("key", ["COFFEE", Fault.SEGFAULT])
def test_registered_handler_is_called(key: str | Fault) -> None:
    """The handler gets delay and callback as given; one that waits does not hold the caller."""
    calls: list[tuple[object, ...]] = []
    go_on, done = threading.Event(), threading.Event()
    noted = threading.Event()

    def note(*given: object) -> None:
        calls.append(given)
        noted.set()

    fault = faults.register_fault(key, note)
    dispatch_fault_injection(fault=fault, delay=3, callback=print)
    _wait(noted)
    assert calls == [(3, print)]

    def slow(delay: float, callback: object) -> None:
        assert go_on.wait(30)
        done.set()

    faults.register_fault(key, slow)
    dispatch_fault_injection(fault, 0.5)
    go_on.set()
    _wait(done)


def test_failing_handler(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """A handler that fails at once tells the caller."""
    # At once, but on a busy machine its thread may be late.
    monkeypatch.setattr(dispatch, "_HANDLER_WAIT_S", 30.0)
    fault = faults.register_fault("COFFEE", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        dispatch_fault_injection(fault, 0)


@pytest.mark.parametrize("delay", [-1, float("nan"), float("inf")])
def test_bad_delays(delay: float) -> None:
    """A delay that cannot be waited for is refused."""
    with pytest.raises(ValueError, match="0 or more"):
        dispatch_fault_injection(Fault.WORKLOAD_EXC, delay)


def test_order_of_events(caplog: pytest.LogCaptureFixture) -> None:
    """At its time the fault logs one CRITICAL line, calls back, and only then happens."""
    seen: list[tuple[bool, int]] = []
    happened = threading.Event()

    def callback() -> None:
        seen.append((faults.workload_raise_event.is_set(), len(caplog.records)))
        happened.set()

    later = dispatch_fault_injection(Fault.WORKLOAD_EXC, 30)
    assert (later.fired, later.cancelled, "pending" in repr(later)) == (False, False, True)
    assert later.cancel()
    start = time.monotonic()
    handle = dispatch_fault_injection(Fault.WORKLOAD_EXC, 0.1, callback)
    _wait(happened)
    _wait(faults.workload_raise_event)
    assert time.monotonic() - start >= 0.1
    assert (seen, handle.fired) == ([(False, 1)], True)
    assert [(each.name, each.levelno) for each in caplog.records] == [
        ("nvidia_resiliency_ext.shared_utils.inject_fault", logging.CRITICAL)
    ]
    assert handle.cancel() is False


def test_failing_callback(caplog: pytest.LogCaptureFixture) -> None:
    """A callback that fails is logged and does not save anybody from the fault."""
    dispatch_fault_injection(Fault.WORKLOAD_EXC, 0, lambda: 1 / 0)
    _wait(faults.workload_raise_event)
    assert "callback" in caplog.text


def test_workload_exception_is_raised_once() -> None:
    """The exception comes once for each fault, and not at all when it is cleared."""
    faults.maybe_raise_workload_exception()
    faults.workload_raise_event.set()
    with pytest.raises(faults.InjectedException):
        faults.maybe_raise_workload_exception()
    faults.maybe_raise_workload_exception()
    faults.workload_raise_event.set()
    faults.clear_workload_exception()
    faults.maybe_raise_workload_exception()


@pytest.mark.parametrize(
    "fault",
    [each for each in Fault if not each.name.startswith(("GPU", "OOM_GPU", "DISK", "CLOCK"))],
)
def test_cancelled_in_time(fault: Fault, caplog: pytest.LogCaptureFixture) -> None:
    """A cancelled fault does not happen, and nothing of it is left behind, handlers included."""
    before = signal.getsignal(signal.SIGUSR1)
    called = threading.Event()
    handle = dispatch_fault_injection(fault, 30, called.set)
    assert handle.cancel() is True
    assert handle.cancel() is True
    assert (handle.cancelled, handle.fired, called.is_set()) == (True, False, False)
    assert signal.getsignal(signal.SIGUSR1) == before
    assert not caplog.records


def test_many_at_one_moment() -> None:
    """Of faults that are dispatched for the same moment none waits for another."""
    times: list[float] = []
    done = threading.Barrier(17)

    def callback() -> None:
        times.append(time.monotonic())
        # Passed only while all of them are here.
        done.wait(20)

    start = time.monotonic()
    for _ in range(16):
        dispatch_fault_injection(Fault.WORKLOAD_EXC, 0.2, callback)
    done.wait(20)
    assert min(times) - start >= 0.2


def test_switched_off(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """With NVRX_FAULT_INJECTION=0 every dispatch does nothing but warn."""
    monkeypatch.setenv("NVRX_FAULT_INJECTION", "0")
    faults.register_fault("COFFEE", lambda *_: os.abort())
    for fault in Fault:
        assert dispatch_fault_injection(fault, 0, os.abort).cancelled
    assert faults.inject_fault(Fault.SIGKILL, 1, 0, 0, 1) is not None
    faults.abort(0, None)
    faults.send_signal(os.getpid(), signal.SIGKILL, 0, None)
    assert {each.levelno for each in caplog.records} == {logging.WARNING}
    assert len(caplog.records) == len(Fault) + 3
    assert "NVRX_FAULT_INJECTION" in caplog.text


@pytest.mark.parametrize("name", ["SIGNAL_EXC", "HANG", "SLOWDOWN"])
def test_refused_off_the_main_thread(name: str) -> None:
    """Faults that need a signal handler are refused where none can be installed, with the reason.

    In a process of its own: a handler that is there already serves other threads as well.
    """
    program = (
        "import threading, sys\n"
        "from nvidia_resiliency_ext.shared_utils.inject_fault import *\n"
        "def run():\n"
        f"    try: dispatch_fault_injection(Fault.{name}, 0)\n"
        "    except RuntimeError as error: print(error)\n"
        "thread = threading.Thread(target=run); thread.start(); thread.join()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=150, check=True
    )
    assert name in done.stdout
    assert "main thread" in done.stdout


@pytest.mark.parametrize("name", ["GPU_ERROR", "GPU_SLEEP", "OOM_GPU"])
def test_gpu_faults_without_cuda(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without torch, or without CUDA, the dispatch is refused at once and names the fault."""
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(RuntimeError, match=f"{name} .*torch cannot be imported"):
        dispatch_fault_injection(Fault[name], 0)
    fake = SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: False))
    monkeypatch.setitem(sys.modules, "torch", fake)
    with pytest.raises(RuntimeError, match=f"{name} .*CUDA is not available"):
        dispatch_fault_injection(Fault[name], 0)
    with pytest.raises(RuntimeError, match="GPU_SLEEP"):
        faults.gpu_sleep(0, 0, None)


def test_gpu_faults_use_the_device_of_the_dispatch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is the one that is current in the thread that dispatches; torch is a stand-in."""
    launched = threading.Event()
    entered: list[int] = []

    @contextlib.contextmanager
    def device(index: int) -> Iterator[None]:
        entered.append(index)
        yield

    cuda = SimpleNamespace(
        is_available=lambda: True,
        current_device=lambda: 3 if threading.current_thread() is threading.main_thread() else 0,
        device=device,
        _sleep=lambda _: launched.set(),
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    dispatch_fault_injection(Fault.GPU_SLEEP, 0)
    _wait(launched)
    faults.gpu_sleep(0, 5, None)
    assert entered == [3, 5]


def test_gpu_memory_is_held_until_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are taken until the smallest fails, and given back when cancelled; with a stand-in."""

    class NoMemoryError(RuntimeError):
        pass

    free, sizes, full = 5 << 30, [], threading.Event()

    def empty(size: int, **_: object) -> object:
        nonlocal free
        if size > free:
            if size == 1 << 20:
                full.set()
            raise NoMemoryError
        free -= size
        sizes.append(size)
        return object()

    cuda = SimpleNamespace(
        is_available=lambda: True, current_device=lambda: 0, OutOfMemoryError=NoMemoryError
    )
    torch = SimpleNamespace(cuda=cuda, empty=empty, uint8=None)
    monkeypatch.setitem(sys.modules, "torch", torch)
    handle = dispatch_fault_injection(Fault.OOM_GPU, 0)
    _wait(full)
    assert handle.cancel() is False
    assert sum(sizes) == 5 << 30
    for holder in [each for each in threading.enumerate() if "OOM_GPU" in each.name]:
        holder.join(20)
        assert not holder.is_alive()


@pytest.mark.parametrize(
    ("directory", "reason"),
    [
        ("", "NVRX_FAULT_DISK_DIR"),
        ("relative", "NVRX_FAULT_DISK_DIR"),
        ("/", "NVRX_FAULT_DISK_DIR"),
        ("/nowhere/at/all", "cannot be written"),
        ("here", "no mount of its own"),
    ],
)
def test_disk_is_refused(
    directory: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No disk is filled that is not named, or that is not a mount of its own."""
    monkeypatch.setenv("NVRX_FAULT_DISK_DIR", str(tmp_path) if directory == "here" else directory)
    with pytest.raises(RuntimeError, match=f"DISK_FULL .*{reason}"):
        dispatch_fault_injection(Fault.DISK_FULL, 0)


def test_clock_is_refused_without_the_right() -> None:
    """Without the right to set the clock the dispatch is refused; here in a user namespace.

    Root of a namespace of its own has every right there, but none over the machine's clock.
    """
    program = (
        "from nvidia_resiliency_ext.shared_utils.inject_fault import *\n"
        "try: dispatch_fault_injection(Fault.CLOCK_SKEW, 3600).cancel()\n"
        "except RuntimeError as error: print(error)\n"
    )
    command = [sys.executable, "-c", program]
    tried = subprocess.run(["unshare", "--user", "true"], check=False, timeout=150)
    if os.geteuid() == 0 and tried.returncode:
        pytest.skip("root can give up no right here")
    prefix = [] if tried.returncode else ["unshare", "--user", "--map-root-user"]
    done = subprocess.run(
        [*prefix, *command], capture_output=True, text=True, timeout=150, check=True
    )
    assert "CLOCK_SKEW" in done.stdout
    assert "CAP_SYS_TIME" in done.stdout


def test_clock_jumps_and_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock goes an hour ahead, and back by as much however long that lasted."""
    clock, moved, stop = ManualClock(), threading.Event(), threading.Event()
    offset = 0.0

    def write(_: int, wall_s: float) -> None:
        nonlocal offset
        offset = wall_s - clock.wall()
        moved.set()

    monkeypatch.setattr(resources, "_may_set_clock", lambda: True)
    fake_time = SimpleNamespace(
        time=lambda: clock.wall() + offset, clock_settime=write, CLOCK_REALTIME=0
    )
    monkeypatch.setattr(resources, "time", fake_time)
    skew = resources.skew_clock()
    thread = threading.Thread(target=skew.act, args=(stop,))
    thread.start()
    _wait(moved)
    assert offset == resources.SKEW_S
    clock.advance(100.0)
    stop.set()
    thread.join(20)
    assert offset == 0.0


def test_async_raise() -> None:
    """The exception arrives in the thread that is named; one that does not exist is an error."""
    ready, caught = threading.Event(), threading.Event()

    def work() -> None:
        try:
            ready.set()
            while True:
                time.sleep(0.001)
        except faults.InjectedException:
            caught.set()

    thread = threading.Thread(target=work)
    thread.start()
    _wait(ready)
    assert thread.ident is not None
    faults.async_raise_exception(thread.ident, 0, None)
    _wait(caught)
    thread.join(20)
    with pytest.raises(RuntimeError, match="no thread"):
        faults.async_raise(0, faults.InjectedException)
    with pytest.raises(TypeError, match="exception class"):
        faults.async_raise(0, "InjectedException")  # type: ignore[arg-type]


def test_plain_functions(caplog: pytest.LogCaptureFixture) -> None:
    """A fault as a function waits, logs, calls back and acts, all before it returns."""
    called = threading.Event()
    start = time.monotonic()
    faults.workload_exception(0.05, called.set)
    assert called.is_set()
    assert faults.workload_raise_event.is_set()
    assert time.monotonic() - start >= 0.05
    with subprocess.Popen(["sleep", "60"]) as process:
        faults.send_signal(process.pid, signal.SIGTERM, 0, None)
        assert process.wait(20) == -signal.SIGTERM
    with pytest.raises(faults.InjectedException):
        faults.termination_signal_handler(signal.SIGUSR1, None)
    assert [each.levelno for each in caplog.records] == [logging.CRITICAL] * 2
    assert faults.ctx.get_start_method() == "spawn"


def test_draw_is_alike_on_all_ranks() -> None:
    """Ranks with the same arguments draw the same plan; another seed draws another."""
    choices = (Fault.SIGKILL, Fault.SIGTERM, Fault.SEGFAULT)
    plans = [draw_plan(choices, (1, 3), 2, (1.0, 9.0), seed, 8) for seed in range(200)]
    again = [draw_plan(list(choices), (1, 3), 2, (1, 9), seed, 8) for seed in range(200)]
    assert plans == again
    drawn, ranks, delays = zip(*plans, strict=True)
    assert set(drawn) == set(choices)
    assert {len(own) for own in ranks} == {1, 2, 3}
    assert {rank for own in ranks for rank in own} == {2, 3, 4, 5, 6, 7}
    assert all(1.0 <= delay <= 9.0 for delay in delays)
    assert len(set(delays)) > 100


@pytest.mark.parametrize(
    ("num_faults", "keep_alive", "world_size", "expected"),
    [(5, 1, 4, 3), (1, 4, 4, 0), (1, 9, 4, 0), (0, 0, 4, 0), (2, 0, 4, 2), ((4, 9), 3, 4, 1)],
)
def test_number_of_victims(
    num_faults: int | tuple[int, int], keep_alive: int, world_size: int, expected: int
) -> None:
    """The ranks to keep alive are never chosen, also where nobody is left to choose."""
    _, ranks, delay = draw_plan(Fault.SIGKILL, num_faults, keep_alive, 2, 1, world_size)
    assert len(ranks) == expected
    assert all(keep_alive <= rank < world_size for rank in ranks)
    assert delay == 2.0


@pytest.mark.parametrize(
    ("choices", "num_faults", "delay"),
    [((), 1, 1.0), (Fault.SIGINT, (2, 1), 1.0), (Fault.SIGINT, 1, (2.0, 1.0)), (Fault.HANG, -1, 1)],
)
def test_draws_that_cannot_be(
    choices: tuple[Fault, ...], num_faults: int | tuple[int, int], delay: tuple[float, float]
) -> None:
    """No fault to choose from, and pairs out of order, are errors."""
    with pytest.raises(ValueError, match=r"fault|pair"):
        draw_plan(choices, num_faults, 0, delay, 1, 4)


def test_inject_fault_reads_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank that the plan names dispatches the fault, all others do nothing."""
    monkeypatch.setenv("WORLD_SIZE", "4")
    handles = []
    for rank in range(4):
        monkeypatch.setenv("RANK", str(rank))
        handles.append(faults.inject_fault((Fault.WORKLOAD_EXC,), 2, 1, 30, 7))
    chosen = [handle for handle in handles if handle is not None]
    assert (handles[0], len(chosen)) == (None, 2)
    assert all(handle.cancel() for handle in chosen)


def test_imports_little() -> None:
    """Importing the module brings neither torch nor anything else that costs start-up time."""
    program = (
        "import sys, nvidia_resiliency_ext.shared_utils.inject_fault\n"
        "names = ('torch', 'numpy', 'multiprocessing', 'subprocess', 'ctypes', 'random', 'inspect')"
        "\nprint([name for name in names if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", program], capture_output=True, text=True, timeout=150,
        check=True, env={**os.environ, "PYTHONPATH": str(Path(faults.__file__).parents[2])},
    )  # fmt: skip
    assert done.stdout == "[]\n"
