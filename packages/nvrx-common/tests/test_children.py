# SPDX-License-Identifier: Apache-2.0
"""Real children: their start, how they end, and what never happens to anybody else."""

import errno
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import leftovers
import pytest

from nvidia_resiliency_ext.shared_utils import children, procfs
from nvidia_resiliency_ext.shared_utils.children import (
    ExitStatus,
    PidHandle,
    pidfd_available,
    start_child,
)
from nvidia_resiliency_ext.shared_utils.errors import ChildStartError

PROGRAMS = Path(__file__).parent / "programs"
LONG_S = 30.0

pytestmark = pytest.mark.usefixtures("each_watch")


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait for something that gives no event."""
    deadline = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        threading.Event().wait(0.01)


@pytest.mark.parametrize(
    ("script", "status", "words"),
    [
        ("exit 0", ExitStatus(0), "exit code 0"),
        ("exit 7", ExitStatus(7), "exit code 7"),
        ("kill -SEGV $$", ExitStatus(None, signal.SIGSEGV), "killed by SIGSEGV (11)"),
        ("kill -40 $$", ExitStatus(None, 40), "killed by signal 40"),
    ],
)
def test_status_is_read_once_and_kept(script: str, status: ExitStatus, words: str) -> None:
    """A child's end is reported with code or signal, and every later question is answered alike."""
    with start_child(["sh", "-c", script]) as child:
        assert child.wait(LONG_S) == status
        assert child.poll() == child.wait(0.0) == status
        assert status.describe() == words
        assert status.returncode == (-status.signal if status.signal else status.code)


def test_descriptor_becomes_readable_when_the_child_ends() -> None:
    """A selector learns of the end of a child without polling, and not before."""
    reader, writer = os.pipe()
    with start_child(["sh", "-c", "read line"], stdin=reader) as child:
        os.close(reader)
        poller = select.poll()
        poller.register(child.fileno(), select.POLLIN)
        assert poller.poll(0) == []
        assert child.poll() is None
        os.close(writer)
        assert poller.poll(LONG_S * 1000)
        assert child.poll() == ExitStatus(1)


def test_wait_gives_up_in_time_and_can_go_on() -> None:
    """Waiting for a child that lives on returns nothing at the deadline and hurts nothing."""
    with start_child(["sleep", "60"]) as child:
        begin = time.monotonic()
        assert child.wait(0.1) is None
        assert 0.1 <= time.monotonic() - begin < LONG_S
        assert child.signal(signal.SIGTERM)
        assert child.wait(LONG_S) == ExitStatus(None, signal.SIGTERM)


def test_nothing_is_signalled_after_the_reaping() -> None:
    """Once a child was reaped its number may be anybody's, so no signal is sent to it."""
    with start_child(["true"]) as child:
        child.wait(LONG_S)
        assert not child.signal(signal.SIGKILL)
        assert not child.signal_group(signal.SIGKILL)


def test_recycled_number_is_left_alone(each_watch: str) -> None:
    """A process that got the number of a reaped child is not signalled in its place."""
    with start_child(["sleep", "600"]) as unrelated, start_child(["true"]) as child:
        child.wait(LONG_S)
        if each_watch == "no pidfd":
            child.pid = unrelated.pid  # as if the kernel had given the number away
        assert not child.signal(signal.SIGKILL)
        assert unrelated.poll() is None


def test_group_is_ended_after_its_leader_was_reaped() -> None:
    """What a child started in its group can still be ended when the child itself is gone."""
    with start_child(["sh", "-c", "sleep 600 & exit 3"]) as child:
        assert child.wait(LONG_S) == ExitStatus(3)
        [grandchild] = procfs.pids_in_groups([child.pid])
        assert child.signal_group(signal.SIGKILL)
        wait_until(lambda: not procfs.is_running(grandchild))
        assert not child.signal_group(signal.SIGKILL)


def test_recycled_group_is_left_alone() -> None:
    """A group that now belongs to somebody else under the same number gets no signal."""
    with start_child(["sleep", "600"]) as unrelated, start_child(["true"]) as child:
        child.wait(LONG_S)
        child.pid = unrelated.pid  # as if the kernel had given the number away
        assert not child.signal_group(signal.SIGKILL)
        assert unrelated.poll() is None


def test_group_of_a_child_without_a_session_is_refused() -> None:
    """Signalling the group of such a child would hit ourselves."""
    with start_child(["sleep", "60"], new_session=False) as child:
        assert os.getpgid(child.pid) == os.getpgid(0)
        with pytest.raises(ValueError, match="our process group"):
            child.signal_group(signal.SIGTERM)
        assert child.stop(0.0) is not None


