# SPDX-License-Identifier: Apache-2.0
"""Health checks of a rank: a device that answers, faults counted, the node's checks adapted."""

import logging
import threading
from datetime import timedelta

import pytest

from nvidia_resiliency_ext.inprocess import exception
from nvidia_resiliency_ext.inprocess.health_check import (
    ChainedGPUHealthCheck,
    ChainedNicHealthCheck,
    ChainedNVLHealthCheck,
    CudaHealthCheck,
    FaultCounter,
    FaultCounterExceeded,
    checks_of_each_restart,
)
from nvidia_resiliency_ext.inprocess.state import State
from nvidia_resiliency_ext.shared_utils import health_check as shared
from nvidia_resiliency_ext.shared_utils._health.check import _logged
from nvidia_resiliency_ext.testing_utils.fake_hardware import FakeNvml

LONG = timedelta(seconds=30)
SHORT = timedelta(milliseconds=30)
STATE = State(1, 2, 1, 2).freeze()
RECOVERY_ACTION = "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION"
CHAINED = (ChainedGPUHealthCheck, ChainedNVLHealthCheck, ChainedNicHealthCheck)


class StandInCuda:
    """Stands in for `torch.cuda` of a process that uses one device.

    Attributes:
        answers: What each synchronisation does: an error to raise, an event to wait for.
        calls: The device and the thread of each synchronisation.
    """

    def __init__(self, *answers) -> None:
        self.answers = list(answers)
        self.calls = []
        self.ended = threading.Event()

    def is_initialized(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def synchronize(self, device) -> None:
        self.calls.append((device, threading.current_thread().name))
        answer = self.answers.pop(0) if self.answers else None
        if isinstance(answer, Exception):
            raise answer
        if answer is not None:
            answer.wait(30)
            self.ended.set()


@pytest.fixture
def cuda(monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.delenv("LOCAL_RANK", raising=False)

    def install(*answers):
        stand_in = StandInCuda(*answers)
        monkeypatch.setattr(torch, "cuda", stand_in)
        return stand_in

    return install


def test_process_without_cuda_passes() -> None:
    """Where CUDA is not in use nothing is looked at, and CUDA is not started."""
    torch = pytest.importorskip("torch")
    if torch.cuda.is_initialized():
        pytest.skip("another test has used CUDA in this process")
    assert CudaHealthCheck()(STATE) is STATE
    assert not torch.cuda.is_initialized()


def test_sound_device_with_stand_in_cuda(cuda) -> None:
    """The device is synchronised twice, both times in the thread that is waited for."""
    stand_in = cuda()
    assert CudaHealthCheck(LONG)(STATE) is STATE
    assert stand_in.calls == [(0, "CudaHealthCheck-1")] * 2


@pytest.mark.parametrize("sound_calls", [0, 1])
def test_device_that_hangs_with_stand_in_cuda(cuda, sound_calls) -> None:
    """A hang of the first and of the second synchronisation are both a timeout."""
    release = threading.Event()
    answers = [None] * sound_calls + [release]
    stand_in = cuda(*answers)
    try:
        with pytest.raises(exception.TimeoutError, match="CudaHealthCheck-1"):
            CudaHealthCheck(SHORT)(STATE)
    finally:
        release.set()
    assert stand_in.ended.wait(30)
    assert len(stand_in.calls) >= sound_calls + 1


def test_device_in_error_with_stand_in_cuda(cuda, caplog) -> None:
    """An error that lasts is raised as it is; one that was left over from the fault is logged."""
    lasting = RuntimeError("CUDA error: unspecified launch failure")
    cuda(RuntimeError("first"), lasting)
    with pytest.raises(RuntimeError) as caught:
        CudaHealthCheck(LONG)(STATE)
    assert caught.value is lasting
    stand_in = cuda(RuntimeError("left over"))
    assert CudaHealthCheck(LONG)(STATE) is STATE
    assert len(stand_in.calls) == 2
    assert "left over" in caplog.text


@pytest.mark.gpu
def test_sound_device() -> None:
    """A real device that works passes, with work under way."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("there is no GPU here")
    values = torch.randn(512, 512, device="cuda")
    for _ in range(20):
        values = values @ values
        values /= values.norm()
    assert CudaHealthCheck(LONG)(STATE) is STATE


@pytest.mark.gpu
def test_device_that_hangs() -> None:
    """A real kernel that runs longer than the timeout is a timeout; later the device is sound."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("there is no GPU here")
    torch.zeros(1, device="cuda")
    torch.cuda._sleep(4_000_000_000)  # cycles: two seconds
    with pytest.raises(exception.TimeoutError):
        CudaHealthCheck(timedelta(milliseconds=100))(STATE)
    assert CudaHealthCheck(LONG)(STATE) is STATE


@pytest.mark.parametrize("timeout", [30, None])
def test_timeout_of_cuda_check_is_a_timedelta(timeout) -> None:
    """A number of seconds is a TypeError."""
    with pytest.raises(TypeError, match="timeout"):
        CudaHealthCheck(timeout)


def _at(iteration, error=None):
    return State(0, 1, iteration=iteration, fn_exception=error).freeze()


def test_faults_are_counted() -> None:
    """Only restarts that this rank has caused count, and one too many is an error."""
    counter, error = FaultCounter(max_rank_faults=2), ValueError("x")
    for given in (_at(0), _at(0, error), _at(1), _at(1), _at(2), _at(2, error)):
        assert counter(given) is given
    assert counter.faults_count == 2
    counter(_at(3))
    with pytest.raises(FaultCounterExceeded, match="faults_count=3 / max_rank_faults=2"):
        counter(_at(3, error))
    assert issubclass(FaultCounterExceeded, exception.RestartError)


def test_faults_are_counted_within_one_call() -> None:
    """When iterations start again with a new call, so does the count."""
    counter, error = FaultCounter(1), ValueError("x")
    for _ in range(3):
        counter(_at(0))
        counter(_at(0, error))
        counter(_at(1))
    unlimited = FaultCounter()
    for iteration in range(1000):
        unlimited(_at(iteration, error))


@pytest.mark.parametrize("limit", ["3", 1.5, False])
def test_limit_of_faults_is_an_integer(limit) -> None:
    """Another type is a TypeError that names the argument."""
    with pytest.raises(TypeError, match="max_rank_faults"):
        FaultCounter(limit)


@pytest.fixture
def nvml(monkeypatch):
    """Two sound GPUs behind a stand-in of the driver's binding, and CUDA not in use."""
    for name in ("CUDA_VISIBLE_DEVICES", "NVRX_EXPECTED_GPUS", "NVRX_NVML_SUBPROCESS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("nvidia_resiliency_ext.inprocess.health_check.is_in_use", lambda: False)
    numbers = FakeNvml({})
    recovery = getattr(numbers, RECOVERY_ACTION, 274)
    fake = FakeNvml({"driver": "575.1", "count": 2, f"field.0.{recovery}": 0})
    fake.recovery = recovery
    for gpu in range(2):
        fake.answers[f"field.{gpu}.{recovery}"] = 0
    shared.set_nvml(fake)
    yield fake
    shared.set_nvml(None)


@pytest.mark.parametrize("kind", CHAINED)
def test_host_without_hardware_passes(kind, monkeypatch, caplog) -> None:
    """Without driver and adapter every check passes, with at most one line, however often."""
    caplog.set_level(logging.INFO, "nvrx")
    shared.set_nvml(FakeNvml({"return.nvmlInit": 9}))
    try:
        for local_rank in (0, 3, None):
            check = kind(device_index=local_rank)
            assert check.device_index == local_rank
            caplog.clear()
            for _ in range(3):
                assert check(STATE) is STATE
            assert len(caplog.records) <= 1
    finally:
        shared.set_nvml(None)


def test_checks_that_nobody_asked_for_are_silent_without_hardware(caplog) -> None:
    """What each restart looks at by itself says only at DEBUG that there is nothing to look at."""
    caplog.set_level(logging.DEBUG, "nvrx")
    _logged.clear()
    shared.set_nvml(FakeNvml({"return.nvmlInit": 9}))
    try:
        for check in checks_of_each_restart(0):
            assert check(STATE) is STATE
    finally:
        shared.set_nvml(None)
    said = [record.levelno for record in caplog.records if "is skipped" in record.getMessage()]
    assert said
    assert set(said) == {logging.DEBUG}


def test_sound_gpu_passes_and_bad_gpu_fails_with_stand_in_driver(nvml) -> None:
    """A GPU of which the driver wants something is an error that names it; the other one passes."""
    checks = [ChainedGPUHealthCheck(device_index=0), ChainedGPUHealthCheck(device_index=1)]
    for check in checks:
        assert check(STATE) is STATE
    nvml.answers[f"field.1.{nvml.recovery}"] = 1
    assert checks[0](STATE) is STATE
    with pytest.raises(exception.HealthCheckError, match="GPU 1: the driver asks to reset"):
        checks[1](STATE)


def test_missing_device_is_skipped_with_stand_in_driver(nvml, caplog, monkeypatch) -> None:
    """A rank that does not use CUDA needs no GPU: one line; for one that does it is lost."""
    caplog.set_level(logging.INFO, "nvrx")
    check = ChainedGPUHealthCheck(device_index=5)
    for _ in range(3):
        assert check(STATE) is STATE
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 1
    assert "no GPU for local rank 5" in lines[0]
    monkeypatch.setattr("nvidia_resiliency_ext.inprocess.health_check.is_in_use", lambda: True)
    with pytest.raises(exception.HealthCheckError):
        check(STATE)


def test_bad_nvlink_is_logged_only_with_stand_in_driver(nvml, caplog) -> None:
    """A link that is down is a warning, and the rank goes on."""
    caplog.set_level(logging.INFO, "nvrx")
    nvml.answers["field.0.91"] = 2
    nvml.answers["link.0.0"], nvml.answers["link.0.1"] = 1, 0
    assert ChainedNVLHealthCheck(device_index=0)(STATE) is STATE
    assert any(record.levelno == logging.WARNING for record in caplog.records)


class StandInCheck:
    """Stands in for a shared check that finds what it is told to."""

    result = shared.HealthResult("nic", "unhealthy", "port 1 went down 2 more times", "mlx5_0")

    def __init__(self, device_index=None) -> None:
        self.device_index = device_index

    def has_device(self, local_rank):
        return local_rank == self.device_index

    def check(self):
        return self.result


def test_bad_adapter_is_an_error_with_stand_in_check(monkeypatch) -> None:
    """An adapter with a link that went down makes the rank unfit, and the text names both."""
    monkeypatch.setattr(shared, "NicHealthCheck", StandInCheck)
    with pytest.raises(exception.HealthCheckError, match=r"mlx5_0.*went down 2"):
        ChainedNicHealthCheck(device_index=0)(STATE)


def test_check_that_cannot_be_set_up_is_skipped(monkeypatch, caplog) -> None:
    """An error while a check is made is a line, not an error of the program or the rank."""
    caplog.set_level(logging.INFO, "nvrx")

    def fail(device_index=None):
        raise OSError("no such file")

    monkeypatch.setattr(shared, "NicHealthCheck", fail)
    check = ChainedNicHealthCheck(device_index=0)
    assert check(STATE) is STATE
    assert "ChainedNicHealthCheck is skipped: it cannot be set up: OSError" in caplog.text


@pytest.mark.gpu
@pytest.mark.parametrize("kind", CHAINED)
def test_sound_node_passes(kind) -> None:
    """On a real node with a sound GPU every check passes."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("there is no GPU here")
    assert kind(device_index=0)(STATE) is STATE
