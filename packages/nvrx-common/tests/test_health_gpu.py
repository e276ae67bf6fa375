# SPDX-License-Identifier: Apache-2.0
"""Checks of GPUs and NVLinks over an object in place of the binding."""

import logging
import threading
import time

import pytest

from nvidia_resiliency_ext.shared_utils import health_check
from nvidia_resiliency_ext.shared_utils._health import check as checking
from nvidia_resiliency_ext.shared_utils._health.devices import (
    device_of_rank,
    full_uuid,
    visible_devices,
)
from nvidia_resiliency_ext.shared_utils._health.gpu import driver_major, parse_kmsg
from nvidia_resiliency_ext.shared_utils.health_check import (
    GPUHealthCheck,
    NVLHealthCheck,
    NVLinkWindowHealthCheck,
)
from nvidia_resiliency_ext.shared_utils.memory import GPUMemoryLogger
from nvidia_resiliency_ext.testing_utils.fake_hardware import FakeNvml

RECOVERY = 230
LINK_COUNT = 91


@pytest.fixture
def nvml(monkeypatch):
    """Return a driver with two healthy GPUs of two links each, in place of the binding."""
    for name in (
        "CUDA_VISIBLE_DEVICES",
        "LOCAL_RANK",
        "NVRX_EXPECTED_GPUS",
        "NVRX_NVML_SUBPROCESS",
    ):
        monkeypatch.delenv(name, raising=False)
    answers: dict[str, object] = {"count": 2}
    for gpu in range(2):
        answers[f"field.{gpu}.{RECOVERY}"] = 0
        answers[f"field.{gpu}.{LINK_COUNT}"] = 2
        answers |= {f"link.{gpu}.{link}": 1 for link in range(2)}
    fake = FakeNvml(answers)
    checking._logged.clear()
    health_check.set_nvml(fake)
    yield fake
    fake.released.set()
    health_check.set_nvml(None)


def gpu_check(**options):
    return GPUHealthCheck(kmsg="/nonexistent", **options)


class _BrokenBinding:
    """A binding that does not do what it is asked for, from a given call on."""

    NVMLError = FakeNvml({}).NVMLError
    NVML_FI_DEV_GET_GPU_RECOVERY_ACTION = RECOVERY

    def __init__(self, works):
        self._works = works

    def __getattr__(self, name):
        if name in self._works:
            return lambda *_: self._works[name]
        return lambda *_: {}["broken"]


@pytest.mark.parametrize(
    "works",
    [
        {},
        {"nvmlInit": None},
        {"nvmlInit": None, "nvmlSystemGetDriverVersion": "575.1", "nvmlDeviceGetCount": None},
        {"nvmlInit": None, "nvmlSystemGetDriverVersion": "575.1", "nvmlDeviceGetCount": 1},
    ],
)
def test_broken_binding_is_no_broken_hardware(nvml, works, tmp_path) -> None:
    """A binding that raises anything at all makes nothing unhealthy, and no caller gets it."""
    health_check.set_nvml(_BrokenBinding(works))
    checks = [gpu_check(), NVLHealthCheck(), NVLinkWindowHealthCheck(0)]
    for check in checks:
        result = check.check()
        assert result.status == "skipped"
        assert "binding fails at" in result.reason
    assert GPUMemoryLogger().get_gpu_memory(0) is None
    assert gpu_check().enabled in (True, False)
    assert health_check.NicHealthCheck(0, sysfs_root=str(tmp_path))()
    mixin = health_check.PynvmlMixin()
    assert (mixin.get_gpu_pci_mapping(), mixin.is_gb200_platform()) == (
        {},
        False,
    ) or "nvmlDeviceGetCount" in works


@pytest.mark.parametrize(
    ("rank", "visible", "expected"),
    [
        (1, None, True),
        (2, None, False),
        (0, "", False),
        (0, "1", True),
        (1, "1", True),
        (5, "1", False),
        (0, "GPU-nothing", False),
    ],
)
def test_device_of_a_rank_is_there_or_not(nvml, monkeypatch, rank, visible, expected) -> None:
    """Whether a local rank has a GPU follows the driver's count and CUDA_VISIBLE_DEVICES."""
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert health_check.PynvmlMixin().has_device(rank) is expected


