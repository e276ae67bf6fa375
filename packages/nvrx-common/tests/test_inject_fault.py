# SPDX-License-Identifier: Apache-2.0
"""Each fault does to a process what it promises, at its time and after its callback."""

import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

_PROGRAM = str(Path(__file__).with_name("programs") / "fault_victim.py")
_GPU_PROGRAM = str(Path(__file__).with_name("programs") / "gpu_fault_victim.py")
_TRAINER = str(Path(__file__).with_name("programs") / "fault_trainer.py")
_LOGGER = "nvidia_resiliency_ext.shared_utils.inject_fault"
_JITTER_S = 5.0  # a busy machine is no error of ours
Lines = list[dict[str, Any]]


@contextlib.contextmanager
def _victim(
    fault: str, scene: str, delay: float = 0.1, **env: str
) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, _PROGRAM, fault, str(delay), scene]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env={**os.environ, **env}, **pipes) as process:  # type: ignore[call-overload]
        try:
            yield process
        finally:
            process.kill()


def _run(fault: str, scene: str, delay: float = 0.1, **env: str) -> tuple[int, Lines, str]:
    with _victim(fault, scene, delay, **env) as process:
        out, err = process.communicate(timeout=150)
    return process.returncode, [json.loads(line) for line in out.splitlines()], err


def _what(lines: Lines, what: str) -> dict[str, Any]:
    (found,) = (line for line in lines if line["what"] == what)
    return found


@pytest.mark.parametrize(
    ("fault", "signum"),
    [
        ("SIGKILL", signal.SIGKILL),
        ("SIGTERM", signal.SIGTERM),
        ("OS_ABORT", signal.SIGABRT),
        ("SEGFAULT", signal.SIGSEGV),
    ],
)
def test_fatal_faults(fault: str, signum: int) -> None:
    """The process dies of the right signal, at its time, after the callback and the log line."""
    start = time.monotonic()
    code, lines, err = _run(fault, "alive", 0.2)
    assert code == -signum
    assert _what(lines, "callback")["thread"]
    assert 0 <= _what(lines, "callback")["at"] - _what(lines, "due")["due"] < _JITTER_S
    assert time.monotonic() - start < 60
    (line,) = [line for line in err.splitlines() if "CRITICAL" in line]
    assert line.startswith(f"CRITICAL {_LOGGER} FAULT INJECTION: {fault} in process ")


@pytest.mark.parametrize("fault", ["ASYNC_EXC", "SIGNAL_EXC"])
def test_exceptions_of_the_main_thread(fault: str) -> None:
    """The exception comes in the main thread, which goes on after it; SIGUSR1 is as before."""
    code, lines, err = _run(fault, "exceptions")
    assert (code, _what(lines, "exception")["thread"]) == (0, True), err
    assert _what(lines, "on")["usr1"]
    assert 0 <= _what(lines, "exception")["at"] - _what(lines, "due")["due"] < _JITTER_S


def test_interrupt() -> None:
    """SIGINT arrives as Ctrl-C does, from outside, and the process may go on."""
    code, lines, err = _run("SIGINT", "exceptions")
    assert (code, _what(lines, "interrupt")["what"]) == (0, "interrupt"), err


def test_workload_exception() -> None:
    """The flag raises where the workload asks for it, and only once."""
    code, lines, err = _run("WORKLOAD_EXC", "workload")
    assert (code, _what(lines, "on")["what"]) == (0, "on"), err
    assert 0 <= _what(lines, "exception")["at"] - _what(lines, "due")["due"] < _JITTER_S


