# SPDX-License-Identifier: Apache-2.0
"""The checks that a node must pass before it joins: nvrx-common's, over stand-ins of hardware."""

import ctypes
import json
import subprocess
import sys

import pytest

from nvidia_resiliency_ext.fault_tolerance import launcher
from nvidia_resiliency_ext.fault_tolerance._health import admission
from nvidia_resiliency_ext.fault_tolerance._health.admission import (
    NodeChecks,
    injected_failure,
    unfit,
)
from nvidia_resiliency_ext.fault_tolerance.config import FaultToleranceConfig
from nvidia_resiliency_ext.shared_utils import health_check
from nvidia_resiliency_ext.testing_utils import health_check_injector
from nvidia_resiliency_ext.testing_utils.fake_hardware import FakeNodeDaemon, FakeNvml, fake_sysfs

RECOVERY = "field.1.230"
CONFIG = FaultToleranceConfig()


@pytest.fixture
def gpus(monkeypatch):
    """Give two GPUs whose driver says what a test wants."""
    answers = {"count": 2, "field.0.230": 0, RECOVERY: 0}
    nvml = FakeNvml(answers)
    monkeypatch.setattr(admission, "has_gpu_driver", lambda: True)
    health_check.set_nvml(nvml)
    yield nvml
    health_check.set_nvml(None)


def run(config=None, endpoint=None, environ=None):
    """Return the results of the checks by name."""
    checks = NodeChecks(config or FaultToleranceConfig(), endpoint, environ or {})
    return {result.name: result for result in checks.run()}


def test_a_bare_machine_has_nothing_to_check():
    """Without devices nothing is asked, nothing is loaded, and a node is fit."""
    program = (
        "import sys\n"
        "from nvidia_resiliency_ext.fault_tolerance._health.admission import NodeChecks\n"
        "from nvidia_resiliency_ext.fault_tolerance.config import FaultToleranceConfig\n"
        "found = NodeChecks(FaultToleranceConfig(), None, {}).run()\n"
        "heavy = {'pynvml', 'grpc', 'torch', 'asyncio'} & set(sys.modules)\n"
        "modules = [name for name in sys.modules if 'shared_utils._health.' in name]\n"
        "print(found, sorted(heavy), modules)"
    )
    if _has_devices():
        pytest.skip("this machine has a GPU driver or network cards")
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[] [] []"


def _has_devices():
    from nvidia_resiliency_ext.fault_tolerance._core.infra import has_adapters, has_gpu_driver

    return has_adapters() or has_gpu_driver()


def test_a_gpu_that_needs_a_reset_makes_the_node_unfit(gpus):
    """What the driver wants done to a GPU keeps the node from joining, with the reason."""
    assert unfit(list(run().values()), "h") is None
    gpus.answers[RECOVERY] = 1
    cause = unfit(list(run().values()), "h")
    assert cause.kind == "unhealthy"
    assert "host h is unhealthy: health check gpu: GPU 1: the driver asks to reset" in cause.what
    assert json.loads(cause.detail["evidence"])["gpu"]["gpus"][1]["recovery_action"] == 1


def test_a_link_that_went_down_makes_the_node_unfit(tmp_path):
    """A port that was active at the start must still be; the check can be switched off."""
    sysfs = fake_sysfs(tmp_path, nics=(), gpus=())
    sysfs.add_nic("mlx5_0", (), "0000:18:00.0")
    template = f"{tmp_path}/class/infiniband/{{nic}}/ports/1/state"
    checks = NodeChecks(FaultToleranceConfig(link_state_path_template=template), None, {})
    assert all(checks.run())
    sysfs.set_state("mlx5_0", "1: DOWN")
    assert "was ACTIVE" in unfit(checks.run(), "h").what
    off = FaultToleranceConfig(link_state_path_template=template, enable_nic_healthcheck=False)
    assert "nic_state" not in run(off)


def test_storage_that_is_missing_makes_the_node_unfit(tmp_path):
    """Every path that is named must be there; distributed storage is looked at on request."""
    paths = f"{tmp_path},{tmp_path}/missing"
    results = run(FaultToleranceConfig(storage_healthcheck_path=paths))
    assert f"{tmp_path}/missing" in unfit(list(results.values()), "h").what
    wanted = FaultToleranceConfig(enable_dist_storage_healthcheck=True)
    assert "storage" in run(wanted)