def test_stop_kills_what_ignores_the_request() -> None:
    """A stopped process that ignores SIGTERM is gone, with its group, after its grace."""
    script = "trap '' TERM; sleep 600 & echo ready; kill -STOP $$; wait"
    with start_child(["sh", "-c", script], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        status = child.stop(0.2)
        assert status == ExitStatus(None, signal.SIGKILL)
        wait_until(lambda: procfs.pids_in_groups([child.pid]) == [])


def test_stop_leaves_a_polite_child_its_exit_code() -> None:
    """A child that ends by itself within its grace is reported with its own code."""
    script = "trap 'exit 9' TERM; echo ready; while :; do sleep 0.05; done"
    with start_child(["sh", "-c", script], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        assert child.stop(LONG_S) == ExitStatus(9)


def test_close_ends_a_running_child_and_may_be_repeated() -> None:
    """The owner's close leaves no process, no zombie and no descriptor."""
    child = start_child(["sleep", "600"], stdin=subprocess.PIPE)
    child.close()
    child.close()
    assert procfs.read_stat(child.pid) is None
    assert child.poll() == ExitStatus(None, signal.SIGKILL)


def test_status_taken_by_somebody_else_is_a_failure() -> None:
    """If another waiter reaped the child its end is reported as lost, never as success."""
    with start_child(["true"]) as child:
        os.waitpid(child.pid, 0)
        status = child.wait(LONG_S)
        assert status is not None
        assert status.lost
        assert status.returncode != 0
        assert "another waiter" in status.describe()


def test_statuses_survive_an_inherited_ignored_sigchld() -> None:
    """A program whose parent ignored SIGCHLD still learns how its own children ended."""
    program = (
        "from nvidia_resiliency_ext.shared_utils.children import start_child\n"
        "with start_child(['sh', '-c', 'exit 5']) as child:\n"
        "    print(child.wait(20.0).describe())\n"
    )
    shell = f"trap '' CHLD; exec {sys.executable} -c \"$PROGRAM\""
    environment = dict(os.environ, PROGRAM=program)
    result = subprocess.run(
        ["bash", "-c", shell], env=environment, capture_output=True, text=True, check=False
    )
    assert result.stdout.strip() == "exit code 5", result.stderr


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (["/no/such/program"], "No such file"),
        (["/etc/passwd"], "Permission denied"),
        (["true", "a\0b"], "null byte"),
    ],
)
def test_program_that_cannot_run_is_one_error(argv: list[str], reason: str) -> None:
    """Whatever the system says against a program comes as a ChildStartError with the command."""
    with pytest.raises(ChildStartError, match=reason) as caught:
        start_child(argv)
    assert caught.value.argv == tuple(argv)


@pytest.mark.parametrize("die_with_parent", [False, True])
def test_child_starts_with_clean_signals(die_with_parent: bool) -> None:
    """Neither our blocked signals nor Python's ignored SIGPIPE reach the child."""
    # No shell: those clear the mask on their own.
    command = ["grep", "-E", "^Sig(Blk|Ign)", "/proc/self/status"]
    old = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGUSR1])
    try:
        child = start_child(command, stdout=subprocess.PIPE, die_with_parent=die_with_parent)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old)
    with child:
        assert child.stdout is not None
        masks = dict(line.split() for line in child.stdout.read().decode().splitlines())
    assert int(masks["SigBlk:"], 16) == 0
    assert not int(masks["SigIgn:"], 16) >> (signal.SIGPIPE - 1) & 1


def test_child_inherits_only_what_it_is_given() -> None:
    """The child has its streams and the descriptors passed to it, and none of ours."""
    reader, writer = os.pipe()
    os.set_inheritable(reader, True)
    try:
        with start_child(
            ["sh", "-c", "ls /proc/self/fd; echo mark > /proc/self/fd/$0", str(writer)],
            stdout=subprocess.PIPE,
            pass_fds=[writer],
            env={"PATH": os.environ["PATH"]},
            cwd="/",
        ) as child:
            assert child.stdout is not None
            descriptors = set(map(int, child.stdout.read().split()))
        assert os.read(reader, 10) == b"mark\n"
    finally:
        os.close(reader)
        os.close(writer)
    # The listing itself holds one more descriptor open.
    assert {0, 1, 2, writer} <= descriptors
    assert reader not in descriptors
    assert len(descriptors) == 5


