# SPDX-License-Identifier: Apache-2.0
"""The session with the driver: real nvidia-ml-py over a libnvidia-ml.so.1 made for these tests.

Each program runs in a process of its own, because a process loads that library once.
"""

import json
import os
import subprocess
import sys
import time

import pytest

from nvidia_resiliency_ext.testing_utils.fake_hardware import FakeDriver, NoCompilerError

RECOVERY = 230
HEALTHY = {
    "count": 2, f"field.0.{RECOVERY}": 0, f"field.1.{RECOVERY}": 0, "field.0.91": 1,
    "field.1.91": 1, "link.0.0": 1, "link.1.0": 1,
}  # fmt: skip
PRELUDE = """
import json, logging, os, sys, time, threading
logging.getLogger("nvrx").addHandler(logging.NullHandler())
from nvidia_resiliency_ext.shared_utils import health_check as h
from nvidia_resiliency_ext.shared_utils.memory import GPUMemoryLogger

def gpu(**options):
    result = h.GPUHealthCheck(kmsg="/nonexistent", **options).check()
    return [result.status, result.reason]

def set_answers(**changes):
    path = os.environ["FAKE_NVML_CONTROL"]
    lines = dict(line.rstrip("\\n").split(" ", 1) for line in open(path))
    for name, value in changes.items():
        lines.pop(name.replace("__", "."), None)
        if value is not None:
            lines[name.replace("__", ".")] = value
    with open(path + ".x", "w") as file:
        file.write("".join(f"{k} {v}\\n" for k, v in lines.items()))
    os.replace(path + ".x", path)

def until(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
"""


def in_lines(answers):
    """Return answers of the driver as the text of the file from which it takes them."""
    return "".join(f"{key} {value}\n" for key, value in answers.items())


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """Build the driver once for all tests of this module."""
    pytest.importorskip("pynvml", reason="needs nvidia-ml-py")
    try:
        return FakeDriver(tmp_path_factory.mktemp("nvml"))
    except NoCompilerError as error:
        pytest.skip(f"no fake driver: {error}")


