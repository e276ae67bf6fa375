# SPDX-License-Identifier: Apache-2.0
"""The launcher's effects one by one: loop, ports, signals, faults, output."""

import errno
import io
import json
import os
import resource
import signal
import socket
import sys
from unittest.mock import Mock

import ports
import pytest

from nvidia_resiliency_ext.fault_tolerance._agent import job
from nvidia_resiliency_ext.fault_tolerance._agent.rendezvous import LocalRendezvous
from nvidia_resiliency_ext.fault_tolerance._core.exceptions import ErrorFile, read_error_file
from nvidia_resiliency_ext.fault_tolerance._core.machine import RoundClosed
from nvidia_resiliency_ext.fault_tolerance._report import failures as faults
from nvidia_resiliency_ext.fault_tolerance._report import failures as records
from nvidia_resiliency_ext.fault_tolerance._report.events import EventReporter
from nvidia_resiliency_ext.fault_tolerance._workers import output, workers
from nvidia_resiliency_ext.fault_tolerance._workers.command import PortInUseError, PortReservation
from nvidia_resiliency_ext.shared_utils import events
from nvidia_resiliency_ext.shared_utils.children import ExitStatus
from nvidia_resiliency_ext.shared_utils.clock import SystemClock
from nvidia_resiliency_ext.shared_utils.event_loop import EventLoop, SignalQueue


@pytest.fixture
def loop():
    loop = EventLoop(SystemClock())
    yield loop
    loop.close()


def test_timers_fire_in_order_and_not_when_cancelled(loop):
    """Due timers fire by time; a cancelled one never does."""
    now, seen = SystemClock().monotonic(), []
    loop.call_at(now, lambda: seen.append("b"))
    loop.call_at(now - 1, lambda: seen.append("a"))
    loop.call_at(now - 2, lambda: seen.append("never")).cancel()
    loop.run_once(until=now)
    assert seen == ["a", "b"]


def test_unwatched_in_the_same_round_is_not_called(loop):
    """A descriptor that a callback takes out is not called although it was ready."""
    pairs = [socket.socketpair() for _ in range(2)]
    seen = []

    def take_out(mine, other):
        seen.append(mine)
        loop.unwatch(pairs[other][0].fileno())

    for mine, other in ((0, 1), (1, 0)):
        pairs[mine][1].send(b"x")
        loop.watch(pairs[mine][0].fileno(), lambda m=mine, o=other: take_out(m, o))
    loop.run_once(until=SystemClock().monotonic())
    assert len(seen) == 1
    for pair in pairs:
        for end in pair:
            end.close()


def test_reserved_port_can_be_listened_on_and_is_not_given_away():
    """While a port is reserved, rank 0 can listen on it, on IPv4 and IPv6."""
    reservation = PortReservation()
    for family, address in ((socket.AF_INET, ""), (socket.AF_INET6, "::")):
        with socket.socket(family, socket.SOCK_STREAM) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((address, reservation.port))
            listener.listen()
    reservation.release()


def test_fixed_port_in_use_is_an_error_with_the_remedy():
    """A port that somebody listens on is refused with the flag and the way out."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.bind(("", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(PortInUseError, match=f"--master-port {port}.*choose another"):
            PortReservation(port)


def rounds_of(posted, port):
    """Return the rounds of a node with two ranks; what happens is added to `posted`."""
    plan = Mock(nproc_per_node=2, local_addr=None, master_addr="127.0.0.1", master_port=port)
    return LocalRendezvous(Mock(plan=plan, post=posted.append))


def test_each_round_has_a_fresh_port_unless_fixed():
    """MASTER_PORT changes with the cycle; a fixed one stays."""

    def port_of(rendezvous, cycle):
        rendezvous.join(cycle)
        ready = posted.pop()
        assert ready.assignment.cycle == cycle
        return ready.assignment.master_port

    posted = []
    free = rounds_of(posted, None)
    assert len({port_of(free, cycle) for cycle in range(3)}) == 3
    free.shutdown()
    with ports.claimed() as port:
        fixed = rounds_of(posted, port)
        assert [port_of(fixed, cycle) for cycle in range(3)] == [port] * 3
        fixed.shutdown()


def test_no_port_for_a_round_closes_the_rendezvous():
    """A launcher without a free descriptor ends the job with the reason, no traceback."""
    posted = []
    rounds = rounds_of(posted, None)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        rounds.join(0)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    (closed,) = posted
    rounds.shutdown()
    assert isinstance(closed, RoundClosed)
    assert "Too many open files" in closed.reason


@pytest.fixture
def signals():
    """Return a queue for SIGHUP, which has a handler of the test's: `nohup` leaves it ignored."""
    before = signal.signal(signal.SIGHUP, lambda *_: None)
    it = SignalQueue((signal.SIGHUP,))
    yield it
    it.close()
    signal.signal(signal.SIGHUP, before)


