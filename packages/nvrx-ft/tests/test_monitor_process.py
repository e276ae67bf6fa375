# SPDX-License-Identifier: Apache-2.0
"""The monitor process against real ranks: hangs are found, named, and ended; others are spared."""

import json
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from monitored_ranks import Node, wait_gone, wait_until

from nvidia_resiliency_ext.fault_tolerance._monitor import messages
from nvidia_resiliency_ext.fault_tolerance._monitor.slot import read_slot
from nvidia_resiliency_ext.shared_utils import procfs
from nvidia_resiliency_ext.shared_utils.events import EventLog, read_events
from nvidia_resiliency_ext.shared_utils.wire import receive_message, send_message

pytestmark = pytest.mark.slow


@pytest.fixture
def node(tmp_path):
    """Return a function that starts a node with the given configuration."""
    nodes = []

    def start(count=1, **config):
        nodes.append(Node(tmp_path, count, **config))
        return nodes[-1]

    yield start
    for started in nodes:
        started.close()


def state_of(**sections):
    """Return a client's state with calculated section timeouts, as JSON without blanks."""
    section = {
        "section": sections,
        "out_of_section": None,
        "calculated_sections": sorted(sections),
        "is_out_of_section_calculated": False,
    }
    return json.dumps({"current_timeouts": {"section": section}}, separators=(",", ":"))


def test_a_rank_without_heartbeats_is_killed_and_named(node):
    """A rank whose heartbeats stop is killed, and the report says which rule it broke."""
    it = node(
        initial_rank_heartbeat_timeout=60.0,
        rank_heartbeat_timeout=0.3,
        workload_check_interval=60.0,
    )
    rank = it.rank()
    rank.do_last("init", "beat")
    report = it.hang()
    assert rank.wait_dead() == -signal.SIGKILL
    assert report["rule"] == "heartbeat"
    assert 0.3 <= report["elapsed"] < 20.0, "found at its deadline, not at the next check"
    fields = (report["limit"], report["cycle"], report["rank"], report["pid"], report["host"])
    assert fields == (0.3, 3, 0, rank.pid, "testhost")
    stacks = Path(report["stacks"]).read_text()
    assert "commanded_rank.py" in stacks, "the stacks of the rank's threads are in the evidence"
    assert Path(report["stacks"]).stat().st_mode & 0o777 == 0o600


def test_the_first_heartbeat_has_its_own_limit(node):
    """A rank that never sends a heartbeat breaks the rule of the first one."""
    it = node(initial_rank_heartbeat_timeout=0.3, rank_heartbeat_timeout=60.0)
    it.rank().order("init")
    assert it.hang()["rule"] == "initial_heartbeat"


def test_an_expired_outer_section_is_found_behind_a_healthy_inner_one(node):
    """Every open section is evaluated on its own, whatever is opened and closed inside it."""
    it = node(rank_section_timeouts={"outer": 0.5, "inner": 60.0})
    rank = it.rank()
    rank.do("init")
    with it.unjudged():
        rank.do_last("open outer", "cycle inner 0.01")
    report = it.hang()
    assert (report["rule"], report["section"]) == ("section", "outer")
    assert rank.wait_dead() == -signal.SIGKILL


def test_a_stopped_rank_is_killed_without_waiting_for_stacks(node):
    """A rank in SIGSTOP cannot answer, so it is ended at once and the report says its state."""
    it = node(rank_section_timeouts={"step": 0.5}, hang_evidence_timeout=60.0)
    rank = it.rank()
    rank.do("init")
    with it.unjudged():
        rank.do("open step")
        os.kill(rank.pid, signal.SIGSTOP)
    report = it.expect(messages.HangFound, limit_s=30.0).report
    assert rank.wait_dead(30.0) == -signal.SIGKILL
    assert report["state"] == "T"
    assert "no stacks" in Path(report["stacks"]).read_text()


