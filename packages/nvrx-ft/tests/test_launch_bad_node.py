# SPDX-License-Identifier: Apache-2.0
"""The command that is told of bad nodes: what it gets, how often, and that nobody waits for it."""

import json
import os
import shlex
import sys
import time

import pytest

from nvidia_resiliency_ext.fault_tolerance._launch.bad_node import (
    MAX_REPORT_BYTES,
    BadNodeHook,
    RunRecord,
    is_allowed,
    of_cause,
)
from nvidia_resiliency_ext.fault_tolerance._launch.cause import Cause
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
    told = hook(*python("import sys; open(sys.argv[1], 'w').write(sys.stdin.read())"), str(out))
    told.report(CAUSE)
    told.close()
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


def test_a_report_never_waits_for_the_command(hook, caplog):
    """A command that hangs is killed at its deadline; who reports goes on at once."""
    told = hook(*python("import time; time.sleep(60)"), deadline_s=1.0)
    before = time.monotonic()
    told.report(CAUSE)
    assert time.monotonic() - before < 0.9
    told.close()
    (line,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert "not done within 1 s: killed" in line


def test_what_a_command_leaves_behind_is_killed(hook, tmp_path):
    """The command has a process group of its own, and nothing of it outlives the report."""
    told = hook("sh", "-c", f"sleep 60 & echo $! > {tmp_path}/pid")
    told.report(CAUSE)
    told.close()
    pid = int((tmp_path / "pid").read_text())
    with pytest.raises(ProcessLookupError):
        _signal_until_gone(pid)


def _signal_until_gone(pid):
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        os.kill(pid, 0)
        with open(f"/proc/{pid}/stat") as stat:
            if stat.read().rpartition(")")[2].split()[0] == "Z":
                raise ProcessLookupError  # Its new parent has not reaped it yet.
        time.sleep(0.01)


def test_a_command_that_fails_is_one_line(hook, caplog):
    """A failure names the node, the exit code and the command's last words, in one line."""
    told = hook(*python("import sys; print('no\\nroute', file=sys.stderr); sys.exit(3)"))
    told.report(CAUSE)
    told.close()
    (line,) = [r.getMessage() for r in caplog.records]
    assert line == "--ft-bad-node-hook for n7: exit code 3: no route"


def test_a_command_that_cannot_start_is_one_line(hook, caplog):
    """A program that is gone by now is one line too."""
    told = hook("/no/such/program")
    told.report(CAUSE)
    told.close()
    assert len(caplog.records) == 1


def test_the_same_node_is_reported_once_in_a_while(hook, tmp_path):
    """A node that fails in a loop, and many nodes at once, do not run the command all the time."""
    told = hook("sh", "-c", f"echo x >> {tmp_path}/runs")
    for _ in range(5):
        told.report(CAUSE)
    told.close()
    assert (tmp_path / "runs").read_text() == "x\n"
    record = RunRecord().with_run("a", 0.0)
    assert not is_allowed(record, "a", 599.0)
    assert is_allowed(record, "a", 600.0)
    assert is_allowed(record, "b", 1.0)
    for number in range(20):
        record = record.with_run(f"n{number}", 10.0)
    assert not is_allowed(record, "c", 11.0)
    assert is_allowed(record, "c", 3700.0)
    assert len(record.with_run("c", 9000.0).runs) == 1


def test_evidence_that_is_too_large_is_left_out():
    """A report has a bounded size, and says that something is missing."""
    cause = Cause("unhealthy", "x", host="n", detail={"evidence": "y" * MAX_REPORT_BYTES})
    text = of_cause(cause, job="j", reported_by="h", time=1.0).to_json()
    assert json.loads(text)["evidence"] == {"dropped": "too large"}


def test_nothing_is_taken_after_the_end(hook):
    """A report after `close` is dropped, and starts no thread."""
    told = hook("true")
    told.close()
    told.report(CAUSE)