@pytest.mark.parametrize("answers", [{"return.nvmlInit": 9}, {"return.nvmlDeviceGetCount": 15}])
def test_driver_that_cannot_say_gives_no_answer(nvml, answers) -> None:
    """Without driver, or with one that fails, nobody knows whether a GPU is there."""
    nvml.answers |= answers
    assert health_check.PynvmlMixin().has_device(0) is None


def test_healthy_gpus(nvml) -> None:
    """Nothing to recover on any GPU is healthy, with what was read as evidence."""
    result = gpu_check().check()
    assert result.status == "healthy"
    assert [gpu["bus_id"] for gpu in result.evidence["gpus"]] == ["0000:10:00.0", "0000:11:00.0"]
    assert gpu_check().enabled


@pytest.mark.parametrize("action", [1, 2, 3, 4, 5, 6, 7, 99])
def test_any_recovery_action_is_unhealthy(nvml, action) -> None:
    """Whatever the driver wants done, known or not, the GPU is unhealthy and named."""
    nvml.answers[f"field.1.{RECOVERY}"] = action
    result = gpu_check().check()
    assert result.status == "unhealthy"
    assert result.reason.startswith("GPU 1:")
    assert gpu_check(device_index=0)()
    assert not gpu_check(device_index=1)()


def test_remap_failure_is_unhealthy_and_ecc_is_evidence(nvml) -> None:
    """A row that could not be remapped fails the check; corrected errors are only told."""
    nvml.answers["field.0.3"] = 7
    result = gpu_check().check()
    assert result.status == "healthy"
    assert result.evidence["gpus"][0]["ecc_corrected"] == 7
    nvml.answers["field.0.145"] = 1
    assert "remapping" in gpu_check().check().reason


def test_error_of_the_driver_is_unhealthy(nvml) -> None:
    """A GPU that cannot be read is unhealthy, also when only one field fails."""
    nvml.answers["gone.1"] = 15
    assert "GPU 1" in gpu_check().check().reason
    del nvml.answers["gone.1"]
    nvml.answers[f"fielderror.0.{RECOVERY}"] = 999
    assert "GPU 0: the recovery action cannot be read" in gpu_check().check().reason
    assert not gpu_check(device_index=7)()


@pytest.mark.parametrize(
    "answers",
    [
        {"driver": "535.1"},
        {"return.nvmlInit": 9},
        {"count": 0},
        {f"field.0.{RECOVERY}": None, f"field.1.{RECOVERY}": None},
    ],
)
def test_nothing_to_look_at_is_skipped(nvml, answers) -> None:
    """An old driver, none, no GPU or GPUs that cannot tell are skipped, not unhealthy."""
    for key, value in answers.items():
        nvml.answers[key] = value
    result = gpu_check().check()
    assert result.status == "skipped"
    assert result.reason
    assert gpu_check()()


@pytest.mark.parametrize(
    "answers", [{"driver": "535.1"}, {"return.nvmlInit": 9}, {"count": 0}, {"count": 1}, {}]
)
def test_expected_gpus(nvml, answers) -> None:
    """Too few visible GPUs are unhealthy, even with an old driver or none at all."""
    nvml.answers.update(answers)
    assert gpu_check(expected_gpus=3).check().status == "unhealthy"
    enough = 2 if answers in ({}, {"driver": "535.1"}) else 0
    assert gpu_check(expected_gpus=enough)()


def test_gpu_that_was_there_is_missed(nvml) -> None:
    """A GPU that the driver no longer lists is unhealthy for a check that has seen it."""
    nvml.answers.update({"count": 2, "field.0.230": 0, "field.1.230": 0})
    check = gpu_check()
    assert check()
    for left in (1, 0):
        nvml.answers["count"] = left
        assert check.check().reason == f"{left} GPUs are visible, 2 are expected"
    nvml.answers["count"] = 2
    assert check()


def test_expected_gpus_from_the_environment(nvml, monkeypatch, caplog) -> None:
    """NVRX_EXPECTED_GPUS counts for the node, not for one rank; a bad value is ignored aloud."""
    monkeypatch.setenv("NVRX_EXPECTED_GPUS", "8")
    assert not gpu_check()()
    assert gpu_check(device_index=0)()
    monkeypatch.setenv("NVRX_EXPECTED_GPUS", "eight")
    with caplog.at_level(logging.WARNING, "nvrx"):
        assert gpu_check()()
    assert "NVRX_EXPECTED_GPUS='eight' is not a number: ignored" in caplog.text