def test_a_rank_that_is_outside_sections_too_long_is_found(node):
    """The time outside all sections is limited once `step` was opened."""
    it = node(rank_section_timeouts={"step": 60.0}, rank_out_of_section_timeout=0.4)
    rank = it.rank()
    rank.do_last("init", "open step", "close step")
    assert it.hang()["rule"] == "out_of_section"


@pytest.mark.slow
def test_a_survivor_of_the_gentle_signal_is_killed(node):
    """A rank that outlives its termination signal gets SIGKILL, and only one report is made."""
    it = node(rank_section_timeouts={"step": 0.2}, rank_termination_signal="SIGTERM")
    rank = it.rank()
    rank.do("handler", "init")
    with it.unjudged():
        rank.do("open step")
    it.hang()
    assert rank.answer() == "terminated"
    assert rank.wait_dead() == -signal.SIGKILL
    it.expect(messages.RankLeft)
    assert not [m for m in it.messages if isinstance(m, messages.HangFound)]


def test_a_rank_without_the_dump_handler_is_killed_without_waiting(node):
    """A rank that does not catch the dump signal is not waited for, and does not die of it."""
    it = node(rank_section_timeouts={"step": 0.3}, hang_evidence_timeout=60.0)
    rank = it.rank()
    rank.do_last("init", "dump_off", "open step")
    it.expect(messages.HangFound, limit_s=30.0)
    assert rank.wait_dead(30.0) == -signal.SIGKILL


def test_ranks_that_hang_together_are_one_hang(node):
    """Two ranks that break their limits by their own work are in one report, and both are ended."""
    it = node(2, rank_section_timeouts={"step": 0.3}, hang_evidence_timeout=20.0)
    first, second = it.rank(0), it.rank(1)
    for rank in (first, second):
        rank.do("init")
    with it.unjudged():
        for rank in (first, second):
            rank.do("open step")
    report = it.hang()
    assert (report["culprits"], report["ended"]) == ([0, 1], [0, 1])
    assert [rank.wait_dead() for rank in (first, second)] == [-signal.SIGKILL] * 2
    assert not [m for m in it.messages if isinstance(m, messages.HangFound)]


def test_the_stopped_rank_is_ended_and_not_the_one_whose_limit_passed(node):
    """A rank that is stopped outside all sections is blamed for the limit that another breaks."""
    it = node(2, rank_section_timeouts={"step": 0.5}, hang_evidence_timeout=60.0)
    waits, stopped = it.rank(0), it.rank(1)
    for rank in (waits, stopped):
        rank.do("init")
    with it.unjudged():
        os.kill(stopped.pid, signal.SIGSTOP)
        waits.do("open step")
    report = it.hang()
    assert (report["trigger"], report["culprits"], report["ended"]) == (0, [1], [1])
    assert (report["rank"], report["pid"], report["state"]) == (1, stopped.pid, "T")
    assert (report["rule"], report["section"]) == ("section", "step")
    assert stopped.wait_dead() == -signal.SIGKILL
    waits.do("close step")
    names = {"stacks-testhost-c3-r0.txt", "stacks-testhost-c3-r1.txt"}
    wait_until(lambda: {path.name for path in it.record_dir.glob("stacks-*")} == names)


def test_a_rank_that_failed_and_does_not_exit_is_blamed(node, tmp_path):
    """An error file is found though its rank still lives and broke no limit."""
    it = node(2, rank_section_timeouts={"step": 0.5})
    waits, failed = it.rank(0), it.rank(1)
    for rank in (waits, failed):
        rank.do("init")
    files = [str(tmp_path / "0.json"), str(tmp_path / "1.json")]
    message = {"message": "ValueError: boom\nmore", "extraInfo": {"timestamp": "17"}}
    Path(files[1]).write_text(json.dumps({"message": message}))
    it.monitor.send(messages.WorkersChanged(3, [waits.pid, failed.pid], files, [], 2))
    waits.order("open step")
    report = it.hang()
    assert (report["culprits"], report["error_file"]) == ([1], files[1])
    assert report["finding"].startswith(
        "rank 1 on host testhost had failed and has not exited: ValueError: boom"
    )