def test_signal_arrives_as_a_number_and_handlers_come_back(loop, signals):
    """A signal wakes the loop while the queue is installed; afterwards the old handler is back."""
    before, seen = signal.getsignal(signal.SIGHUP), []
    with signals.installed():
        loop.watch(signals.fileno(), lambda: seen.extend(signals.receive()))
        os.kill(os.getpid(), signal.SIGHUP)
        loop.run_once(until=SystemClock().monotonic() + 10)
    assert seen == [signal.SIGHUP]
    assert signal.getsignal(signal.SIGHUP) is before


def test_an_ignored_signal_stays_ignored(loop, signals):
    """What the shell has asked to ignore, as `nohup` does, ends no job."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with signals.installed():
        loop.watch(signals.fileno(), lambda: seen.extend(signals.receive()))
        seen = []
        os.kill(os.getpid(), signal.SIGHUP)
        loop.run_once(until=SystemClock().monotonic() + 0.1)
    assert seen == []
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def failure(rank, status=None, *, seen_at=100.0, error=None, hang=None):
    status = status or ExitStatus(None, 9)
    return faults.Failure(rank, rank, 10 + rank, "h", status, seen_at, error, hang or {})


def test_root_cause_is_the_earliest_time_in_the_error_files():
    """The rank whose error file has the earliest time is blamed, not the first one reaped."""
    early = ErrorFile("e", "ValueError: boom", "", 50.0)
    first = faults.root_cause(
        [failure(0, seen_at=99.0), failure(1, ExitStatus(1), seen_at=101.0, error=early)]
    )
    assert first.rank == 1
    assert faults.cause_of(first).what == "rank 1 on host h exited with code 1: ValueError: boom"


def hang_of(rank, **more):
    """Return a monitor's report that blames a rank."""
    return {
        "rule": "section",
        "section": "step",
        "elapsed": 10.5,
        "limit": 10.0,
        "reason": "",
        "finding": f"rank {rank} on host h is stopped; rank 0 waited for it",
        "trigger": 0,
        "culprits": [rank],
        "rank": rank,
        "local_rank": rank,
        "host": "h",
        "signal": 9,
        "error_file": None,
        "ranks": [],
        **more,
    }


def test_the_culprit_of_a_hang_is_the_root_cause():
    """Whoever was seen to fail first: the rank that the monitor blames is the cause."""
    failures = [failure(0, seen_at=1.0), failure(1, hang=hang_of(1), seen_at=2.0)]
    assert faults.root_cause(failures).rank == 1


def test_hang_report_makes_the_cause_a_hang():
    """The cause says who is to blame, and by which limit that was found."""
    cause = faults.cause_of(failure(2, hang=hang_of(2)))
    assert (cause.kind, cause.detected_by, cause.rank) == ("hang_section", "monitor", 2)
    assert cause.what == (
        "rank 2 on host h is stopped; rank 0 waited for it"
        " (rank 0 was in section 'step' for 10.50 s, limit 10.00 s)"
    )
    beats = hang_of(2, rule="heartbeat", section=None)
    assert "sent no heartbeat" in faults.cause_of(failure(2, hang=beats)).what


def test_a_hang_whose_culprit_cannot_be_told_is_held_against_nobody():
    """Without a culprit the cause names neither a rank nor a host."""
    cause = faults.cause_of(failure(2, hang=hang_of(2, culprits=[])))
    assert (cause.rank, cause.local_rank, cause.host) == (None, None, "")


def test_a_rank_that_failed_and_does_not_exit_is_an_exception():
    """A hang behind which stands an error file is called by what is in the file."""
    hang = hang_of(2, error_file="/tmp/error.json")
    assert faults.cause_of(failure(2, hang=hang)).kind == "exception"