def test_disabled_below_the_first_driver_that_tells(nvml) -> None:
    """`enabled` says whether the driver can tell; a broken driver is no reason to look away."""
    nvml.answers["driver"] = "569.9"
    assert not gpu_check().enabled
    nvml.answers["driver"] = "570.0"
    assert gpu_check().enabled
    nvml.answers["return.nvmlSystemGetDriverVersion"] = 999
    assert gpu_check().enabled


def test_hung_driver_is_unhealthy_and_the_check_stays_usable(nvml, monkeypatch) -> None:
    """A call that does not return is unhealthy in time, then at once, then healthy again."""
    assert gpu_check()()
    # Whichever is the first that is not back in time, it stays away.
    hangs = [f"hang.{name}" for name in dir(nvml) if name.startswith("nvml")]
    nvml.answers |= dict.fromkeys(hangs, 1)
    monkeypatch.setenv("NVRX_NVML_TIMEOUT_S", "0.05")
    assert "hung driver" in gpu_check().check().reason
    before = threading.active_count()
    assert "hung driver" in NVLHealthCheck().check().reason
    assert threading.active_count() == before
    monkeypatch.setenv("NVRX_NVML_TIMEOUT_S", "30")
    for hang in hangs:
        del nvml.answers[hang]
    nvml.released.set()
    deadline = time.monotonic() + 30
    while not gpu_check()():
        assert time.monotonic() < deadline


def test_session_is_opened_once(nvml) -> None:
    """Many checks share one initialisation, and nothing shuts it down."""
    for _ in range(3):
        gpu_check()()
        NVLHealthCheck()()
    assert nvml.calls.count("nvmlInit") == 1
    assert "nvmlShutdown" not in nvml.calls


def test_reload_of_the_driver(nvml) -> None:
    """After a reload the session is opened again; a driver that stays away is unhealthy."""
    assert gpu_check()()
    failures = iter([18])
    original = nvml.nvmlDeviceGetCount

    def count() -> int:
        code = next(failures, None)
        if code is not None:
            raise nvml.NVMLError(code)
        return original()

    nvml.nvmlDeviceGetCount = count
    assert gpu_check()()
    assert nvml.calls.count("nvmlInit") == 2
    nvml.answers["return.nvmlInit"] = 9
    nvml.answers["return.nvmlSystemGetDriverVersion"] = 9
    assert gpu_check().check().status == "unhealthy"


def test_nvlink_states(nvml) -> None:
    """A disabled link is unhealthy and named; links that are not there are passed over."""
    assert NVLHealthCheck().check().evidence == {
        "GPU 0": {"0": "up", "1": "up"},
        "GPU 1": {"0": "up", "1": "up"},
    }
    nvml.answers["link.1.1"] = 0
    assert NVLHealthCheck().check().reason == "GPU 1: links 1 are disabled"
    assert NVLHealthCheck(device_index=0)()
    del nvml.answers["link.1.1"]
    assert NVLHealthCheck()()


def test_nvlink_without_links_or_device(nvml) -> None:
    """No link at all is skipped, a device that cannot be read is unhealthy, no driver skipped."""
    for gpu in range(2):
        nvml.answers[f"field.{gpu}.{LINK_COUNT}"] = 0
    assert NVLHealthCheck().check().status == "skipped"
    nvml.answers["gone.0"] = 15
    assert NVLHealthCheck().check().status == "unhealthy"
    health_check.set_nvml(FakeNvml({"return.nvmlInit": 9}))
    assert NVLHealthCheck().check().status == "skipped"


def window_check(nvml, **options):
    for gpu in range(2):
        for port in range(2):
            nvml.answers[f"field.{gpu}.215.{port}"] = 5
    return NVLinkWindowHealthCheck(window_count=4, threshold=1, **options)


def test_window_flags_growing_counters(nvml, caplog) -> None:
    """A port whose counter grew in more than `threshold` windows makes its GPU unhealthy."""
    check = window_check(nvml)
    verdicts = []
    with caplog.at_level(logging.WARNING, "nvrx"):
        for value in (5, 6, 6, 7):
            nvml.answers["field.1.215.0"] = value
            verdicts.append(check())
    assert verdicts == [True, True, True, False]
    (record,) = caplog.records
    assert "GPU 1" in record.getMessage()
    assert "ports 0 " in record.getMessage()
    for _ in range(2):
        check()
    assert check.check().status == "healthy"


