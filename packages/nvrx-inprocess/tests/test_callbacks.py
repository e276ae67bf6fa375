# SPDX-License-Identifier: Apache-2.0
"""Base classes of callbacks, the limit of restarts, clean-up in a thread, older rank filters."""

import contextlib
import subprocess
import sys
import threading
import warnings
from datetime import timedelta

import pytest

from nvidia_resiliency_ext.inprocess import exception, rank_filter
from nvidia_resiliency_ext.inprocess.abort import Abort, AbortTorchDistributed
from nvidia_resiliency_ext.inprocess.completion import Completion
from nvidia_resiliency_ext.inprocess.finalize import Finalize, ThreadedFinalize
from nvidia_resiliency_ext.inprocess.health_check import (
    ChainedGPUHealthCheck,
    ChainedNicHealthCheck,
    HealthCheck,
)
from nvidia_resiliency_ext.inprocess.initialize import Initialize, RetryController
from nvidia_resiliency_ext.inprocess.nested_restarter import (
    NestedRestarterFinalized,
    NestedRestarterHandlingCompleted,
)
from nvidia_resiliency_ext.inprocess.progress_watchdog import ProgressWatchdog
from nvidia_resiliency_ext.inprocess.rank_assignment import Tree
from nvidia_resiliency_ext.inprocess.sibling_monitor import Heartbeat
from nvidia_resiliency_ext.inprocess.state import FrozenState, Mode, State
from nvidia_resiliency_ext.inprocess.terminate import Terminate
from nvidia_resiliency_ext.shared_utils.abandonable import StuckError
from nvidia_resiliency_ext.shared_utils.errors import NvrxError

LONG = timedelta(seconds=30)
SHORT = timedelta(milliseconds=20)


def state(**fields) -> FrozenState:
    given = {"rank": 0, "world_size": 4, "active_rank": 0, "active_world_size": 4, **fields}
    return State(**given).freeze()


@pytest.mark.parametrize("base", [Initialize, Abort, Finalize, HealthCheck, Completion, Terminate])
def test_base_classes_want_a_call(base) -> None:
    """A base class cannot be made; a subclass with a call can."""
    with pytest.raises(TypeError, match="abstract"):
        base()
    made = type("Made", (base,), {"__call__": lambda _, state: state})()
    assert made("state") == "state"


def test_errors_and_their_kinds() -> None:
    """Errors can be caught as what they do; the end of the wrapper is no `Exception`."""
    for error in (exception.HealthCheckError, exception.InternalError, exception.TimeoutError):
        assert issubclass(error, exception.RestartError)
    assert issubclass(exception.RestartError, NvrxError)
    assert not issubclass(exception.RestartAbort, Exception)


@pytest.mark.parametrize(
    ("limits", "fields"),
    [
        ({"max_iterations": 3}, {"iteration": 3}),
        ({"max_iterations": 0}, {}),
        ({"min_world_size": 5}, {}),
        ({"min_active_world_size": 4}, {"active_world_size": 3}),
        ({"min_active_world_size": 5}, {"active_rank": None, "active_world_size": None}),
    ],
)
def test_retry_controller_ends_the_job(limits, fields) -> None:
    """Too many iterations or too few ranks end the wrapper, with all numbers in the text."""
    given = state(**fields)
    with pytest.raises(exception.RestartAbort) as caught:
        RetryController(**limits)(given)
    assert f"state.iteration={given.iteration}" in str(caught.value)
    for name, value in limits.items():
        assert f"self.{name}={value}" in str(caught.value)


def test_retry_controller_lets_go_on() -> None:
    """At the limits themselves the state is returned."""
    given = state(iteration=2)
    controller = RetryController(max_iterations=3, min_world_size=4, min_active_world_size=4)
    assert controller(given) is given
    assert RetryController()(state(iteration=10**6)) == state(iteration=10**6)


@pytest.mark.parametrize(
    "limits", [{"max_iterations": "3"}, {"min_world_size": None}, {"min_active_world_size": True}]
)
def test_retry_controller_wants_integers(limits) -> None:
    """A limit that is no integer is a TypeError that names it."""
    with pytest.raises(TypeError, match=next(iter(limits))):
        RetryController(**limits)


