# SPDX-License-Identifier: Apache-2.0
"""Exceptions without @record are named, and a program that cannot start is not started for ever."""

import dataclasses
import re
import signal
import subprocess
import sys
from unittest import mock

import pytest

from nvidia_resiliency_ext.fault_tolerance._agent import agent as agents
from nvidia_resiliency_ext.fault_tolerance._agent.agent import NodeAgent
from nvidia_resiliency_ext.fault_tolerance._core.exceptions import (
    ErrorFile,
    last_exception,
    read_error_output,
)
from nvidia_resiliency_ext.fault_tolerance._core.machine import (
    Assignment,
    Phase,
    Policy,
    Signalled,
)
from nvidia_resiliency_ext.fault_tolerance._monitor.slot import Steps
from nvidia_resiliency_ext.fault_tolerance._report.failures import (
    OTHERS_MAY_TAKE_S,
    Failure,
    StartFailures,
    cause_of,
    failure_table,
    is_program_error,
)
from nvidia_resiliency_ext.fault_tolerance.config import FaultToleranceConfig
from nvidia_resiliency_ext.shared_utils.children import ExitStatus
from nvidia_resiliency_ext.shared_utils.clock import ManualClock

LAUNCHER = "nvidia_resiliency_ext.fault_tolerance.launcher"
TWO_TRACEBACKS = """Traceback (most recent call last):
  File 'a'
A: 1

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File 'b'
B: 2
"""
TOP = "Traceback (most recent call last):\n  File 'a', line 1, in <module>\n    f()\n"
CAUGHT = "Traceback (most recent call last):\n  File 'a', line 1, in main\n    f()\n"
# What stands behind a traceback although the program was at its end.
AFTERWARDS = """[rank0]:[W1123 06:28:54.123456789 ProcessGroupNCCL.cpp:1496] Warning: not destroyed
/usr/lib/python3.11/multiprocessing/resource_tracker.py:224: UserWarning: 1 leaked semaphore
  warnings.warn('resource_tracker: %d leaked')
host:12:34 [0] NCCL INFO comm 0x55 rank 0 nranks 2 - Abort COMPLETE

wandb: View run at https://example.org
Exception ignored in: <function P.__del__ at 0x7f>
Traceback (most recent call last):
  File 'p', line 7, in __del__
AttributeError: 'NoneType' object has no attribute 'close'
"""
MISSING = "ModuleNotFoundError: No module named 'nowhere'"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", None),
        ("a warning\n", None),
        (
            "Traceback (most recent call last):\n  File 'a', line 1\n    f()\nKeyError: 3\n",
            "KeyError: 3",
        ),
        ("Traceback (most recent call last):\n  File 'a', line 1\n", None),
        (
            "[rank1]: Traceback (most recent call last):\n[rank1]:   File 'a'\n[rank1]: E: x\n",
            "E: x",
        ),
        (
            "  File 'a', line 1\n    x y\nSyntaxError: invalid syntax\n",
            "SyntaxError: invalid syntax",
        ),
        (TWO_TRACEBACKS, "B: 2"),
        (TOP + "KeyError: 3\n" + AFTERWARDS, "KeyError: 3"),
        (CAUGHT + "ImportError: apex\ngoing on without apex\n", None),
        ("SyntaxError: of another program\ngoing on\n", None),
    ],
)
def test_the_last_exception_of_an_output_is_found(text, message):
    """The one whose traceback stands last; nothing is guessed where there is none."""
    found = last_exception(text)
    assert (found and found.message) == message
    assert found is None or found.is_last


def test_lines_behind_an_exception_may_be_more_of_its_text():
    """It is named, but for all that is known the program may have gone on."""
    found = last_exception(TOP + "RuntimeError: CUDA error: unspecified\nFor debugging set X\n")
    assert (found.message, found.is_last) == ("RuntimeError: CUDA error: unspecified", False)


def test_what_an_earlier_worker_wrote_is_not_read(tmp_path):
    """A file that is appended to is read from where it ended when the worker started."""
    path = tmp_path / "stderr.log"
    path.write_text("Traceback (most recent call last):\n  File 'a'\nKeyError: 3\n")
    size = path.stat().st_size
    assert read_error_output(str(path), 0).message == "KeyError: 3"
    assert read_error_output(str(path), size) is None
    assert read_error_output(str(tmp_path / "none"), 0) is None
    assert read_error_output("/dev/zero", 0) is None


