# SPDX-License-Identifier: Apache-2.0
"""What somebody meets who starts a job for the first time, and does it slightly wrong."""

import logging
import os
import socket
import subprocess
import sys
import threading
from unittest.mock import Mock

import ports
import pytest

from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient
from nvidia_resiliency_ext.fault_tolerance._agent import many_nodes
from nvidia_resiliency_ext.fault_tolerance._agent.monitor_link import (
    SharedMonitor,
    longest_limit_s,
    needs_heartbeats,
)
from nvidia_resiliency_ext.fault_tolerance._core.errors import FaultToleranceConfigError
from nvidia_resiliency_ext.fault_tolerance._core.machine import Assignment, Cause, Outcome
from nvidia_resiliency_ext.fault_tolerance._monitor import messages
from nvidia_resiliency_ext.fault_tolerance._plan.plan import plan_from_args
from nvidia_resiliency_ext.fault_tolerance._report.events import EventReporter
from nvidia_resiliency_ext.fault_tolerance._report.failures import FailureLog
from nvidia_resiliency_ext.fault_tolerance._workers.command import missing_module
from nvidia_resiliency_ext.fault_tolerance.cli_args import parse_args
from nvidia_resiliency_ext.fault_tolerance.config import FaultToleranceConfig
from nvidia_resiliency_ext.shared_utils.children import ExitStatus
from nvidia_resiliency_ext.shared_utils.clock import SystemClock
from nvidia_resiliency_ext.shared_utils.event_loop import EventLoop
from nvidia_resiliency_ext.shared_utils.events import NULL_EVENTS
from nvidia_resiliency_ext.shared_utils.store_client import StoreLostError


def plan(*words, environ=None):
    """Return the plan of a command line."""
    return plan_from_args(parse_args(list(words)), environ or {})


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Work in a folder with a script, as a user does."""
    (tmp_path / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_flags_behind_the_script_are_told_of(folder):
    """They are the script's; where they look like the launcher's, one warning says so."""
    (text,) = parse_args(["train.py", "--nproc_per_node=2", "--ft-lease", "1"]).warnings
    assert "--nproc_per_node, --ft-lease" in text
    assert "before the script" in text
    assert parse_args(["train.py", "--role", "x", "--epochs", "3", "--log-dir", "y"]).warnings == []
    assert parse_args(["--nproc-per-node", "2", "train.py", "nnodes"]).warnings == []


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("no_such_module_here", "no 'no_such_module_here' here"),
        ("no_such_module_here.train", "no 'no_such_module_here' here"),
        ("tool", "'tool' is a package without __main__"),
        ("train.py", "leave -m out to run a file, or write -m train"),
        ("my-train", "a file without -m"),
        ("../train", "a file without -m"),
    ],
)
def test_a_module_that_cannot_run_is_refused_at_the_start(folder, name, problem):
    """One line, before any process is started; a package needs __main__."""
    (folder / "tool").mkdir()
    (folder / "tool" / "__init__.py").write_text("raise SystemExit('imported')")
    with pytest.raises(FaultToleranceConfigError, match=problem):
        plan("-m", name)


def test_a_module_that_is_there_is_taken(folder):
    """A file here, a package with __main__, one of the environment, one inside a package."""
    (folder / "tool").mkdir()
    (folder / "tool" / "__init__.py").write_text("raise SystemExit('imported')")
    (folder / "tool" / "__main__.py").write_text("")
    for name in ("train", "tool", "tool.inner", "json.tool", "nvidia_resiliency_ext.anything"):
        assert missing_module(name) == "", name
    assert "tool" not in sys.modules
    assert plan("-m", "elsewhere", environ={"PYTHON_EXEC": sys.executable}).command.is_module


@pytest.mark.parametrize(
    ("flags", "is_said"),
    [
        (["--nnodes=2"], True),
        (["--nnodes=2", "--rdzv-endpoint=127.0.0.1:29400"], True),
        (["--nnodes=2", "--rdzv-endpoint=localhost:29400"], True),
        (["--nnodes=2", "--rdzv-endpoint=[::1]:29400"], True),
        (["--nnodes=2", "--rdzv-endpoint=node0:29400"], False),
        (["--nnodes=1"], False),
    ],
)
def test_many_nodes_need_an_endpoint_that_they_reach(folder, flags, is_said):
    """Who names none is told at once, and does not wait for nodes that cannot come."""
    notes = [note for note in plan(*flags, "train.py").warnings if "--rdzv-endpoint" in note]
    assert bool(notes) is is_said


def test_torch_gets_no_longer_than_the_job_may_wait_for_its_store(monkeypatch):
    """A program at the endpoint that never answers is told of when the user's wait is over."""
    given = []
    clock, stop = SystemClock(), threading.Event()

    def connect(*words):
        given.append(words[-1])
        stop.set()
        raise StoreLostError("it does not answer")

    monkeypatch.setattr(many_nodes.stores, "connect", connect)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        host, port = mute.getsockname()
        endpoint = many_nodes.StoreEndpoint(host, port, None)
        for wait_s in (5.0, 120.0):
            stop.clear()
            settings = Mock(connect_timeout_s=wait_s, lease_s=5.0)
            way = many_nodes.StoreConnector(endpoint, "j/", None, settings, Mock(), clock, stop)
            with pytest.raises(StoreLostError, match=f"{port}, tried for {wait_s:g} s: it does"):
                way(lambda: None)
    short_s, long_s = given
    assert 0 < short_s <= 5.0 < long_s == many_nodes.stores.CALL_TIMEOUT_S