def test_the_table_names_no_file_that_goes_with_the_launch(tmp_path):
    """Stacks and error files in the run directory are not offered; those that are kept are."""
    run_dir, kept = tmp_path / "run", tmp_path / "stacks-r0.txt"
    run_dir.mkdir()
    gone, error = run_dir / "stacks-r1.txt", run_dir / "error.json"
    for path in (kept, gone, error):
        path.touch()
    ranks = [
        {"rank": number, "words": "sleeps", "stacks": str(path)}
        for number, path in enumerate([kept, gone])
    ]
    failures = [
        failure(1, hang=hang_of(1, ranks=ranks)),
        failure(2, ExitStatus(1), error=ErrorFile(str(error), "E: x", "", 17.0)),
    ]
    table = faults.failure_table("job", failures, str(run_dir))
    assert f"rank 0 sleeps, stacks: {kept}" in table
    assert "rank 1 sleeps\n" in table
    assert str(run_dir) not in table
    assert str(error) in faults.failure_table("job", failures)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe",
        b"[]",
        b"{}",
        b'{"message": 7}',
        b"[" * 100_000,
        b'{"message": {"extraInfo": 3}}',
    ],
)
def test_any_error_file_is_survived(tmp_path, content):
    """A worker may write anything into its error file; the launcher goes on."""
    path = tmp_path / "error.json"
    path.write_bytes(content)
    faults.cause_of(failure(0, ExitStatus(1), error=read_error_file(str(path))))
    assert read_error_file(str(tmp_path / "absent")) is None


def test_torch_error_file_is_understood(tmp_path):
    """Message, traceback and time of a file that `@record` wrote are read."""
    path = tmp_path / "error.json"
    extra = {"py_callstack": "Traceback...", "timestamp": "17"}
    path.write_text(json.dumps({"message": {"message": "E: x", "extraInfo": extra}}))
    assert read_error_file(str(path)) == ErrorFile(str(path), "E: x", "Traceback...", 17.0)


def test_streams_follow_redirects_tee_and_filter():
    """Redirects go to files, tee copies, ranks filtered out are silent on the console."""
    settings = output.OutputSettings({0: 1, 1: 0}, {0: 2, 1: 2}, frozenset({0}))
    first = output.worker_output(settings, "d", 0)
    assert first.stdout == output.Target("d/stdout.log")
    assert first.stderr == output.Target("d/stderr.log", tee=True)
    second = output.worker_output(settings, "d", 1)
    assert second.stdout == output.Target(os.devnull)
    assert second.stderr == output.Target("d/stderr.log", tee=False)


@pytest.mark.parametrize("has_notices", [True, False])
def test_tee_copies_whole_lines_with_prefix_and_the_last_words(
    tmp_path, loop, capfdbinary, monkeypatch, has_notices
):
    """Lines appear when the kernel says that the file grew, else at an interval; the rest last."""
    monkeypatch.setenv("NVRX_FORCE_NO_INOTIFY", "0" if has_notices else "1")
    path = tmp_path / "stdout.log"
    path.touch()
    tee = output.Tee()
    tee.follow(output.Target(str(path), tee=True), "[default0]:", output.Stream.STDOUT)
    assert tee.look() == (None if has_notices else output.LOOK_INTERVAL_S)
    with path.open("ab", buffering=0) as file:
        file.write(b"one\ntw")
        if has_notices:
            loop.watch(tee.fileno(), tee.look)
            loop.run_once(until=SystemClock().monotonic() + 10)
            loop.unwatch(tee.fileno())
        else:
            assert tee.fileno() == -1
            tee.look()
        assert capfdbinary.readouterr().out == b"[default0]:one\n"
        file.write(b"o")
    tee.close()
    assert capfdbinary.readouterr().out == b"[default0]:two\n"


def test_a_line_written_before_the_tee_follows_is_shown_at_once(tmp_path):
    """The kernel reports nothing of it: a standby worker may print before it is followed."""
    path = tmp_path / "stdout.log"
    path.write_bytes(b"early\n")
    looks = []
    tee = output.Tee(lambda: looks.append(1))
    tee.follow(output.Target(str(path), tee=True), "", output.Stream.STDOUT)
    assert looks == [1]
    tee.close()


def test_filtered_streams_have_one_file_for_all_ranks():
    """What goes to a file and is shown is looked at; ranks that are filtered out are not."""
    wanted = {output.Stream.STDOUT: ("a",)}
    settings = output.OutputSettings({0: 1, 1: 1, 2: 0}, {2: 1}, frozenset({0, 2}), wanted)
    made = [output.worker_output(settings, f"d/{rank}", rank).stdout.filter for rank in range(3)]
    copy = output.Filter("d/filtered_stdout.log", ("a",))
    assert made == [copy, None, copy]
    assert output.worker_output(settings, "d/0", 0).stderr.filter is None