def test_window_needs_enough_ports(nvml) -> None:
    """With gpu_ports_threshold=2 one bad port is not enough."""
    check = window_check(nvml, gpu_ports_threshold=2)
    for value in range(5, 10):
        nvml.answers["field.0.215.0"] = value
        assert check()
    for value in range(5, 10):
        nvml.answers["field.0.215.0"] = nvml.answers["field.0.215.1"] = 10 + value
        last = check()
    assert not last


def test_window_reads_each_port_by_the_method_that_works_there(nvml) -> None:
    """Scoped fields, lane counters and link error counters are found per GPU and port."""
    for port, key in ((0, "field.0.46"), (1, "counter.0.1.0")):
        nvml.answers[key] = 1
        del port
    nvml.answers["field.1.208.1"] = 1
    check = NVLinkWindowHealthCheck(window_count=4, threshold=0)
    assert check()
    for key in ("field.0.46", "counter.0.1.0", "field.1.208.1"):
        nvml.answers[key] = 2
    result = check.check()
    assert result.evidence["flagged_windows"] == {"GPU 0": {"0": 1, "1": 1}, "GPU 1": {"1": 1}}


def test_window_without_data_is_skipped(nvml) -> None:
    """GPUs without any counter are skipped, and the ports are not asked again."""
    check = NVLinkWindowHealthCheck()
    assert check.check().status == "skipped"
    asked = len(nvml.calls)
    assert check.check().status == "skipped"
    assert len(nvml.calls) - asked < asked


def test_window_failed_read_is_no_window(nvml) -> None:
    """A read that fails for now neither flags nor forgets the value before it."""
    check = window_check(nvml)
    assert check()
    for number in (215, 295, 208):
        nvml.answers[f"fielderror.0.{number}"] = 999
    assert check()
    for number in (215, 295, 208):
        del nvml.answers[f"fielderror.0.{number}"]
    nvml.answers["field.0.215.0"] = 6
    assert check.check().evidence["flagged_windows"] == {"GPU 0": {"0": 1}}


def test_window_vanished_gpu_is_unhealthy(nvml) -> None:
    """A GPU that was there at an earlier look and is gone now is unhealthy."""
    check = window_check(nvml)
    assert check()
    nvml.answers["count"] = 1
    assert check.check().reason == "GPU 1 has vanished"
    nvml.answers["count"] = 2
    nvml.answers["gone.1"] = 15
    assert "GPU 1" in check.check().reason


def test_memory(nvml, monkeypatch, caplog) -> None:
    """Memory is told in MiB for the device of the rank, as CUDA_VISIBLE_DEVICES counts."""
    mib = 1 << 20
    nvml.answers |= {
        "memory.1.total": 80 * mib,
        "memory.1.used": 10 * mib,
        "memory.1.free": 69 * mib,
    }
    ask = GPUMemoryLogger().get_gpu_memory
    assert GPUMemoryLogger() is GPUMemoryLogger()
    wanted = {"total_mb": 80.0, "used_mb": 10.0, "free_mb": 69.0}
    assert ask(device_index=1) == wanted
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert ask() == wanted
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-00000001")
    with caplog.at_level(logging.INFO, "nvrx"):
        assert ask(log_memory=True, context="before") == wanted
    assert "before: GPU 0 memory: 10 MB used of 80 MB" in caplog.text
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert ask() is None


def test_memory_without_device_or_driver(monkeypatch, caplog, nvml) -> None:
    """Without a rank or a driver memory is None, and a missing driver is logged once."""
    ask = GPUMemoryLogger().get_gpu_memory
    with caplog.at_level(logging.WARNING, "nvrx"):
        assert ask() is None
        assert [record.levelname for record in caplog.records] == ["ERROR"]
        caplog.clear()
        health_check.set_nvml(FakeNvml({"return.nvmlInit": 9}))
        assert [ask(device_index=0) for _ in range(3)] == [None] * 3
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("rank", "visible", "device"),
    [
        (1, None, 1), (1, "4,5", 5), (0, "5", 5), (3, "3", 3), (0, "", None), (0, "-1", None),
        (0, "NoDevFiles", None), (1, "0,-1,2", 1), (1, " GPU-ab , MIG-cd", "MIG-cd"),
    ],
)  # fmt: skip
def test_device_of_rank(rank, visible, device) -> None:
    """CUDA_VISIBLE_DEVICES means what it means to CUDA; ranks beyond it count over the node."""
    assert device_of_rank(rank, visible) == device