def test_threaded_finalize_runs_in_a_daemon_thread() -> None:
    """The function gets its arguments, in a daemon thread named after class and rank."""
    seen = []

    def clean(*args, **kwargs):
        thread = threading.current_thread()
        seen.append((args, kwargs, thread.name, thread.daemon))

    given = state(rank=3)
    assert ThreadedFinalize(LONG, clean, (1, 2), {"key": 3})(given) is given
    assert ThreadedFinalize(timeout=LONG, fn=clean)(given) is given
    assert seen[0] == ((1, 2), {"key": 3}, "ThreadedFinalize-3", True)
    assert seen[1][:2] == ((), {})
    left = [thread for thread in threading.enumerate() if thread.name == "ThreadedFinalize-3"]
    for thread in left:  # it has answered, and is about to end
        thread.join(30)
        assert not thread.is_alive()


def test_a_hung_call_inside_a_finalizer_is_not_taken_for_its_own_timeout() -> None:
    """The error that the function raised comes through with what it says."""

    def stuck() -> None:
        raise StuckError("NVML", 3.0)

    with pytest.raises(StuckError, match="NVML has not returned"):
        ThreadedFinalize(LONG, stuck)(state())


@pytest.mark.parametrize("error", [KeyError("x"), SystemExit(3), ValueError(threading.Lock())])
def test_threaded_finalize_raises_what_was_raised(error) -> None:
    """The very exception of the function comes out, so the process is not taken for clean."""

    def clean():
        raise error

    with pytest.raises(type(error)) as caught:
        ThreadedFinalize(LONG, clean)(state())
    assert caught.value is error


def test_threaded_finalize_waits_no_longer() -> None:
    """What has not ended in time is a timeout that names thread and limit."""
    release, ended = threading.Event(), threading.Event()

    def clean():
        release.wait(30)
        ended.set()

    try:
        with pytest.raises(exception.TimeoutError, match=r"ThreadedFinalize-0 .* 0:00:00\.02"):
            ThreadedFinalize(SHORT, clean)(state())
    finally:
        release.set()
    assert ended.wait(30)


def test_longest_timeout_is_long_enough() -> None:
    """The longest timedelta there is works as a timeout."""
    assert ThreadedFinalize(timedelta.max, lambda: None)(state()) == state()


@pytest.mark.parametrize(
    ("arguments", "name"), [((3, print), "timeout"), ((LONG, None), "fn"), ((LONG, 3), "fn")]
)
def test_threaded_finalize_checks_its_arguments(arguments, name) -> None:
    """A wrong argument is a TypeError that names it."""
    with pytest.raises(TypeError, match=name):
        ThreadedFinalize(*arguments)


class StandInDevices:
    """Stands in for `torch.cuda` of a process that uses CUDA: two devices, the second current."""

    def __init__(self) -> None:
        self.current = threading.local()
        self.current.device = 1

    def is_initialized(self) -> bool:
        return True

    def device_count(self) -> int:
        return 2

    def current_device(self) -> int:
        return getattr(self.current, "device", 0)

    @contextlib.contextmanager
    def device(self, device):
        self.current.device = device
        yield


@pytest.mark.parametrize(("local_rank", "device"), [("0", 0), ("7", 1), ("x", 1), (None, 1)])
def test_threaded_finalize_has_the_ranks_device_with_stand_in_cuda(
    monkeypatch, local_rank, device
) -> None:
    """The thread has the device of LOCAL_RANK, or the caller's where there is no such device."""
    torch = pytest.importorskip("torch")
    cuda = StandInDevices()
    monkeypatch.setattr(torch, "cuda", cuda)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if local_rank is not None:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    seen = []
    ThreadedFinalize(LONG, lambda: seen.append(cuda.current_device()))(state())
    assert seen == [device]