def test_lines_that_are_wanted_are_written_a_second_time(tmp_path, capfdbinary):
    """Lines of two ranks with one of the texts are in one file, with their prefix and whole."""
    files = [tmp_path / "0.log", tmp_path / "1.log"]
    copy = output.Filter(str(tmp_path / "filtered.log"), ("apple", "default"))
    tee = output.Tee()
    for rank, file in enumerate(files):
        file.write_bytes(b"apple pie\nplum\n")
        tee.follow(output.Target(str(file), filter=copy), f"[default{rank}]:", output.Stream.STDOUT)
    tee.follow(output.Target(str(files[1]), tee=True), "", output.Stream.STDOUT)
    with files[1].open("ab", buffering=0) as file:
        file.write(b"one ap")
        tee.look()
        file.write(b"ple\nno default, not at its end")
    tee.close()
    assert sorted((tmp_path / "filtered.log").read_bytes().splitlines()) == [
        b"[default0]:apple pie",
        b"[default1]:apple pie",
        b"[default1]:no default, not at its end",
        b"[default1]:one apple",
    ]
    # The console has everything all the same.
    assert capfdbinary.readouterr().out.count(b"\n") == 4


def test_a_file_of_wanted_lines_that_cannot_be_written_costs_its_lines(tmp_path, caplog):
    """One message, and the stream is read on."""
    path = tmp_path / "0.log"
    path.write_bytes(b"a\n")
    tee = output.Tee()
    copy = output.Filter(str(tmp_path), ("a",))
    tee.follow(output.Target(str(path), filter=copy), "", output.Stream.STDOUT)
    assert tee.look() is None
    tee.close()
    assert caplog.text.count("is not written any more") == 1


def test_tee_does_not_stay_with_a_worker_that_writes_without_end(tmp_path, capfdbinary):
    """One look copies a bounded amount and says that there is more."""
    path = tmp_path / "stdout.log"
    path.write_bytes(b"x" * 99 + b"\n" + b"y\n" * (output.READ_BYTES * output.MAX_READS))
    tee = output.Tee()
    tee.follow(output.Target(str(path), tee=True), "", output.Stream.STDOUT)
    assert tee.look() == 0.0
    assert len(capfdbinary.readouterr().out) <= output.READ_BYTES * output.MAX_READS
    tee.close()
    assert len(capfdbinary.readouterr().out) > output.READ_BYTES


@pytest.mark.parametrize("console", ["text", "closed"])
def test_tee_survives_an_odd_console(tmp_path, monkeypatch, console):
    """A notebook's text stream gets the lines; a closed one does no harm."""
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stdout", stream)
    path = tmp_path / "stdout.log"
    path.write_bytes(b"line\n")
    tee = output.Tee()
    tee.follow(output.Target(str(path), tee=True), "p:", output.Stream.STDOUT)
    if console == "closed":
        stream.close()
    tee.close()
    assert console == "closed" or stream.getvalue() == "p:line\n"


def test_tee_never_waits_for_a_console_that_does_not_read(tmp_path, monkeypatch):
    """A full pipe holds up the copy only, and the lines appear when somebody reads."""
    reader, writer = os.pipe()
    monkeypatch.setattr(sys, "stdout", os.fdopen(writer, "w"))
    path = tmp_path / "stdout.log"
    path.write_bytes(b"line\n" * 100_000)
    tee = output.Tee()
    tee.follow(output.Target(str(path), tee=True), "", output.Stream.STDOUT)
    assert tee.look() == output.LOOK_INTERVAL_S
    seen = 0
    while seen < 500_000:
        seen += len(os.read(reader, 1 << 16))
        tee.look()
    assert seen == 500_000
    tee.close()
    sys.stdout.close()
    os.close(reader)


