# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for hardware say what they are told, so that tests built on them mean something."""

import subprocess
import sys

import pytest

from nvidia_resiliency_ext.testing_utils.fake_hardware import (
    FakeDriver,
    FakeNvml,
    NoCompilerError,
    fake_sysfs,
)


def test_object_and_library_give_the_same_answers(tmp_path) -> None:
    """The object in place of the binding answers as the binding over the library does."""
    pynvml = pytest.importorskip("pynvml", reason="needs nvidia-ml-py")
    answers = {
        "count": 1, "field.0.230": 2, "field.0.215.3": 9, "link.0.1": 1, "counter.0.1.0": 4,
        "memory.0.total": 100, "memory.0.used": 30, "memory.0.free": 70, "driver": "575.1",
    }  # fmt: skip
    try:
        driver = FakeDriver(tmp_path, answers)
    except NoCompilerError as error:
        pytest.skip(f"no fake driver: {error}")
    program = """
import sys
def ask(nvml):
    nvml.nvmlInit()
    handle = nvml.nvmlDeviceGetHandleByIndex(0)
    fields = nvml.nvmlDeviceGetFieldValues(handle, [(230, 0), (215, 3), (999, 0)])
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    found = [nvml.nvmlSystemGetDriverVersion(), nvml.nvmlDeviceGetCount(), memory.used]
    found += [(value.nvmlReturn, value.value.ullVal or 0) for value in fields]
    found += [nvml.nvmlDeviceGetNvLinkState(handle, 1)]
    found += [nvml.nvmlDeviceGetNvLinkErrorCounter(handle, 1, 0)]
    bus_id = nvml.nvmlDeviceGetPciInfo(handle).busId
    found += [bus_id if isinstance(bus_id, str) else bus_id.decode()]
    for call in (lambda: nvml.nvmlDeviceGetNvLinkState(handle, 2),
                 lambda: nvml.nvmlDeviceGetHandleByIndex(1),
                 lambda: nvml.nvmlDeviceGetHandleByUUID("GPU-x")):
        try:
            call()
        except nvml.NVMLError as error:
            found.append(error.value)
    return found
"""
    real = subprocess.run(
        [sys.executable, "-c", f"{program}\nimport pynvml; print(ask(pynvml))"],
        env=driver.environment(), capture_output=True, text=True, timeout=150, check=False,
    )  # fmt: skip
    space: dict[str, object] = {}
    exec(program, space)
    assert real.stdout.strip() == str(space["ask"](FakeNvml(answers))), real.stderr
    assert {function for _, function in driver.calls()} >= {"nvmlInit", "nvmlDeviceGetCount"}
    numbers = ("GET_GPU_RECOVERY_ACTION", "ECC_DBE_VOL_TOTAL", "REMAPPED_FAILURE")
    for name in (f"NVML_FI_DEV_{number}" for number in numbers):
        assert getattr(FakeNvml(), name) == getattr(pynvml, name)


def test_answers_change_and_vanish(tmp_path) -> None:
    """Answers of the library can be changed while a program runs."""
    try:
        driver = FakeDriver(tmp_path)
    except NoCompilerError as error:
        pytest.skip(f"no fake driver: {error}")
    driver.set(count=2, field__0__230=1)
    driver.set(count=None)
    assert (tmp_path / "control").read_text() == "field.0.230 1\n"
    assert driver.calls() == []


def test_no_compiler_is_said(tmp_path, monkeypatch) -> None:
    """Without a compiler the error says so, so that a test can be skipped with a reason."""
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NoCompilerError, match="no C compiler"):
        FakeDriver(tmp_path)


def test_tree_of_files(tmp_path) -> None:
    """The tree has the links and files that the kernel has."""
    tree = fake_sysfs(
        tmp_path, {"mlx5_0": "0000:00:01.0/0000:01:00.0"}, ["0000:00:01.0/0000:02:00.0"]
    )
    device = (tmp_path / "class/infiniband/mlx5_0/device").resolve()
    assert device == tmp_path / "devices/pci0000:00/0000:00:01.0/0000:01:00.0"
    assert (tmp_path / "bus/pci/devices/0000:02:00.0").is_symlink()
    tree.set_counter("mlx5_0", "link_downed", 3)
    assert (tmp_path / "class/infiniband/mlx5_0/ports/1/counters/link_downed").read_text() == "3\n"