def test_a_rank_without_a_session_is_looked_at_through_the_kernel(node):
    """A worker that never opened a session can be the culprit; the rank that waits is ended."""
    it = node(2, rank_section_timeouts={"step": 0.5})
    waits, silent = it.rank(0), it.rank(1)
    waits.do("init")
    silent.do("handler")
    os.kill(silent.pid, signal.SIGSTOP)
    it.monitor.send(messages.WorkersChanged(3, [waits.pid, silent.pid], [], [], 2))
    waits.order("open step")
    report = it.hang()
    assert (report["culprits"], report["pid"], report["ended"]) == ([1], silent.pid, [0])
    assert waits.wait_dead() == -signal.SIGKILL


def part_of_a_job(node, **config):
    """Return a node with one rank of two, which waits in a section, and the rank."""
    it = node(rank_section_timeouts={"step": 0.3}, **config)
    rank = it.rank()
    rank.do("init")
    it.monitor.send(messages.WorkersChanged(3, [rank.pid], [], [], 2, 0))
    return it, rank


def test_with_ranks_on_other_nodes_nobody_is_ended_before_they_are_heard(node):
    """The report is held; the launcher's answer then ends the ranks that it names, or none."""
    it, rank = part_of_a_job(node)
    rank.order("open step")
    report = it.hang()
    assert (report["is_held"], [r["rank"] for r in report["ranks"]]) == (True, [0])
    it.monitor.send(messages.EndRanks([]))
    rank.do("close step", "beat")
    second, other = part_of_a_job(node)
    other.order("open step")
    assert second.hang()["is_held"]
    second.monitor.send(messages.EndRanks([0]))
    assert other.wait_dead() == -signal.SIGKILL


@pytest.mark.slow
def test_a_node_that_hears_nothing_acts_by_itself(node):
    """Without an answer the rank that broke its limit is ended after a while, and reported."""
    it, rank = part_of_a_job(node)
    rank.order("open step")
    assert it.hang()["is_held"]
    assert rank.wait_dead() == -signal.SIGKILL
    assert not it.hang()["is_held"]


def test_ranks_are_looked_at_for_a_hang_on_another_node(node):
    """Asked by the launcher, the monitor tells what each rank does, and leaves all alone."""
    it, rank = part_of_a_job(node)
    os.kill(rank.pid, signal.SIGSTOP)
    wait_until(lambda: procfs.read_stat(rank.pid).state == "T")
    it.monitor.send(messages.Examine())
    [seen] = it.expect(messages.RankStates).ranks
    assert (seen["rank"], seen["activity"]) == (0, "stopped")
    os.kill(rank.pid, signal.SIGCONT)
    rank.do("beat")


def test_the_launcher_is_told_of_join_first_step_and_end(node):
    """A session's milestones reach the launcher, and its slot shows the rest."""
    it = node(rank_section_timeouts={"step": 60.0, "checkpointing": 60.0})
    rank = it.rank()
    rank.do("init")
    assert it.expect(messages.RankJoined) == messages.RankJoined(0, 0, rank.pid)
    rank.do("iteration 7", "open checkpointing", "close checkpointing", "open step", "close step")
    before = time.monotonic()
    assert abs(it.expect(messages.FirstStep).t - before) < 30.0
    view = read_slot(it.monitor.slots[0], it.monitor.layout)
    assert (view.iteration, view.step_count, view.open_sections) == (7, 1, {})
    rank.do("shutdown")
    assert it.expect(messages.RankLeft) == messages.RankLeft(0, 7)
    rank.do("init")
    it.expect(messages.RankJoined)


def test_a_second_live_process_is_refused_and_changes_nothing(node):
    """A second connection of a rank gets a reason; the first session goes on being evaluated."""
    it = node(rank_section_timeouts={"step": 60.0})
    rank, second = it.rank(), it.rank()
    rank.do("init", "open step")
    second.order("init")
    assert "another live process" in second.answer()
    rank.order(f"load {state_of(step=0.4)}")
    assert it.hang()["pid"] == rank.pid
    rank.wait_dead()
    second.do("init")