def test_child_dies_with_its_parent(each_watch: str) -> None:
    """A child that asked for it is killed by the kernel when its parent is killed."""
    environment = dict(os.environ)
    if each_watch == "no pidfd":
        environment["NVRX_FORCE_NO_PIDFD"] = "1"
    program = [sys.executable, str(PROGRAMS / "die_with_parent.py")]
    with start_child(program, env=environment, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        grandchild = int(parent.stdout.readline())
        assert procfs.is_running(grandchild)
        parent.signal(signal.SIGKILL)
        wait_until(lambda: not procfs.is_running(grandchild))


def test_a_child_that_cannot_be_watched_does_not_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the limit of threads a child that needs one to be watched is ended, and told as such."""

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    before, others = len(os.listdir("/proc/self/fd")), leftovers.children()
    monkeypatch.setattr(children, "pidfd_available", lambda: False)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    path = tmp_path / "pid"
    os.mkfifo(path)
    with pytest.raises(ChildStartError, match=r"cannot be watched: .*new thread"):
        start_child(["sh", "-c", 'read line < "$0"', str(path)])
    # An earlier test of this process may have left multiprocessing's tracker, a child as well.
    assert leftovers.children() == others
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_stopped_child_learns_of_its_parents_death() -> None:
    """A stopped child that asked for it runs on when its parent is killed, and can leave."""
    program = [sys.executable, str(PROGRAMS / "wake_when_orphaned.py")]
    with start_child(program, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        grandchild = int(parent.stdout.readline())
        os.kill(grandchild, signal.SIGSTOP)
        wait_until(lambda: _state(grandchild) == "T")
        parent.signal(signal.SIGKILL)
        wait_until(lambda: not procfs.is_running(grandchild))


def _state(pid: int) -> str:
    stat = procfs.read_stat(pid)
    return "" if stat is None else stat.state


def test_many_threads_may_wait_for_one_child() -> None:
    """However many threads ask at once, each gets the one status."""
    answers: list[ExitStatus | None] = []
    with start_child(["sh", "-c", "read line; exit 4"], stdin=subprocess.PIPE) as child:
        threads = [
            threading.Thread(target=lambda: answers.append(child.wait(LONG_S))) for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        assert child.stdin is not None
        child.stdin.write(b"\n")
        child.stdin.flush()
        for thread in threads:
            thread.join(LONG_S)
    assert answers == [ExitStatus(4)] * 8


def test_many_children_leave_no_descriptor() -> None:
    """Starting and closing children over and over keeps the number of descriptors."""
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(30):
        with start_child(["true"]) as child:
            assert child.wait(LONG_S) == ExitStatus(0)
    assert len(os.listdir("/proc/self/fd")) == before


def test_handle_signals_the_process_it_took_hold_of() -> None:
    """A handle on a foreign process knows when it lives, signals it, and sees its end."""
    with start_child(["sleep", "600"]) as child, PidHandle(child.pid) as handle:
        stat = procfs.read_stat(child.pid)
        assert stat is not None
        assert handle.start_ticks == stat.start_ticks
        assert handle.alive()
        assert not handle.wait(0.05)
        assert (handle.fileno() is not None) == pidfd_available()
        assert handle.signal(signal.SIGTERM)
        assert handle.wait(LONG_S)
        assert not handle.alive()
        child.wait(LONG_S)
        assert not handle.signal(signal.SIGTERM)


def test_handle_refuses_who_is_not_there() -> None:
    """A dead process, a zombie, or one that started at another time cannot be taken hold of."""
    with start_child(["sleep", "600"]) as child:
        stat = procfs.read_stat(child.pid)
        assert stat is not None
        with pytest.raises(ProcessLookupError, match="took over"):
            PidHandle(child.pid, start_ticks=stat.start_ticks - 1)
        PidHandle(child.pid, start_ticks=stat.start_ticks).close()
        child.signal(signal.SIGKILL)
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        with pytest.raises(ProcessLookupError):
            PidHandle(child.pid)
        child.wait(LONG_S)
        with pytest.raises(ProcessLookupError):
            PidHandle(child.pid)


def test_handle_never_acts_on_a_recycled_number() -> None:
    """If the number now names another process that one is not signalled."""
    with start_child(["sleep", "600"]) as unrelated, start_child(["sleep", "600"]) as child:
        with PidHandle(child.pid) as handle:
            child.signal(signal.SIGKILL)
            child.wait(LONG_S)
            handle.pid = unrelated.pid  # as if the kernel had given the number away
            handle.start_ticks -= 1_000_000
            assert not handle.alive()
            assert not handle.signal(signal.SIGKILL)
        assert unrelated.poll() is None


def test_a_hold_that_cannot_be_taken_keeps_no_descriptor():
    """Without a descriptor left for /proc taking hold fails, and the pidfd is given back."""
    code = (
        "import os, resource\n"
        "from nvidia_resiliency_ext.shared_utils.children import PidHandle, pidfd_available\n"
        "PidHandle(os.getppid()).close()\n"
        "before = len(os.listdir('/proc/self/fd'))\n"
        "_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (3 + pidfd_available(), hard))\n"
        "try: PidHandle(os.getppid())\n"
        "except OSError as error: print(error.errno)\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))\n"
        "assert len(os.listdir('/proc/self/fd')) == before\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{errno.EMFILE}\n"
