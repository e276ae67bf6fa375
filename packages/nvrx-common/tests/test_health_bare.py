# SPDX-License-Identifier: Apache-2.0
"""On a machine without any of the hardware every check is skipped, quickly and quietly."""

import json
import os
import subprocess
import sys

import pytest

PROGRAM = """
import json, logging, sys, time
records = []
handler = logging.Handler()
handler.emit = lambda record: records.append(record.getMessage())
logging.getLogger("nvrx").addHandler(handler)
logging.getLogger("nvrx").setLevel(logging.INFO)
from nvidia_resiliency_ext.shared_utils import health_check as h
from nvidia_resiliency_ext.shared_utils.memory import GPUMemoryLogger
root = sys.argv[1]
checks = [
    h.GPUHealthCheck(), h.NVLHealthCheck(), h.NVLinkWindowHealthCheck(),
    h.GPUHealthCheck(device_index=0), h.NicHealthCheck(0, sysfs_root=root),
    h.NicLinkStateHealthCheck(sysfs_root=root), h.NodeHealthCheck(root + "/none"),
    h.DistributedStorageHealthCheck(sysfs_root=root, mountinfo="/dev/null"),
    h.StoragePathHealthCheck([]),
]
found = []
for _ in range(3):
    for check in checks:
        start = time.perf_counter()
        result = check.check()
        found.append([result.name, result.status, time.perf_counter() - start])
memory = [GPUMemoryLogger().get_gpu_memory(0) for _ in range(3)]
foreign = sorted({"pynvml", "grpc", "google.protobuf", "asyncio"} & set(sys.modules))
print(json.dumps([found, memory, records, foreign]))
"""


def run(*arguments):
    hidden = ("CUDA_VISIBLE_DEVICES", "NVRX_EXPECTED_GPUS", "NVRX_NVML_SUBPROCESS")
    env = {k: v for k, v in os.environ.items() if k not in hidden}
    return subprocess.run(
        [sys.executable, *arguments],
        env=env,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )


def test_everything_is_skipped_and_logged_once(tmp_path) -> None:
    """No exception, at most one line per check and process, no binding is imported for nothing."""
    done = run("-c", PROGRAM, str(tmp_path))
    assert done.returncode == 0, done.stderr
    found, memory, records, foreign = json.loads(done.stdout)
    if not all(status == "skipped" for name, status, _ in found if name == "gpu"):
        pytest.skip("this machine has a GPU driver")
    assert {status for _, status, _ in found} == {"skipped"}
    # The shortest of the three looks: the machine may hold up any one of them.
    for name in {name for name, _, _ in found}:
        assert min(seconds for each, _, seconds in found if each == name) < 5.0
    assert max(seconds for _, _, seconds in found) < 60
    assert memory == [None] * 3
    assert len(records) == len(set(records)) <= len({name for name, _, _ in found}) + 1
    assert foreign == []


@pytest.mark.parametrize("module", ["health_check", "memory", "attribution_client"])
def test_import_is_light(module) -> None:
    """Importing a module of these checks loads nothing heavy."""
    heavy = ["asyncio", "pynvml", "grpc", "http.client", "ssl", "subprocess", "argparse"]
    code = (
        f"import sys, nvidia_resiliency_ext.shared_utils.{module}\n"
        f"sys.exit(str([name for name in {heavy} if name in sys.modules] or ''))"
    )
    done = run("-c", code)
    assert done.stderr.strip() == ""


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--checks", "storage,nic"], 0),
        (["--checks", "storage", "--storage-path", "/"], 0),
        (["--checks", "storage", "--storage-path", "/nonexistent"], 1),
        (["--checks", "gpu", "--expected-gpus", "1000"], 1),
        (["--checks", "nic", "--expected-ports", "1000"], 1),
        (["--checks", "nonsense"], 2),
        (["--checks", ""], 2),
        (["--expected-gpus", "-1"], 2),
        (["--deadline", "nan"], 2),
        (["stray"], 2),
    ],
)
def test_exit_codes(arguments, code) -> None:
    """0 when nothing is unhealthy, 1 when something is, 2 for wrong arguments."""
    done = run("-m", "nvidia_resiliency_ext.shared_utils.health_check", *arguments)
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_full_disk_is_said() -> None:
    """A result that cannot be written is one line on stderr and exit code 1."""
    command = f"{sys.executable} -m nvidia_resiliency_ext.shared_utils.health_check --checks nic"
    done = subprocess.run(
        ["/bin/sh", "-c", f"{command} > /dev/full"],
        capture_output=True, text=True, timeout=150, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "No space left" in done.stderr
