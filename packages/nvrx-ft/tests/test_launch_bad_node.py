# SPDX-License-Identifier: Apache-2.0
"""The command that is told of bad nodes: what it gets, how often, and that nobody waits for it."""

import errno
import json
import os
import shlex
import sys
import threading
import time

import monitored_ranks
import pytest

from nvidia_resiliency_ext.fault_tolerance._core.machine import Cause
from nvidia_resiliency_ext.fault_tolerance._health.bad_node import (
    MAX_REPORT_BYTES,
    BadNodeHook,
    report_of,
)
from nvidia_resiliency_ext.shared_utils.clock import SystemClock

CAUSE = Cause(
    "unhealthy", "host n7 is unhealthy: health check gpu", host="n7", detail={"check": "gpu"}
)


@pytest.fixture
def hook():
    made = []

    def make(*argv, deadline_s=30.0):
        command = " ".join(map(shlex.quote, argv))
        made.append(
            BadNodeHook(
                command,
                os.environ,
                job="j1",
                host="head",
                clock=SystemClock(),
                deadline_s=deadline_s,
            )
        )
        return made[-1]

    yield make
    for one in made:
        one.close()


def python(program):
    return sys.executable, "-S", "-c", program


def test_the_command_gets_the_report_as_json(hook, tmp_path):
    """Node, reason and evidence are one JSON object on standard input; no shell reads a word."""
    out = tmp_path / "a $HOME; 'b'"
    reporter = hook(*python("import sys; open(sys.argv[1], 'w').write(sys.stdin.read())"), str(out))
    reporter.report(CAUSE)
    reporter.close()
    report = json.loads(out.read_text())
    assert report.pop("time") > 1e9
    assert report == {
        "schema": "nvrx_bad_node.v1",
        "node": "n7",
        "reason": "unhealthy",
        "what": CAUSE.what,
        "job": "j1",
        "reported_by": "head",
        "evidence": {"check": "gpu", "detected_by": "launcher"},
    }


def test_a_report_never_waits_for_the_command(hook, tmp_path):
    """Who reports goes on while the command runs, and waits for it in the end."""
    pipe, done = tmp_path / "pipe", tmp_path / "done"
    os.mkfifo(pipe)
    program = "import sys; open(sys.argv[1]).read(); open(sys.argv[2], 'w')"
    reporter = hook(*python(program), str(pipe), str(done))
    reporter.report(CAUSE)
    # The command reads until this is closed; killed at its deadline, it would read no more.
    os.close(_open_once_read(pipe))
    reporter.close()
    assert done.exists()


def _open_once_read(pipe):
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            return os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
        time.sleep(0.01)
    raise AssertionError("nobody reads")


def test_a_command_that_hangs_is_killed_at_its_deadline(hook, caplog):
    """It has its time and no more, and one line says so."""
    reporter = hook(*python("import time; time.sleep(60)"), deadline_s=1.0)
    reporter.report(CAUSE)
    reporter.close()
    reporter._thread.close(30)  # `close` itself waits no longer than the command may take
    (line,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert "not done within 1 s: killed" in line


def test_what_a_command_leaves_behind_is_killed(hook, tmp_path):
    """The command has a process group of its own, and nothing of it outlives the report."""
    reporter = hook("sh", "-c", f"sleep 60 & echo $! > {tmp_path}/pid")
    reporter.report(CAUSE)
    reporter.close()
    monitored_ranks.wait_gone(int((tmp_path / "pid").read_text()))


def test_a_command_that_fails_is_one_line(hook, caplog):
    """A failure names the node, the exit code and the command's last words, in one line."""
    reporter = hook(*python("import sys; print('no\\nroute', file=sys.stderr); sys.exit(3)"))
    reporter.report(CAUSE)
    reporter.close()
    (line,) = [r.getMessage() for r in caplog.records]
    assert line == "--ft-bad-node-hook for n7: exit code 3: no route"


def test_a_command_that_cannot_start_is_one_line(hook, caplog):
    """A program that is gone by now is one line too."""
    reporter = hook("/no/such/program")
    reporter.report(CAUSE)
    reporter.close()
    assert len(caplog.records) == 1


def test_the_same_node_is_reported_once_in_a_while(hook, tmp_path):
    """A node that fails in a loop, and many nodes at once, do not run the command all the time."""
    reporter = hook("sh", "-c", f"echo x >> {tmp_path}/runs")
    for _ in range(5):
        reporter.report(CAUSE)
    reporter.close()
    assert (tmp_path / "runs").read_text() == "x\n"
    reporter._runs = [("a", 0.0)]
    assert reporter._may_run("b", 1.0)
    assert not reporter._may_run("a", 599.0)
    assert reporter._may_run("a", 600.0)
    reporter._runs += [(f"n{number}", 610.0) for number in range(20)]
    assert not reporter._may_run("c", 611.0)
    assert reporter._may_run("c", 4300.0)
    assert reporter._may_run("c", 9000.0)
    assert not reporter._runs


def test_evidence_that_is_too_large_is_left_out():
    """A report has a bounded size, and says that something is missing."""
    cause = Cause("unhealthy", "x", host="n", detail={"evidence": "y" * MAX_REPORT_BYTES})
    text = report_of(cause, job="j", reported_by="h", time=1.0)
    assert json.loads(text)["evidence"] == {"dropped": "too large"}


def test_without_a_command_nothing_is_run():
    """A launch that names no command starts no thread for a bad node."""
    reporter = BadNodeHook(None, os.environ, job="j1", host="head", clock=SystemClock())
    reporter.report(CAUSE)
    assert reporter._thread._thread is None
    reporter.close()


def test_nothing_is_taken_after_the_end(hook):
    """A report after `close` is dropped, and starts no thread."""
    reporter = hook("true")
    reporter.close()
    reporter.report(CAUSE)


def test_a_report_without_a_thread_is_dropped_as_the_log_says(hook, tmp_path, monkeypatch, caplog):
    """At the limit of threads the report is neither kept for later nor counted as a run."""
    reporter = hook("sh", "-c", f"echo x >> {tmp_path}/runs")

    def refuse(_thread):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        reporter.report(CAUSE)
    assert "bad node n7 is not reported: can't start new thread" in caplog.text
    reporter.report(CAUSE)
    reporter.close()
    assert (tmp_path / "runs").read_text() == "x\n"