def test_stop() -> None:
    """SIGSTOP stops the process, and after SIGCONT it goes on with nothing left behind."""
    with _victim("SIGSTOP", "exceptions") as process:
        pid, status = os.waitpid(process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize(("fault", "signum"), [("SIGKILL", -9), ("SIGTERM", -15)])
def test_signal_reaches_a_stuck_interpreter(fault: str, signum: int) -> None:
    """A process whose GIL is held for ever gets the signal, and stderr says what happened."""
    start = time.monotonic()
    code, lines, err = _run(fault, "stuck", 0.5)
    assert code == signum
    assert _what(lines, "stuck")
    assert not [line for line in lines if line["what"] in {"free", "callback"}]
    assert time.monotonic() - start < 60
    assert f"FAULT INJECTION: {fault} to process" in err


@pytest.mark.parametrize("forced", ["0", "1"])
def test_helper_ends_with_its_process(forced: str) -> None:
    """The program that would send a signal ends when there is nobody to send it to.

    That nothing is left is checked after each test; without pidfds it may take a second.
    """
    with _victim("SIGKILL", "alive", 3600, NVRX_FORCE_NO_PIDFD=forced) as process:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["what"] == "due"
        dispatched = json.loads(process.stdout.readline())
        assert (dispatched["what"], dispatched["took"] < _JITTER_S) == ("dispatched", True)
        assert process.poll() is None


class _Said:
    """What a process says, line by line, without waiting for it."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        self._fd = process.stdout.fileno()
        os.set_blocking(self._fd, False)
        self._rest = b""

    def words(self) -> list[str]:
        """Return what has been said since the last question."""
        with contextlib.suppress(BlockingIOError):
            self._rest += os.read(self._fd, 65536)
        *lines, self._rest = self._rest.split(b"\n")
        return [json.loads(line)["what"] for line in lines]

    def until(self, is_enough: Callable[[list[str]], bool]) -> None:
        """Wait until what has been said from now on is enough."""
        said: list[str] = []
        deadline = time.monotonic() + 20
        while not is_enough(said):
            assert time.monotonic() < deadline, said
            time.sleep(0.01)
            said += self.words()

    def is_silent(self) -> bool:
        """Listen for a second."""
        end = time.monotonic() + 1.0
        while time.monotonic() < end:
            if self.words():
                return False
            time.sleep(0.01)
        return True


def test_gil_is_held() -> None:
    """No thread of the process runs Python any more, and it dies of SIGKILL alone."""
    with _victim("LOCK_GIL", "deaf") as process:
        said = _Said(process)
        said.until(lambda words: "callback" in words)
        deadline = time.monotonic() + 20
        # A process that was only held up for a while answers.
        while not (said.is_silent() and _is_deaf(process, said)):
            assert time.monotonic() < deadline, "it never fell silent"
        assert process.poll() is None


def _is_deaf(process: subprocess.Popen[str], said: _Said) -> bool:
    process.send_signal(signal.SIGINT)
    return said.is_silent()


def test_hang() -> None:
    """The main thread stands still while other threads go on; SIGINT ends the wait as usual."""
    with _victim("HANG", "beat") as process:
        said = _Said(process)
        said.until(lambda words: "callback" in words)
        said.until(lambda words: words[-20:] == ["other"] * 20)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=150) in {1, -signal.SIGINT}


@pytest.mark.parametrize(("fault", "scene"), [("SLOWDOWN", "rests"), ("CPU_SPIN", "burns")])
def test_slow_faults_end_when_cancelled(fault: str, scene: str) -> None:
    """The main thread is held up again and again, or a core burnt, until the fault is cancelled."""
    code, lines, err = _run(fault, scene)
    found = _what(lines, scene)
    assert code == 0, err
    assert found["found"], found
    assert found["ended"] is False, "it had happened, so cancelling came too late"
    assert not found["threads"], "its thread goes on"


def test_network_is_dropped() -> None:
    """Network sockets are shut down and keep their numbers; a Unix socket pair works on."""
    code, lines, err = _run("NET_DROP", "network")
    assert code == 0, err
    assert _what(lines, "read")["data"] == ""
    assert _what(lines, "read")["fds"] == [True, True]
    assert _what(lines, "pair")["data"] == "x"
    assert _what(lines, "broken")
    assert _what(lines, "refused")


def test_memory_runs_out() -> None:
    """The program's own allocations fail, the kernel would kill it first, cancelling frees all."""
    code, lines, err = _run("OOM_CPU", "memory")
    assert code == 0, err
    assert _what(lines, "memory")["score"] == 1000
    # Whether it may be lowered again is the system's decision.
    before = int(Path("/proc/self/oom_score_adj").read_text())
    assert _what(lines, "memory")["after"] in {before, 1000}


def test_disk_is_full(tmp_path: Path) -> None:
    """A small mount of its own is full for everybody, until the fault is cancelled."""
    namespaces = ["unshare", "--user", "--map-root-user", "--mount"]
    mount = f"mount -t tmpfs -o size=8m none {tmp_path} && exec "
    tried = subprocess.run([*namespaces, "sh", "-c", f"{mount} true"], check=False, timeout=150)
    if tried.returncode:
        pytest.skip("no mount can be made in a namespace of its own here")
    done = subprocess.run(
        [*namespaces, "sh", "-c", f'{mount} "$@"', "-", sys.executable, _PROGRAM,
         "DISK_FULL", "0.1", "disk"],
        env={**os.environ, "NVRX_FAULT_DISK_DIR": str(tmp_path)},
        capture_output=True, text=True, timeout=150, check=False,
    )  # fmt: skip
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, done.stderr
    assert _what(lines, "full")["errno"] == errno.ENOSPC
    assert not _what(lines, "freed")["threads"]


@pytest.mark.parametrize(
    ("names", "armed", "code", "word"),
    [
        ("workload_exc", "WORKLOAD_EXC", 1, "InjectedException"),
        ("sigkill", "SIGKILL", -signal.SIGKILL, ""),
        ("async_exc", "ASYNC_EXC", 1, "InjectedException"),
        ("exit_77", "EXIT_77", 77, ""),
        ("segfault,segfault", "SEGFAULT", -signal.SIGSEGV, ""),
    ],
)
def test_faults_from_a_broadcast_plan(names: str, armed: str, code: int, word: str) -> None:
    """A trainer that sends faults as numbers and calls with keywords gets what it planned.

    These are the calls of Megatron-LM's fault injector.
    """
    done = subprocess.run(
        [sys.executable, _TRAINER, names, "0.1"],
        capture_output=True, text=True, timeout=150, check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    assert done.stdout.splitlines()[0] == f"armed {armed}"
    assert word in done.stderr


@pytest.mark.gpu
@pytest.mark.skipif(not os.path.exists("/dev/nvidiactl"), reason="there is no GPU here")
@pytest.mark.parametrize("fault", ["GPU_ERROR", "GPU_SLEEP", "OOM_GPU"])
def test_gpu_faults(fault: str) -> None:
    """An assertion fails the next synchronisation, a spin never lets it end, memory is gone."""
    command = [sys.executable, _GPU_PROGRAM, fault]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        if fault == "GPU_SLEEP":
            assert process.stdout is not None
            assert process.stdout.readline() == b"step\n"
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()
            return
        try:
            out, _ = process.communicate(timeout=150)
        finally:
            process.kill()
    assert out.split()[-1] == {"GPU_ERROR": b"error", "OOM_GPU": b"memory"}[fault]