@pytest.mark.parametrize(
    "garbage",
    [
        b"",
        b"\x00\x00\x00\x05hello",
        b"\xff\xff\xff\xff",
        bytes(range(256)),
        b"\x00\x00\x00\x28" + pickle.dumps({"a": [1, 2, 3], "b": "x" * 10})[:40],
    ],
    ids=["nothing", "no-json", "oversize", "noise", "pickle"],
)
def test_garbage_closes_only_its_own_connection(node, garbage):
    """Bytes that are no message end that connection; the live session is still evaluated."""
    it = node(rank_section_timeouts={"step": 0.6})
    rank = it.rank()
    rank.do_last("init", "open step")
    with it.connect() as sock, it.connect() as silent:
        sock.sendall(garbage)
        if len(garbage) > 4:
            assert sock.recv(100) == b""
        assert it.hang()["pid"] == rank.pid
        silent.close()


def test_a_pickle_runs_no_code(node, tmp_path):
    """A pickle that would run a command when loaded is refused as bytes."""
    mark = tmp_path / "mark"

    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(mark),)

    payload = pickle.dumps(Evil())
    it = node()
    with it.connect() as sock:
        sock.sendall(len(payload).to_bytes(4, "big") + payload)
        assert sock.recv(100) == b""
    assert not mark.exists()
    it.rank().do("init")


def test_silent_connections_are_closed_and_few(node):
    """Only a few connections may wait to say hello; the oldest makes room."""
    it = node()
    socks = [it.connect() for _ in range(12)]
    try:
        socks[0].settimeout(3.0)
        assert socks[0].recv(1) == b""
        it.rank().do("init")
    finally:
        for sock in socks:
            sock.close()


@pytest.mark.slow
def test_a_connection_without_hello_is_closed_after_a_while(node):
    """Who connects and says nothing is sent away."""
    it = node()
    with it.connect() as sock:
        assert sock.recv(1) == b""


def test_the_slot_cannot_be_truncated(node):
    """The memory that a rank gets refuses to shrink, so no rank can crash the monitor."""
    it = node()
    with it.connect() as sock:
        hello = messages.Hello(rank=0, pid=os.getpid())
        send_message(sock, messages.RANK_MESSAGES, hello, 5.0)
        _, fds, _, _ = socket.recv_fds(sock, 65536, 2)
        try:
            with pytest.raises(PermissionError):
                os.ftruncate(fds[0], 0)
        finally:
            for fd in fds:
                os.close(fd)


def test_a_forked_child_cannot_use_the_client(node):
    """In a forked child every call is refused, and the parent's session is untouched."""
    it = node(rank_section_timeouts={"step": 60.0})
    rank = it.rank()
    rank.do("init")
    for name in ("send_heartbeat", "end_all_sections", "shutdown_workload_monitoring"):
        assert "inherited through fork" in rank.do(f"fork_call {name}")
    rank.do("open step", "close step")
    it.expect(messages.FirstStep)


def test_limits_of_a_checkpoint_count_at_once(node):
    """Timeouts loaded into a live session replace the configured ones in the monitor."""
    it = node(rank_section_timeouts={"step": 60.0})
    rank = it.rank()
    rank.do("init", "open step")
    rank.order(f"load {state_of(step=0.4, unknown=1.0)}")
    report = it.hang()
    assert (report["section"], report["limit"]) == ("step", 0.4)