def test_a_console_that_does_not_read_delays_no_restart_and_loses_no_line(tmp_path, monkeypatch):
    """The end of a cycle waits for nothing; its lines come later, before those of the next one."""
    reader, writer = os.pipe()
    monkeypatch.setattr(sys, "stdout", os.fdopen(writer, "w"))
    due = []
    tee = output.Tee(lambda: due.append(tee.look()))
    for cycle in (b"old\n", b"new\n"):
        path = tmp_path / f"{cycle[:3].decode()}.log"
        path.write_bytes(cycle * 50_000 + cycle[:3])
        tee.follow(output.Target(str(path), tee=True), "", output.Stream.STDOUT)
        if cycle == b"old\n":
            tee.end_cycle()
            assert due[-1] == output.LOOK_INTERVAL_S
    seen = b""
    while len(seen) < 2 * 200_000 + 4:
        seen += os.read(reader, 1 << 16)
        tee.look()
    assert seen == b"old\n" * 50_001 + b"new\n" * 50_000
    tee.close()
    sys.stdout.close()
    os.close(reader)


def test_what_a_console_never_takes_holds_no_files_open(tmp_path, monkeypatch, caplog):
    """However many cycles end, the files of the last one alone wait for the console."""
    reader, writer = os.pipe()
    monkeypatch.setattr(sys, "stdout", os.fdopen(writer, "w"))
    path = tmp_path / "stdout.log"
    path.write_bytes(b"line\n" * 50_000)
    tee = output.Tee()
    for _ in range(3):
        tee.follow(output.Target(str(path), tee=True), "", output.Stream.STDOUT)
        tee.look()
        tee.end_cycle()
    opened = [fd for fd in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{fd}")]
    assert [os.readlink(f"/proc/self/fd/{fd}") for fd in opened].count(str(path)) == 1
    assert caplog.text.count("the console is slower than the workers") == 2
    os.close(reader)
    tee.close()
    sys.stdout.close()


def test_lines_that_a_console_lacks_are_counted_once(tmp_path, monkeypatch, caplog):
    """Workers that write faster than the console reads: one line says how much is missing."""
    monkeypatch.setattr(output, "DRAIN_S", 0.0)
    shown = []

    def take_slowly(_name, data, _wait_s):
        shown.append(min(len(data), 1000))
        return shown[-1]

    monkeypatch.setattr(output.ConsoleStream, "write", take_slowly)
    tee = output.Tee()
    paths = [tmp_path / "0.log", tmp_path / "1.log"]
    for path in paths:
        path.write_bytes(b"x" * 99 + b"\n")
        tee.follow(output.Target(str(path), tee=True), "", output.Stream.STDOUT)
        with path.open("ab") as file:
            file.write((b"x" * 99 + b"\n") * 30_000)
    tee.close()
    lacks = 2 * 30_001 * 100 - sum(shown)
    (line,) = [record.getMessage() for record in caplog.records]
    assert f"it lacks {lacks / 1e6:.1f} MB of what they wrote" in line
    assert all(str(path) in line for path in paths)


def test_timers_that_are_cancelled_do_not_stay_until_their_time(loop):
    """What was set and withdrawn a thousand times is forgotten; what was not, still happens."""
    clock, fired = SystemClock(), []
    loop.call_at(clock.monotonic() + 0.01, lambda: fired.append("soon"))
    for number in range(20_000):
        loop.call_at(clock.monotonic() + 3600 + number, lambda: fired.append("late")).cancel()
    assert len(loop._timers) < 200
    while not fired:
        loop.run_once(until=clock.monotonic() + 10)
    assert fired == ["soon"]


def test_tee_gives_up_a_file_that_cannot_be_read(tmp_path, caplog):
    """A file that its file system loses costs its copy and one warning; the loop goes on."""
    path = tmp_path / "stdout.log"
    path.write_bytes(b"line\n")
    tee = output.Tee()
    tee.follow(output.Target(str(path), tee=True), "", output.Stream.STDOUT)
    fds = [fd for fd in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{fd}")]
    [fd] = [fd for fd in fds if os.readlink(f"/proc/self/fd/{fd}") == str(path)]
    folder = os.open(tmp_path, os.O_RDONLY)
    os.dup2(folder, int(fd))  # a read now fails with EISDIR
    os.close(folder)
    assert tee.look() is None
    tee.close()
    assert caplog.text.count("cannot be shown on the console") == 1


def test_prefix_that_is_no_unicode_is_copied(tmp_path, capfdbinary):
    """A role's bytes from the command line reach the console as they were given."""
    path = tmp_path / "stdout.log"
    path.write_bytes(b"line\n")
    tee = output.Tee()
    tee.follow(output.Target(str(path), tee=True), os.fsdecode(b"r\xff:"), output.Stream.STDOUT)
    tee.close()
    assert capfdbinary.readouterr().out == b"r\xff:line\n"


def test_streams_that_cannot_all_be_opened_leave_no_descriptor(tmp_path, loop):
    """When stderr's file cannot be made, stdout's is closed again."""
    out = output.Target(str(tmp_path / "stdout.log"))
    streams = output.WorkerOutput(out, output.Target(str(tmp_path / "no" / "stderr.log")), "")
    spec = workers.WorkerSpec(0, 0, ("true",), {}, streams, "")
    tee = output.Tee()
    group = workers.WorkerGroup(
        loop, SystemClock(), tee, exited=print, stopped=print, started_again=print
    )
    before = os.listdir("/proc/self/fd")
    with pytest.raises(output.LogDirectoryError):
        group.start([spec], workers.Starter())
    assert os.listdir("/proc/self/fd") == before
    tee.close()


def test_command_line_that_is_no_unicode_is_recorded():
    """A job whose arguments hold other bytes starts like any other."""
    log = events.NULL_EVENTS
    reporter = EventReporter(
        log, records.FailureLog("/nowhere"), SystemClock(), host="h", shows_stacks=False
    )
    argv = ("run", os.fsdecode(b"a\xff"))
    reporter.job_started(argv=argv, nnodes="1:1", nproc=1, policy="any-failed")


@pytest.mark.parametrize("kind", ["fifo", "symlink", "directory"])
def test_error_file_that_is_no_file_is_left_alone(tmp_path, kind):
    """A pipe, a link or a folder in its place neither blocks the launcher nor is read."""
    path = tmp_path / "error.json"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "symlink":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()
    assert read_error_file(str(path)) is None


@pytest.mark.parametrize("stamp", ["inf", "nan", "1" + 400 * "0", "-5", "true", '"x"', "1e300"])
def test_odd_time_in_an_error_file_is_ignored(tmp_path, stamp):
    """A time that cannot be one is replaced by the time at which the exit was seen."""
    path = tmp_path / "error.json"
    stamp = {"inf": "1e999", "nan": "NaN"}.get(stamp, stamp)
    path.write_text('{"message": {"message": "m", "extraInfo": {"timestamp": ' + stamp + "}}}")
    error = read_error_file(str(path))
    assert failure(0, ExitStatus(1), seen_at=7.0, error=error).time == 7.0
    assert "FAILED" in faults.failure_table("job", [failure(0, ExitStatus(1), error=error)])


def test_failure_record_does_not_wait_for_a_pipe(tmp_path):
    """A pipe named like the record costs the record, not the job."""
    os.mkfifo(tmp_path / records.FAILURES_FILE)
    log = records.FailureLog(str(tmp_path))
    cause = faults.cause_of(failure(0))
    log.write({"cause": cause.kind, "what": cause.what})


def test_failure_record_that_is_cut_is_told(tmp_path, caplog):
    """A disk that takes only a part of the record's line is a warning."""
    log = records.FailureLog(str(tmp_path))
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))
    try:
        log.write({"what": faults.cause_of(failure(0)).what})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert "No space left" in caplog.text


def test_log_directory_that_cannot_be_written_names_path_and_remedy(tmp_path):
    """A file in place of the directory is one clear error, and nothing is left behind."""
    blocker = tmp_path / "file"
    blocker.touch()
    with pytest.raises(output.LogDirectoryError, match=r"--log-dir .*file: .*name a directory"):
        output.OutputFiles.beneath(str(blocker), "job")
    if sys.platform == "linux" and os.path.exists("/dev/full"):
        assert list(tmp_path.iterdir()) == [blocker]


def test_a_folder_says_whether_workers_can_write_there(tmp_path):
    """Room is found out by writing, and nothing of it is left; a folder that is gone has none."""
    files = output.OutputFiles.beneath(str(tmp_path), "job")
    assert files.missing_space() == ""
    assert os.listdir(files.root) == []
    os.rmdir(files.root)
    assert "No such file" in files.missing_space()


def test_tidying_up_after_others_costs_no_job(monkeypatch, caplog):
    """Directories of earlier launches that cannot be looked at are a warning."""

    def fail():
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(job, "remove_stale_run_dirs", fail)
    job.Job.__new__(job.Job)._remove_stale_directories()
    assert "Too many open files" in caplog.text
