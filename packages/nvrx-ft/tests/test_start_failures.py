# SPDX-License-Identifier: Apache-2.0
"""Exceptions without @record are named, and a program that cannot start is not started for ever."""

import re
import subprocess
import sys

import pytest

from nvidia_resiliency_ext.fault_tolerance._agent.start_failures import StartFailures
from nvidia_resiliency_ext.fault_tolerance._core.exceptions import (
    ErrorFile,
    last_exception,
    read_error_output,
)
from nvidia_resiliency_ext.fault_tolerance._report.failures import (
    Failure,
    cause_of,
    failure_table,
)
from nvidia_resiliency_ext.shared_utils.children import ExitStatus

LAUNCHER = "nvidia_resiliency_ext.fault_tolerance.launcher"
TWO_TRACEBACKS = """Traceback (most recent call last):
  File 'a'
A: 1

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File 'b'
B: 2
last words
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
    ],
)
def test_the_last_exception_of_an_output_is_found(text, message):
    """The one whose traceback stands last; nothing is guessed where there is none."""
    found = last_exception(text)
    assert (found and found.message) == message


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


def launch(tmp_path, *flags):
    """Run a job of two ranks that import what is not there, and return its log and exit code."""
    (tmp_path / "train.py").write_text("import nowhere\n")
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