def test_shortened_uuids() -> None:
    """A shortened UUID stands for a device only when it fits exactly one."""
    uuids = ["GPU-abc1", "GPU-abd2"]
    assert full_uuid("gpu-ABC", uuids) == "GPU-abc1"
    assert full_uuid("GPU-ab", uuids) is None
    assert full_uuid("GPU-x", uuids) is None


@pytest.mark.parametrize(
    ("version", "major"), [("570.86.10", 570), ("9", 9), ("", None), ("x.1", None)]
)
def test_driver_major(version, major) -> None:
    """The first number of a version counts, and a version without one is unknown."""
    assert driver_major(version) == major


@pytest.mark.parametrize(
    ("name", "is_gb200"), [("NVIDIA GB200", True), ("NVIDIA B200", False), ("NVIDIA H100", False)]
)
def test_gb200_is_not_b200(nvml, name, is_gb200) -> None:
    """Only a GB200 is taken for one."""
    nvml.answers["name"] = name
    mixin = health_check.PynvmlMixin()
    assert mixin.is_gb200_platform() is is_gb200
    assert mixin.check_pynvml_availability()
    assert mixin.get_gpu_pci_mapping() == {0: "0000:10:00.0", 1: "0000:11:00.0"}


KMSG = """\
6,100,5000000,-;NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus.
 SUBSYSTEM=pci
4,101,9000000,-;NVRM: Xid (PCI:0000:3b:00): 31, pid=2, name=python
nonsense
4,102,x,-;NVRM: Xid (PCI:0000:3b:00): 13
6,103,9500000,-;something else
"""


def test_xids_are_read_since_a_moment() -> None:
    """XIDs after the moment are found with GPU, number and text; other lines are passed over."""
    (xid,) = parse_kmsg(KMSG.splitlines(), 6.0)
    assert (xid["bus_id"], xid["number"], xid["at_s"]) == ("0000:3b:00.0", 31, 9.0)
    assert len(list(parse_kmsg(KMSG.splitlines(), 0.0))) == 2


def test_xids_are_evidence(nvml, tmp_path, monkeypatch) -> None:
    """XIDs since the job began stand in the evidence, and alone make nothing unhealthy."""
    monkeypatch.setenv("SLURM_JOB_START_TIME", "1")
    log = tmp_path / "kmsg"
    log.write_text(KMSG)
    check = GPUHealthCheck(kmsg=str(log))
    result = check.check()
    assert result.status == "healthy"
    assert [xid["number"] for xid in result.evidence["xids"]] == [79, 31]
    nvml.answers[f"field.0.{RECOVERY}"] = 1
    assert "XIDs since the job began: 31, 79" in check.check().reason


@pytest.mark.parametrize(
    ("visible", "devices"),
    [
        (None, [0, 1]), ("1,0", [1, 0]), ("", []), ("1,7,0", [1]), ("0,-1,1", [0]),
        ("GPU-a,1", ["GPU-a", 1]),
    ],
)  # fmt: skip
def test_visible_devices(visible, devices) -> None:
    """CUDA's list ends at the first entry that is no device of the machine."""
    assert visible_devices(visible, 2) == devices


def test_where_visible_gpus_sit(nvml) -> None:
    """Addresses by ordinal; None for a device that cannot be told."""
    mixin = health_check.PynvmlMixin()
    assert mixin.get_visible_pci_addresses(None) == ["0000:10:00.0", "0000:11:00.0"]
    assert mixin.get_visible_pci_addresses("1") == ["0000:11:00.0"]
    uuid = "GPU-00000001"
    assert mixin.get_visible_pci_addresses(f"{uuid},0") == ["0000:11:00.0", "0000:10:00.0"]
    assert mixin.get_visible_pci_addresses("GPU-none,MIG-1") == [None, None]
