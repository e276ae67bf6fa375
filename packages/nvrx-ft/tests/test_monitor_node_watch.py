# SPDX-License-Identifier: Apache-2.0
"""The checks of devices while ranks work: which findings reach the monitor, and how often."""

import queue

import pytest

from nvidia_resiliency_ext.fault_tolerance._monitor import node_watch
from nvidia_resiliency_ext.fault_tolerance._monitor.node_watch import NodeWatch
from nvidia_resiliency_ext.fault_tolerance.config import FaultToleranceConfig
from nvidia_resiliency_ext.shared_utils import health_check
from nvidia_resiliency_ext.testing_utils.fake_hardware import FakeNvml, fake_sysfs

LIMIT_S = 60.0


@pytest.fixture
def gpus(monkeypatch):
    """Give two healthy GPUs."""
    answers = {"count": 2, "field.0.230": 0, "field.1.230": 0}
    answers |= {f"bus.{gpu}": f"00000000:1{gpu}:00.0" for gpu in range(2)}
    nvml = FakeNvml(answers)
    monkeypatch.setattr(node_watch, "has_gpu_driver", lambda: True)
    health_check.set_nvml(nvml)
    yield nvml
    health_check.set_nvml(None)


@pytest.fixture
def watch():
    made = []

    def make(**settings):
        found = queue.SimpleQueue()
        root = settings.pop("sysfs_root", "/sys")
        config = FaultToleranceConfig(node_health_check_interval=0.02, **settings)
        made.append(
            NodeWatch((0, 1), config.to_dict(), lambda *said: found.put(said), sysfs_root=root)
        )
        made[-1].start()
        return made[-1], found

    yield make
    for one in made:
        one.close()
        one._thread.join(LIMIT_S)


def test_a_gpu_that_fails_is_said_again_until_it_is_well(gpus, watch):
    """Each look that finds the GPU of a rank unfit is a finding of that rank, and of no other."""
    _, found = watch()
    gpus.answers["field.1.230"] = 1
    first, second = found.get(timeout=LIMIT_S), found.get(timeout=LIMIT_S)
    assert first[:2] == (1, "gpu_health")
    assert "asks to reset the GPU" in first[2]
    assert second[0] == 1


def test_the_first_check_comes_after_one_interval(gpus):
    """A GPU that is unfit from the start is found at the first look, one interval after it."""
    gpus.answers["field.1.230"] = 1
    found, config = [], FaultToleranceConfig(node_health_check_interval=7.0).to_dict()
    running, waits = NodeWatch((0, 1), config, lambda *said: found.append(said)), []

    class Stopped:
        """Says that the watch is over at its second wait."""

        def is_set(self):
            return False

        def wait(self, seconds):
            waits.append((seconds, len(found)))
            return len(waits) == 2

    running._stopped = Stopped()
    running._work()
    assert waits == [(7.0, 0), (7.0, 1)]


def test_a_link_that_went_down_is_said_once(gpus, watch, tmp_path):
    """A link that broke and came back ends one group of ranks, and not the next one too."""
    sysfs = fake_sysfs(tmp_path)
    for gpu in range(2):
        bridge = f"0000:0{gpu + 1}:00.0"
        sysfs.add_device((bridge,), f"0000:1{gpu}:00.0")
        sysfs.add_nic(f"mlx5_{gpu}", (bridge,), f"0000:2{gpu}:00.0")
    running, found = watch(enable_nic_monitor=True, sysfs_root=str(tmp_path))
    looks = len(gpus.calls)
    while len(gpus.calls) < looks + 30:  # The baselines are taken.
        pass
    sysfs.set_counter("mlx5_1", "link_downed", 1)
    first = found.get(timeout=LIMIT_S)
    assert first[:2] == (1, "nic_health")
    sysfs.set_counter("mlx5_0", "link_downed", 1)
    second = found.get(timeout=LIMIT_S)
    assert second[:2] == (0, "nic_health")
    running.close()
    assert found.empty()


def test_a_machine_without_devices_is_looked_at_once(monkeypatch, watch):
    """Where there is neither driver nor network card, the thread ends."""
    looks = []
    monkeypatch.setattr(node_watch, "has_gpu_driver", lambda: bool(looks.append(1)))
    running, found = watch(enable_nic_monitor=True, sysfs_root="/nowhere")
    running._thread.join(LIMIT_S)
    assert not running._thread.is_alive()
    assert (looks, found.empty()) == ([1], True)


def test_an_old_driver_is_not_asked_again(gpus, watch):
    """A driver that cannot tell what a GPU needs is no finding."""
    gpus.answers["driver"] = "535.1"
    running, found = watch()
    running._thread.join(LIMIT_S)
    assert not running._thread.is_alive()
    assert found.empty()