@pytest.mark.gpu
def test_threaded_finalize_has_the_ranks_device(monkeypatch) -> None:
    """On a real device the thread works on the device of LOCAL_RANK."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("there is no GPU here")
    last = torch.cuda.device_count() - 1
    monkeypatch.setenv("LOCAL_RANK", str(last))
    torch.zeros(1, device="cuda:0")
    seen = []

    def clean():
        seen.append((torch.cuda.current_device(), torch.zeros(1, device="cuda").device.index))
        torch.cuda.empty_cache()

    ThreadedFinalize(LONG, clean)(state())
    assert seen == [(last, last)]


def _filter(name, *args):
    with pytest.warns(DeprecationWarning, match=rf"rank_filter\.{name} .*rank_assignment") as seen:
        made = getattr(rank_filter, name)(*args)
    assert seen[0].filename == __file__
    return made


@pytest.mark.parametrize(
    ("name", "argument", "active"),
    [
        ("MaxActiveWorldSize", 4, 4),
        ("MaxActiveWorldSize", None, 6),
        ("ActiveWorldSizeDivisibleBy", 4, 4),
        ("WorldSizeDivisibleBy", 5, 5),
    ],
)
def test_older_filters_choose_the_first_ranks(name, argument, active) -> None:
    """The first ranks are active and all agree on their number; who is not has no active rank."""
    chosen = _filter(name, argument)
    for rank in range(6):
        result = chosen(State(rank, 6))
        assert result.active_world_size == active
        assert result.mode is (Mode.ACTIVE if rank < active else Mode.INACTIVE)
        assert result.active_rank == (rank if rank < active else None)


def test_older_filters_follow_an_earlier_choice() -> None:
    """A filter never activates what an earlier step has left out."""
    assert _filter("MaxActiveWorldSize", 7)(State(5, 8, 5, 6)).active_world_size == 6
    assert _filter("ActiveWorldSizeDivisibleBy", 4)(State(5, 8, 5, 6)).mode is Mode.INACTIVE


@pytest.mark.parametrize("argument", [0, -1])
@pytest.mark.parametrize("name", ["MaxActiveWorldSize", "ActiveWorldSizeDivisibleBy"])
def test_older_filters_check_their_argument(name, argument) -> None:
    """A number below one is a ValueError, another type a TypeError."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        with pytest.raises(ValueError, match="at least 1"):
            getattr(rank_filter, name)(argument)
        with pytest.raises(TypeError, match="integer"):
            getattr(rank_filter, name)("4")


def test_the_package_imports_little_beside_torch() -> None:
    """Nothing that talks to the driver, and no other package than nvrx-common."""
    program = """
import sys, torch
sys.modules.pop("pynvml", None)  # torch looks for it
import nvidia_resiliency_ext.inprocess as inprocess
assert inprocess.abort and inprocess.store and inprocess.compose
import nvidia_resiliency_ext.inprocess.rank_filter
import nvidia_resiliency_ext.inprocess.tools.inject_fault
foreign = ("pynvml", "grpc", "nvidia_resiliency_ext.fault_tolerance",
           "nvidia_resiliency_ext.checkpointing", "nvidia_resiliency_ext.attribution.")
print(sorted(name for name in sys.modules if name.startswith(foreign)))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=150, check=False
    )
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.parametrize(
    ("make", "arguments", "name"),
    [
        (AbortTorchDistributed, {"timeout": 5}, "timeout"),
        (AbortTorchDistributed, {"timeout": timedelta(seconds=-1)}, "timeout"),
        (AbortTorchDistributed, {"torch_fr_trace_path": 5}, "torch_fr_trace_path"),
        (ChainedGPUHealthCheck, {"device_index": "0"}, "device_index"),
        (ChainedNicHealthCheck, {"device_index": -1}, "device_index"),
        (NestedRestarterFinalized, {"special_rank": "0"}, "special_rank"),
        (NestedRestarterHandlingCompleted, {"special_rank": -1}, "special_rank"),
        (Tree, {"layers": 5}, "layers"),
        (Heartbeat, {"rank": 0, "store": None, "interval": 1, "timeout": LONG}, "interval"),
        (Heartbeat, {"rank": 0, "store": None, "interval": LONG, "timeout": 1}, "timeout"),
        (ProgressWatchdog, {"rank": 0, "monitor_process": None, "interval": 1}, "interval"),
    ],
    ids=str,
)
def test_arguments_are_checked_when_given(make, arguments, name) -> None:
    """A mistaken argument is named when the object is made, not at the first fault."""
    with pytest.raises((TypeError, ValueError), match=f"^{name} must "):
        make(**arguments)