def test_expected_gpus_that_are_missing_make_the_node_unfit():
    """A node that must have GPUs and has none is unfit, though there is no driver to ask."""
    if _has_devices():
        pytest.skip("this machine has a GPU driver or network cards")
    done = subprocess.run(
        [sys.executable, "-c", _ENSURE],
        env={"NVRX_EXPECTED_GPUS": "8", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.strip().startswith("UnhealthyNodeException"), done.stderr
    assert "8 are expected" in done.stdout


_ENSURE = """
from nvidia_resiliency_ext.fault_tolerance import launcher
try:
    launcher.ensure_node_is_healthy()
except launcher.UnhealthyNodeException as error:
    print(type(error).__name__, error)
"""


def test_a_service_judges_the_node(socket_folder):
    """The node health service decides; one that cannot be reached does not."""
    pytest.importorskip("grpc")
    path = f"{socket_folder}/nvhcd.sock"
    assert unfit(list(run(endpoint=path).values()), "h") is None
    with FakeNodeDaemon(path, {"success": False, "error": "disk"}):
        for endpoint in (path, f"unix://{path}"):
            assert "node_daemon" in unfit(list(run(endpoint=endpoint).values()), "h").what


def test_a_program_names_the_service_for_its_launches(socket_folder):
    """`init_node_health_check` names the service that launches without an endpoint ask."""
    pytest.importorskip("grpc")
    assert launcher.get_node_health_check() is None
    path = f"{socket_folder}/nvhcd.sock"
    launcher.init_node_health_check(path)
    try:
        assert launcher.get_node_health_check().endpoint == path
        with (
            FakeNodeDaemon(path, {"success": False}),
            pytest.raises(launcher.UnhealthyNodeException, match="node_daemon"),
        ):
            launcher.ensure_node_is_healthy()
        launcher.ensure_node_is_healthy()
    finally:
        launcher.init_node_health_check(None)
    assert launcher.get_node_health_check() is None


def test_a_failure_may_be_injected(monkeypatch):
    """NVRX_INJECT_GPU_FAILURE fails the node of its rank in its cycle, and no other."""
    spec = {"NVRX_INJECT_GPU_FAILURE": "2:1,3:0:storage"}
    monkeypatch.setenv(*next(iter(spec.items())))
    health_check_injector.reset_for_tests()
    try:
        hit = {
            (cycle, rank): injected_failure(cycle, rank, "h", spec)
            for cycle in range(4)
            for rank in range(-1, 3)
        }
    finally:
        health_check_injector.reset_for_tests()
    assert {key for key, cause in hit.items() if cause} == {(2, 1), (3, 0)}
    assert hit[3, 0].detail == {"check": "storage"}
    assert injected_failure(2, 1, "h", {}) is None


def test_only_the_gpus_of_this_nodes_workers_are_watched(gpus):
    """The device of each local rank is looked at, as far as there are devices that it sees."""
    gpus.answers |= {"count": 4, "memory.2.used": 3 << 30, "memory.2.total": 8 << 30}
    assert list(admission.GpuMemory(2, {}, CONFIG).ranks()) == [0, 1]
    assert list(admission.GpuMemory(8, {}, CONFIG).ranks()) == [0, 1, 2, 3]
    assert list(admission.GpuMemory(8, {"CUDA_VISIBLE_DEVICES": "2,3"}, CONFIG).ranks()) == [0, 1]
    assert list(admission.GpuMemory(8, {"CUDA_VISIBLE_DEVICES": ""}, CONFIG).ranks()) == []
    assert admission.GpuMemory(4, {}, CONFIG).used_mb([1, 2]) == {1: 0.0, 2: 3072.0}


def test_memory_that_cannot_be_read_is_unknown_and_said_once(gpus, caplog):
    """An unreadable GPU ends the wait, with one line and not one for each GPU or restart."""
    gpus.answers["return.nvmlDeviceGetMemoryInfo"] = 999
    memory = admission.GpuMemory(2, {}, CONFIG)
    assert [memory.used_mb([0, 1]) for _ in range(3)] == [None] * 3
    said = [r for r in caplog.records if "it is unknown" in r.getMessage()]
    assert len(said) == 1


def test_the_driver_is_looked_for_by_its_library(monkeypatch):
    """Whether there is a driver is known without asking it."""
    from nvidia_resiliency_ext.fault_tolerance._core import infra

    asked = []
    monkeypatch.setattr(ctypes, "CDLL", asked.append)
    assert infra.has_gpu_driver()
    assert asked == ["libnvidia-ml.so.1"]