def failure(rank, message):
    """Return a failure that was read from a worker's stderr."""
    return Failure(
        *(rank, rank, 100 + rank, "h", ExitStatus(1), 1.0 + rank),
        ErrorFile("", message, f"Traceback\n  here\n{message}", None),
    )


def test_the_cause_names_the_exception_and_equal_tracebacks_are_printed_once():
    """The line about the restart has type and text; the table repeats no traceback."""
    failures = [failure(0, MISSING), failure(1, MISSING), failure(2, "KeyError: 3")]
    cause = cause_of(failures[0])
    assert cause.what == f"rank 0 on host h exited with code 1: {MISSING}"
    assert "error_file" not in cause.detail
    table = failure_table("train.py", failures)
    assert table.count(MISSING) == 1
    assert "traceback : the same as of rank 0" in table
    assert table.count("KeyError: 3") == 1


@pytest.mark.parametrize(
    ("cycles", "hopeless"),
    [
        ([[MISSING, MISSING], [MISSING, MISSING]], True),
        ([[MISSING, MISSING]], False),
        ([[MISSING], [MISSING]], False),
        ([[MISSING, MISSING], [MISSING, None]], False),
        ([[MISSING, MISSING], ["NameError: x", "NameError: x"]], False),
        ([["OSError: x", "OSError: x"], ["OSError: x", "OSError: x"]], False),
        ([[MISSING, MISSING], [None, None], [MISSING, MISSING]], False),
    ],
)
def test_only_the_same_error_of_the_program_on_all_ranks_is_hopeless(cycles, hopeless):
    """Twice in a row, on every rank, of a kind that no restart mends."""
    rule = StartFailures(2)
    assert [rule.is_hopeless(c, 2, 1.0, stepped=False) for c in cycles][-1] is hopeless


def test_a_job_that_has_done_a_step_or_worked_for_long_goes_on():
    """What once worked can work again; the rule can be switched off."""
    both = [MISSING, MISSING]
    rule = StartFailures(1)
    assert not rule.is_hopeless(both, 2, 1.0, stepped=True)
    assert not rule.is_hopeless(both, 2, 1.0, stepped=False)
    assert not StartFailures(1).is_hopeless(both, 2, 3600.0, stepped=False)
    assert not StartFailures(0).is_hopeless(both, 2, 1.0, stepped=False)
    assert StartFailures(1).is_hopeless(both, 2, 1.0, stepped=False)


@pytest.mark.parametrize(("lived_s", "stepped"), [(1.0, True), (120.0, False)])
def test_a_cycle_that_ended_otherwise_is_remembered(lived_s, stepped):
    """A step or two minutes of work in any cycle, whatever ended it, end the rule."""
    rule = StartFailures(1)
    rule.cycle_ended(lived_s, stepped=stepped)
    assert not rule.is_hopeless([MISSING], 1, 1.0, stepped=False)


def test_a_cycle_that_ended_otherwise_is_between_two_in_a_row():
    """A node that failed to start its workers, say: the count begins anew."""
    rule = StartFailures(2)
    assert not rule.is_hopeless([MISSING], 1, 1.0, stepped=False)
    rule.cycle_ended(1.0, stepped=False)
    rule.cycle_ended(1.0, stepped=False)
    assert not rule.is_hopeless([MISSING], 1, 1.0, stepped=False)
    rule.cycle_ended(1.0, stepped=False)
    assert rule.is_hopeless([MISSING], 1, 1.0, stepped=False)


@pytest.mark.parametrize(
    "what",
    [
        "libcudart.so.12: cannot open shared object file: No such file or directory",
        "/lustre/lib.so: Input/output error",
        "[Errno 116] Stale file handle: '/lustre/lib.py'",
    ],
)
def test_an_import_that_fails_by_its_file_system_is_no_error_of_the_program(what):
    """The next cycle may find the file."""
    assert not is_program_error(f"ImportError: {what}")