@pytest.fixture(params=["", "1"], ids=["thread", "helper"])
def run(request, library, tmp_path):
    """Return a function that runs a program, with calls in threads and in a helper process."""

    def run(program, answers=HEALTHY, **environment):
        control, calls = tmp_path / "control", tmp_path / "calls"
        calls.unlink(missing_ok=True)
        control.write_text(in_lines(answers))
        hidden = ("CUDA_VISIBLE_DEVICES", "LOCAL_RANK", "NVRX_EXPECTED_GPUS")
        env = {k: v for k, v in os.environ.items() if k not in hidden}
        env |= library.environment()
        env |= {"FAKE_NVML_CONTROL": str(control), "FAKE_NVML_CALLS": str(calls)}
        env |= {"NVRX_NVML_SUBPROCESS": request.param, **environment}
        done = subprocess.run(
            [sys.executable, "-c", PRELUDE + program],
            env=env, capture_output=True, text=True, timeout=150, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        run.calls = [line.split() for line in calls.read_text().splitlines()]
        return json.loads(done.stdout.splitlines()[-1])

    run.mode = request.param
    return run


def test_all_queries_through_the_real_binding(run) -> None:
    """GPUs, links, windows, memory and addresses are read through the real binding."""
    answers = {
        **HEALTHY, "field.0.215.0": 1, "field.1.46": 3, "memory.1.total": 1 << 33,
        "memory.1.used": 1 << 30, "memory.1.free": 1 << 31, "memory.1.reserved": 1 << 29,
        "mig.0.0": "MIG-11111111-1111-1111-1111-111111111111",
    }  # fmt: skip
    found = run(
        """
window = h.NVLinkWindowHealthCheck()
mixin = h.PynvmlMixin()
os.environ["CUDA_VISIBLE_DEVICES"] = "MIG-1111,GPU-00000001"
print(json.dumps({
    "gpu": gpu(), "one": gpu(device_index=1), "nvlink": h.NVLHealthCheck().check().status,
    "windows": [window.check().status for _ in range(2)],
    "memory": GPUMemoryLogger().get_gpu_memory(1), "pci": mixin.get_gpu_pci_mapping(),
    "mig": GPUMemoryLogger().get_gpu_memory(0)["used_mb"],
}))""",
        answers,
    )
    assert found == {
        "gpu": ["healthy", ""],
        "one": ["healthy", ""],
        "nvlink": "healthy",
        "windows": ["healthy", "healthy"],
        "memory": {"total_mb": 8192.0, "used_mb": 1024.0, "free_mb": 2048.0},
        "pci": {"0": "0000:10:00.0", "1": "0000:11:00.0"},
        "mig": 0.0,
    }
    assert [function for _, function in run.calls].count("nvmlInit") == 1


def test_calls_run_where_they_should(run) -> None:
    """The driver is called in this process, or with NVRX_NVML_SUBPROCESS=1 only in another."""
    pid = run("gpu(); print(json.dumps(os.getpid()))")
    pids = {int(each) for each, _ in run.calls}
    assert (pids == {pid}) is (run.mode == "")
    assert len(pids) == 1


VERDICTS = [
    ({f"field.1.{RECOVERY}": 1}, "unhealthy", "GPU 1: the driver asks to reset"),
    ({"gone.1": 15}, "unhealthy", "GPU is lost"),
    ({"count": 0}, "skipped", "no GPU"),
    ({"return.nvmlDeviceGetFieldValues": 4242}, "unhealthy", "4242"),
]


def test_verdicts(run) -> None:
    """What the driver says becomes the right verdict, in words that name it."""
    program = """
path, found = os.environ["FAKE_NVML_CONTROL"], []
for answers in json.loads(os.environ["ANSWERS"]):
    with open(path + ".x", "w") as file:
        file.write(answers)
    os.replace(path + ".x", path)
    found.append(gpu())
print(json.dumps(found))"""
    answers = [in_lines({**HEALTHY, **changes}) for changes, _, _ in VERDICTS]
    found = run(program, ANSWERS=json.dumps(answers))
    for (_, wanted, words), (status, reason) in zip(VERDICTS, found, strict=True):
        assert (status, words in reason) == (wanted, True), found


@pytest.mark.parametrize(
    ("changes", "wanted", "words"),
    [
        ({"return.nvmlInit": 9}, "skipped", "Driver Not Loaded"),
        ({"return.nvmlInit": 18}, "unhealthy", "version mismatch"),
        ({"driver": "550.54"}, "skipped", "older than 570"),
    ],
)
def test_verdicts_about_a_session_that_begins(run, changes, wanted, words) -> None:
    """So does what it says once, at the start."""
    status, reason = run("print(json.dumps(gpu()))", {**HEALTHY, **changes})
    assert (status, words in reason) == (wanted, True), reason


def test_hung_driver(run) -> None:
    """A driver that hangs is unhealthy in time; when it comes back, so does the check."""
    found = run(
        """
first = gpu()
set_answers(hang__nvmlDeviceGetCount=1)
start = time.monotonic()
os.environ["NVRX_NVML_TIMEOUT_S"] = "0.3"
hung = gpu()
again = gpu()
took_s = time.monotonic() - start
set_answers(hang__nvmlDeviceGetCount=None)
os.environ["NVRX_NVML_TIMEOUT_S"] = "20"
until(lambda: gpu()[0] == "healthy")
print(json.dumps([first, hung, again, took_s]))"""
    )
    first, hung, again, took_s = found
    assert first[0] == "healthy"
    assert "hung driver" in hung[1]
    assert "hung driver" in again[1]
    assert took_s < 10


def test_hung_driver_does_not_keep_the_process(run) -> None:
    """A program ends although a driver call never returns."""
    start = time.monotonic()
    found = run(
        "set_answers(hang__nvmlInit=1); print(json.dumps(gpu()))", NVRX_NVML_TIMEOUT_S="0.3"
    )
    assert "hung driver" in found[1]
    assert time.monotonic() - start < 40


def test_forked_child_asks_through_a_process_of_its_own(run) -> None:
    """A forked child gets the right answer and never uses the session of its parent."""
    parent, child, status = run(
        """
gpu()
set_answers(field__1__230=1)
read, write = os.pipe()
pid = os.fork()
if pid == 0:
    os.write(write, json.dumps([os.getpid(), gpu()[0]]).encode())
    os._exit(0)
os.waitpid(pid, 0)
child, status = json.loads(os.read(read, 1000))
print(json.dumps([os.getpid(), child, status]))"""
    )
    assert status == "unhealthy"
    pids = {int(pid) for pid, _ in run.calls}
    assert child not in pids
    assert len(pids) == 2
    assert (parent in pids) is (run.mode == "")


def test_child_forked_before_the_first_look_is_like_any_process(run) -> None:
    """A child of a process that never asked the driver asks it itself."""
    pid, status = run(
        """
read, write = os.pipe()
pid = os.fork()
if pid == 0:
    os.write(write, gpu()[0].encode())
    os._exit(0)
os.waitpid(pid, 0)
print(json.dumps([pid, os.read(read, 1000).decode()]))"""
    )
    assert status == "healthy"
    assert ({int(each) for each, _ in run.calls} == {pid}) is (run.mode == "")


def test_event_loop_goes_on_during_a_slow_call(run) -> None:
    """While a call of the driver does not return, the event loop goes on."""
    turns, reason = run(
        """
import asyncio
check = h.GPUHealthCheck(interval=0, kmsg="/nonexistent")
check()

def asked():
    return open(os.environ["FAKE_NVML_CALLS"]).read().count("nvmlDeviceGetCount")

async def main():
    done, turns, before = asyncio.Event(), 0, asked()
    async def on_failure():
        done.set()
    check.on_failure = on_failure
    set_answers(hang__nvmlDeviceGetCount=1, field__1__230=1)
    task = asyncio.create_task(check.async_check())
    deadline = time.monotonic() + 20
    while asked() == before and time.monotonic() < deadline:
        await asyncio.sleep(0.001)
    while asked() > before and not done.is_set() and turns < 100:
        await asyncio.sleep(0.001)
        turns += 1
    set_answers(hang__nvmlDeviceGetCount=None)
    await asyncio.wait_for(done.wait(), 20)
    task.cancel()
    return turns

print(json.dumps([asyncio.run(main()), check.check().reason]))""",
        NVRX_NVML_TIMEOUT_S="20",
    )
    assert turns == 100
    assert "GPU 1" in reason


def test_killed_helper_is_replaced(run) -> None:
    """When the helper process dies, the check says so once and works again."""
    if not run.mode:
        pytest.skip("there is no helper in this mode")
    first, broken, after = run(
        """
import signal
first = gpu()
children = open(f"/proc/self/task/{os.getpid()}/children").read().split()
for child in children:
    os.kill(int(child), signal.SIGKILL)
broken = gpu()
print(json.dumps([first, broken, gpu()]))"""
    )
    assert (first[0], after[0]) == ("healthy", "healthy")
    assert "the helper process failed" in broken[1]


def test_command_line(library, tmp_path) -> None:
    """The program prints one result per check; its exit code says whether the node is fit."""
    control = tmp_path / "control"
    env = {**os.environ, **library.environment(), "FAKE_NVML_CONTROL": str(control)}
    command = [sys.executable, "-m", "nvidia_resiliency_ext.shared_utils.health_check", "--json"]

    def program(*arguments: str) -> tuple[int, list[dict[str, object]]]:
        done = subprocess.run(
            [*command, *arguments],
            env=env,
            capture_output=True,
            text=True,
            timeout=150,
            check=False,
        )
        return done.returncode, [json.loads(line) for line in done.stdout.splitlines()]

    control.write_text(in_lines(HEALTHY))
    code, results = program("--checks", "gpu,nvlink", "--expected-gpus", "2")
    assert code == 0
    assert [(each["name"], each["status"]) for each in results] == [
        ("gpu", "healthy"), ("nvlink", "healthy"),
    ]  # fmt: skip
    assert program("--checks", "gpu", "--expected-gpus", "8")[0] == 1
    assert program("--checks", "gpu", "--deadline", "0")[0] == 2