def test_a_mistyped_key_of_the_rendezvous_is_told_of(folder):
    """Other keys have no effect, as under torchrun: only one that looks like ours is a mistake."""
    given = "--rdzv-conf=join_timout=5,close_timeout=5,backlog=1,last_call_timeout=2"
    notes = [note for note in plan("--nnodes=2", given, "train.py").warnings if "-conf" in note]
    assert notes == ["--rdzv-conf: 'join_timout' has no effect; did you mean join_timeout?"]


def test_a_script_without_its_ending_is_named(folder):
    """Who leaves `.py` out is told the name of the file that is there."""
    with pytest.raises(FaultToleranceConfigError, match="'train' does not exist; did you mean tra"):
        plan("train")


def test_workers_that_the_launcher_ends_while_they_import_are_no_failed_standbys(folder):
    """Rank by rank dies in its first line; those that still import are ended, and nobody is told
    that standby workers do not work here."""
    (folder / "slow_import.py").write_text(
        "import os, time\ntry:\n    os.mkdir('first')\n"
        "except FileExistsError:\n    time.sleep(600)\n"
    )
    (folder / "train.py").write_text("raise SystemExit(3)")
    command = [sys.executable, "-m", "nvidia_resiliency_ext.fault_tolerance.launcher"]
    command += ["--nproc-per-node=3", "--ft-prewarm=on", "--ft-prewarm-import=slow_import"]
    done = subprocess.run(
        [*command, "train.py"],
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 1, said
    assert "from standbys still importing" in said
    assert "standby workers failed" not in said


def test_python_before_the_script_is_left_out(folder):
    """Who writes `ft_launcher python train.py` is told that the launcher starts Python."""
    with pytest.raises(FaultToleranceConfigError, match="leave 'python' out"):
        plan("python", "train.py")


@pytest.mark.parametrize(
    "name",
    ["torch.py", "torch/__init__.py", "numpy.py", "nvidia_resiliency_ext.py", "logging.py"],
)
def test_a_file_that_hides_a_package_is_told_of(folder, caplog, name):
    """A script's folder comes first where Python looks: the warning names the file."""
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("")
    package = name.split("/")[0].removesuffix(".py")
    (text,) = [note for note in plan("train.py").warnings if "rename it" in note]
    assert str(path) in text
    assert f" {package} from the program" in text


def test_a_name_that_python_has_loaded_by_then_hides_nothing(folder):
    """Python loads some modules before it looks into the script's folder: no word about those."""
    (folder / "abc.py").write_text("raise SystemExit('loaded')")
    (folder / "queue.py").write_text("")
    (text,) = [note for note in plan("train.py").warnings if "rename it" in note]
    assert "queue.py" in text


class Handle:
    """Stands for a monitor's process that says what it is told to say."""

    def __init__(self, descriptor):
        self._descriptor = descriptor
        self.said = []
        self.is_over = False
        self.slots = []

    def fileno(self):
        return self._descriptor

    def receive(self):
        said, self.said = self.said, []
        return said

    def send(self, message):
        """Take what the launcher says."""

    def leave(self, limit_s):
        """End."""


@pytest.fixture
def monitor():
    """Give a maker of a monitor's link, with what it hears."""
    loop = EventLoop(SystemClock())
    ends = os.pipe()

    def make(after_s, **options):
        handle = Handle(ends[0])
        link = SharedMonitor(
            Mock(loop=loop, clock=SystemClock()),
            lambda _cycle, _word: handle,
            unwatched_after_s=after_s,
            **options,
        )
        return link, handle, loop

    yield make
    loop.close()
    for end in ends:
        os.close(end)


WORKERS = messages.WorkersChanged(0, [1], [""], [], world_size=1, rank_offset=0)
"""What is said when workers have started."""


@pytest.fixture
def warned(caplog):
    """Give how often it was said that nobody is watched."""
    caplog.set_level(logging.WARNING, "nvrx")
    return lambda: caplog.text.count("no rank has opened a client")


@pytest.mark.parametrize("waits", [True, False])
def test_a_job_that_nobody_watches_is_told_so_once(monitor, warned, waits):
    """After the longest limit, or when a short job ends; with what to call."""
    link, _, loop = monitor(0.01 if waits else 60.0)
    link.workers_changed(WORKERS)
    while waits and not warned():
        loop.run_once()
    link.workers_changed(WORKERS)
    link.close()
    assert warned() == 1


@pytest.mark.parametrize("after_s", [60.0, None])
def test_a_client_or_no_limit_is_no_reason_for_a_word(monitor, warned, after_s):
    """One rank that opened a client shows that the program knows how."""
    link, handle, _ = monitor(after_s)
    link.workers_changed(WORKERS)
    handle.said.append(messages.RankJoined(0, 0, 1))
    link.close()
    assert warned() == 0


@pytest.mark.parametrize("sends", [True, False])
def test_a_client_that_never_sends_a_heartbeat_is_told_of(monitor, warned, caplog, sends):
    """Where only the time between heartbeats is limited, nothing counts before the first one."""
    link, handle, _ = monitor(60.0, needs_heartbeats=True)
    link.workers_changed(WORKERS)
    handle.said += [messages.RankJoined(0, 0, 1)] + [messages.FirstStep(0, 0.0)] * sends
    link.close()
    assert warned() == 0
    assert ("no rank has sent one" in caplog.text) is not sends


def test_only_heartbeats_need_heartbeats():
    """A limit for the first one, or one for sections, counts without any."""
    between = {"rank_heartbeat_timeout": 5}
    assert needs_heartbeats(FaultToleranceConfig(**between))
    assert not needs_heartbeats(FaultToleranceConfig())
    for other in ({"initial_rank_heartbeat_timeout": 9}, {"rank_section_timeouts": {"step": 9}}):
        assert not needs_heartbeats(FaultToleranceConfig(**between, **other))


def test_the_longest_limit_is_what_a_rank_may_stay_silent():
    """A minute at least: programs import and set up before they open a client."""
    assert longest_limit_s(FaultToleranceConfig()) is None
    assert longest_limit_s(FaultToleranceConfig(rank_heartbeat_timeout=5)) == 60
    sections = {"setup": 600, "step": 30, "other": None}
    assert longest_limit_s(FaultToleranceConfig(rank_section_timeouts=sections)) == 600


def test_who_waits_for_others_says_where_and_how_long():
    """A launcher that is alone names the endpoint, the time and how many must come."""
    command = [sys.executable, "-m", "nvidia_resiliency_ext.fault_tolerance.launcher"]
    command += ["--nnodes", "2", "--rdzv-endpoint", "127.0.0.1:0", "--rdzv-conf", "join_timeout=1"]
    with ports.claimed() as port:
        command[-3] = f"127.0.0.1:{port}"
        done = subprocess.run(
            [*command, "-m", "this"], capture_output=True, text=True, timeout=120, check=False
        )
    assert done.returncode == 1
    said = done.stdout + done.stderr
    assert f"this launcher serves the store at {command[-3]}" in said
    assert "waiting 1 s at most for 2 nodes" in said


def test_wrong_types_are_type_errors():
    """What is no request is refused with the right call, before anything is sent."""
    with pytest.raises(TypeError, match="send WorkloadControlRequest"):
        RankMonitorClient().send_workload_control_request("stop")


@pytest.mark.parametrize(
    ("cycle", "outcome", "left", "text"),
    [
        (0, Outcome.FAIL, 0, "no restart left (--max-restarts N would allow N): it fell"),
        (2, Outcome.FAIL, 0, "no restart left: it fell"),
        (0, Outcome.RESTART, 3, "restarting because it fell (2 restarts left after this one)"),
        (2, Outcome.RESTART, 1, "restarting because it fell (0 restarts left after this one)"),
    ],
)
def test_what_is_left_of_the_restarts_is_said(tmp_path, caplog, cycle, outcome, left, text):
    """The restart that begins is not counted as left; a job without any is told of the flag."""
    reporter = EventReporter(
        NULL_EVENTS, FailureLog(str(tmp_path)), SystemClock(), host="h", shows_stacks=False
    )
    reporter.round_joined(Assignment(cycle, 0, 1, 0, 2, "127.0.0.1", 29500))
    with caplog.at_level(logging.WARNING, "nvrx"):
        reporter.fault(Cause("exit", "it fell"), outcome, left, failures=(), last_iteration=None)
    assert text in caplog.text


def test_a_rank_that_ended_early_is_named_when_others_fail(tmp_path, caplog):
    """Others fail because it is gone, and it failed nowhere; in the next cycle it is forgotten."""
    reporter = EventReporter(
        NULL_EVENTS, FailureLog(str(tmp_path)), SystemClock(), host="h", shows_stacks=False
    )
    reporter.round_joined(Assignment(0, 0, 1, 0, 3, "127.0.0.1", 29500))
    reporter.worker_exited(2, ExitStatus(code=0))
    reporter.worker_exited(0, ExitStatus(code=1))
    cause = Cause("exited", "rank 0 fell", rank=0)
    reporter.fault(cause, Outcome.RESTART, 3, failures=(), last_iteration=None)
    assert "rank 2 ended with exit code 0 before that" in caplog.text
    caplog.clear()
    reporter.workers_started({})
    reporter.fault(cause, Outcome.RESTART, 2, failures=(), last_iteration=None)
    assert "before that" not in caplog.text