def test_training_goes_on_without_a_monitor_and_a_new_one_takes_over(node):
    """A killed monitor costs the rank nothing; its successor has slot and limits, and evaluates."""
    it = node(rank_section_timeouts={"outer": 60.0, "inner": 60.0})
    rank = it.rank()
    rank.do("init", f"load {state_of(outer=10.0)}", "open outer")
    it.expect(messages.RankJoined)
    slot = os.fstat(it.monitor._memories[0].fd).st_ino
    os.kill(it.monitor.child.pid, signal.SIGKILL)
    it.monitor.child.wait(60.0)
    rank.do("beat", "open inner", "close inner")
    it.monitor.close()
    it.messages.clear()
    it.start_monitor()
    it.expect(messages.RankJoined)
    view = read_slot(it.monitor.slots[0], it.monitor.layout)
    assert set(view.open_sections) == {"outer"}, "the new monitor shows the rank's own slot"
    assert os.fstat(it.monitor._memories[0].fd).st_ino == slot, "and it is the same memory"
    it.expect(messages.FirstStep)
    rank.do("open inner")
    view = read_slot(it.monitor.slots[0], it.monitor.layout)
    assert set(view.open_sections) == {"outer", "inner"}
    report = it.hang()
    assert (report["section"], report["limit"]) == ("outer", 10.0)


def test_a_lost_monitor_is_an_error_when_configured(node):
    """With monitor_loss=fatal the rank's next call raises after the monitor died."""
    it = node(monitor_loss="fatal", rank_section_timeouts={"step": 9.0})
    rank = it.rank()
    rank.do("init")
    os.kill(it.monitor.child.pid, signal.SIGKILL)
    it.monitor.child.wait(60.0)

    def is_refused():
        rank.order("beat")
        return "monitor is gone" in rank.answer()

    wait_until(is_refused)


def test_a_stopped_monitor_costs_the_rank_nothing(node):
    """While the monitor is stopped, calls return at once; afterwards it catches up."""
    it = node(rank_section_timeouts={"step": 60.0})
    rank = it.rank()
    rank.do("init")
    os.kill(it.monitor.child.pid, signal.SIGSTOP)
    before = time.monotonic()
    for _ in range(50):
        rank.do("beat", "open step", "close step")
    assert time.monotonic() - before < 10.0
    os.kill(it.monitor.child.pid, signal.SIGCONT)
    it.expect(messages.FirstStep)


def test_a_stuck_launcher_does_not_hold_up_the_monitor(node):
    """With nobody reading its messages the monitor still finds and kills."""
    it = node(rank_section_timeouts={"step": 0.3})
    for _ in range(3):
        rank = it.rank()
        rank.do_last("init", "open step")
        assert rank.wait_dead() == -signal.SIGKILL
    assert it.hang()["rule"] == "section"


def test_the_death_of_the_launcher_ends_every_process_of_the_run(node, tmp_path):
    """When the socket closes, ranks, their groups and strays with the run's id are killed."""
    it = node()
    rank = it.rank()
    stray = int(rank.do("child"))
    rank.do("init")
    it.monitor.send(messages.WorkersChanged(3, [rank.pid]))
    os.kill(rank.pid, signal.SIGSTOP)
    run_path = Path(it.run_dir.path)
    it.monitor._channel.sock.close()
    assert it.monitor.child.wait(60.0).code == 0
    assert rank.wait_dead() == -signal.SIGKILL
    wait_gone(stray)
    assert not run_path.exists()


def test_the_sweep_spares_who_has_the_number_of_a_worker_that_left(node):
    """By the end of the job the number may be another program's, which lives on."""
    it = node()
    with subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True
    ) as unrelated:
        it.monitor.send(messages.WorkersChanged(3, [unrelated.pid], left=[0]))
        assert it.monitor.leave(60.0)
        assert unrelated.poll() is None
        unrelated.kill()


def test_the_sweep_ends_what_a_worker_that_left_has_left_in_its_group(node):
    """A process without the run's id is known by the session that the worker made."""
    it = node()
    command = ["sh", "-c", "sleep 1000 >/dev/null & echo $!"]
    worker = subprocess.run(command, stdout=subprocess.PIPE, start_new_session=True, check=True)
    left = int(worker.stdout)
    stat = procfs.read_stat(left)
    assert stat is not None
    it.monitor.send(messages.WorkersChanged(3, [stat.sid], left=[0]))
    assert it.monitor.leave(60.0)
    wait_gone(left)