@pytest.fixture
def agent(tmp_path):
    """Return an agent that runs two ranks, the first of which has just failed at its start."""
    clock, output = ManualClock(), tmp_path / "stderr.log"
    output.write_text(f"{TOP}{MISSING}\n")
    quiet = mock.MagicMock()
    quiet.steps_of_rank0.return_value = Steps(None, 0, 0.0)
    quiet.hang_report.return_value = {}
    quiet.should_terminate_early.return_value = False
    parts = ("rendezvous", "admission", "monitor", "tracker", "reporter", "controller", "loop")
    job = mock.MagicMock(clock=clock, **dict.fromkeys(parts, quiet))
    job.plan.fault_tol_cfg = FaultToleranceConfig(start_failure_limit=2)
    it = NodeAgent(job, Policy(2, 15.0, 15.0, 93))
    it.workers = mock.MagicMock(started={0: mock.MagicMock(), 1: mock.MagicMock()})
    it._assignment = Assignment(0, 0, 1, 0, 2, "h", 1)
    it._node = dataclasses.replace(it._node, phase=Phase.RUNNING, running=frozenset({0, 1}))
    it._error_outputs = {0: (str(output), 0)}
    it._started_at = clock.monotonic()
    it._worker_exited(0, ExitStatus(1))
    assert not it._settle()  # The other rank may fail likewise.
    return it


def test_an_event_does_not_overtake_an_exit_that_waits_for_others(agent):
    """The failure is the cause, and is reported, although a signal comes before the others."""
    agent.post(Signalled(signal.SIGTERM))
    assert agent._settle()
    assert [failure.error.message for failure in agent._failures] == [MISSING]
    assert agent._node.cause.what.endswith(MISSING)


def test_the_output_of_a_rank_is_read_once(agent, monkeypatch):
    """It may be on a file system that hangs."""
    monkeypatch.setattr(agents.exceptions, "read_error_output", None)
    agent.clock.advance(OTHERS_MAY_TAKE_S)
    assert agent._settle()
    assert agent._failures[0].error.message == MISSING


def test_steps_are_remembered_while_a_monitor_is_replaced(agent):
    """The new one does not know yet what the ranks have told."""
    agent.monitor.steps_of_rank0.return_value = Steps(7, 7, 1.0)
    agent._tick_progress()
    agent.monitor.steps_of_rank0.return_value = Steps(None, 0, 0.0)
    agent.clock.advance(OTHERS_MAY_TAKE_S)
    assert agent._settle()
    assert not agent._start_failures.counts([MISSING], 1.0, stepped=False)


def test_a_long_cycle_that_a_signal_ends_is_remembered(agent):
    """No exit was evaluated in it, and yet the program has shown that it can start."""
    agent._exits.clear()
    agent.clock.advance(3600.0)
    agent.post(Signalled(signal.SIGTERM))
    assert agent._settle()
    assert not agent._start_failures.counts([MISSING], 1.0, stepped=False)


def launch(tmp_path, *flags):
    """Run a job of two ranks that import what is not there, and return its log and exit code."""
    # They wait for each other: one that started much later would be stopped, and not fail alike.
    (tmp_path / "train.py").write_text(
        "import os, time\n"
        "mine = f\"started-{os.environ['NVRX_CYCLE']}-\"\n"
        "open(mine + os.environ['RANK'], 'w').close()\n"
        "while not (os.path.exists(mine + '0') and os.path.exists(mine + '1')):\n"
        "    time.sleep(0.005)\n"
        "import nowhere\n"
    )
    command = [sys.executable, "-m", LAUNCHER, "--standalone", "--nproc-per-node=2", *flags]
    done = subprocess.run(
        [*command, "--max-restarts=3", "train.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.stderr, done.returncode


def test_a_job_whose_ranks_cannot_start_ends_after_the_second_cycle(tmp_path):
    """One line says why, and how to go on all the same; then comes the error, not a report."""
    log, code = launch(tmp_path, "--tee=3")
    assert code == 1
    (restart,) = re.findall(r"restarting because .*", log)
    assert restart.endswith(f"exited with code 1: {MISSING} (2 restarts left after this one)")
    assert len(re.findall("stopping for good: all ranks failed before any step", log)) == 1
    assert "2 restarts not used; --ft-start-failure-limit=0" in log
    assert "where the time went" not in log
    table = log[log.index("train.py FAILED") :]
    assert table.count(MISSING) == 1


def test_all_restarts_are_used_where_the_user_says_so(tmp_path):
    """Without the limit a job fails as often as it may; the hint about @record comes at once."""
    log, code = launch(tmp_path, "--ft-start-failure-limit=0", "--ft-restart-backoff=0")
    assert code == 1
    assert len(re.findall("restarting because", log)) == 3
    assert "no restart left" in log
    assert len(re.findall("the exception, if there was one, is not known here", log)) == 1