def test_orphans_are_kept_on_request(node):
    """With orphan_workers=keep the monitor leaves without touching the ranks."""
    it = node(orphan_workers="keep")
    rank = it.rank()
    rank.do("init")
    it.monitor._channel.sock.close()
    assert it.monitor.child.wait(60.0).code == 0
    rank.do("beat")


def test_signals_for_the_job_do_not_end_the_monitor(node):
    """What a scheduler or a terminal sends to everybody leaves the monitor at its post."""
    it = node(rank_section_timeouts={"step": 0.5})
    for sig in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        os.kill(it.monitor.child.pid, sig)
    it.rank().do_last("init", "open step")
    assert it.hang()["section"] == "step"
    assert os.getsid(it.monitor.child.pid) == it.monitor.child.pid


def test_the_monitors_log_comes_out_of_the_launchers_logger(node, caplog):
    """Lines of the monitor appear in the launcher's log with their level."""
    caplog.set_level(logging.DEBUG, logger="nvrx")
    it = node(rank_section_timeouts={"step": 0.2})
    it.rank().do_last("init", "open step")
    it.hang()
    it.expect(messages.RankLeft)
    wait_until(lambda: it.monitor.receive() is not None and "was in section" in caplog.text)


def test_reports_name_the_cycle_that_the_launcher_told(node):
    """After a change of cycle, reports belong to the new one."""
    it = node(rank_section_timeouts={"step": 0.5})
    it.monitor.send(messages.CycleChanged(9))
    it.rank().do_last("init", "open step")
    assert it.hang()["cycle"] == 9


def test_a_session_over_the_socket_alone(node):
    """A hello is answered with the configuration, and a second hello ends the connection."""
    it = node(rank_section_timeouts={"b": 1.0, "a": 2.0})
    with it.connect() as sock:
        hello = messages.Hello(rank=0, pid=os.getpid())
        send_message(sock, messages.RANK_MESSAGES, hello, 5.0)
        answer = receive_message(sock, messages.RANK_MESSAGES, 5.0)
        assert answer.sections == ["a", "b"]
        assert answer.config["rank_section_timeouts"] == {"b": 1.0, "a": 2.0}
        send_message(sock, messages.RANK_MESSAGES, hello, 5.0)
        assert sock.recv(1) == b""


def test_it_works_without_pidfds(node, monkeypatch):
    """On a kernel without pidfds the death of a rank and a hang are noticed all the same."""
    monkeypatch.setenv("NVRX_FORCE_NO_PIDFD", "1")
    it = node(rank_section_timeouts={"step": 0.3})
    first = it.rank()
    first.do("init")
    first.close()
    it.expect(messages.RankLeft)
    it.rank().do_last("init", "open step")
    assert it.hang()["section"] == "step"
    it.expect(messages.RankLeft)


def test_a_hang_is_in_the_record(node, tmp_path):
    """The monitor writes a `fault` event with rule, limit and lateness into the node's file."""
    log = EventLog.create(tmp_path, src="launcher", job_id="1", launch_id="x", host="testhost")
    log.close()
    it = node(env=log.environment(), rank_section_timeouts={"step": 0.3})
    it.rank().do_last("init", "open step")
    it.hang()

    def faults():
        return [e for e in read_events(log.path).events if e.kind == "fault"]

    wait_until(faults)
    [fault] = faults()
    assert (fault.src, fault.cycle, fault.rank) == ("monitor", 3, 0)
    found = {name: fault.fields[name] for name in ("cause", "detected_by", "deadline_s")}
    assert found == {"cause": "hang_section", "detected_by": "monitor", "deadline_s": 0.3}
    assert 0.0 <= fault.fields["late_s"] < 20.0


def test_a_programs_own_use_of_the_dump_signal_is_kept(node):
    """A rank that handles the dump signal itself keeps its handler and is killed without stacks."""
    it = node(rank_section_timeouts={"step": 0.3}, hang_evidence_timeout=60.0)
    rank = it.rank()
    rank.do_last("dump_own", "init", "open step")
    report = it.expect(messages.HangFound, limit_s=30.0).report
    assert "no stacks" in Path(report["stacks"]).read_text()
