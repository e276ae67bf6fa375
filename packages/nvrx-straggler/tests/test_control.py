# SPDX-License-Identifier: Apache-2.0
"""Steering a running job with `nvrx-straggler`, and the events that it leaves."""

import contextlib
import gc
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from nvidia_resiliency_ext.attribution.straggler import Detector, _cli
from nvidia_resiliency_ext.attribution.straggler._cli import main
from nvidia_resiliency_ext.attribution.straggler._session import control, store_control
from nvidia_resiliency_ext.attribution.straggler._session.control import Change
from nvidia_resiliency_ext.shared_utils import store_sockets
from nvidia_resiliency_ext.shared_utils.abandonable import DeadlineCaller
from nvidia_resiliency_ext.shared_utils.credentials import TokenFile
from nvidia_resiliency_ext.shared_utils.events import read_events


@pytest.fixture(autouse=True)
def apart(monkeypatch):
    """Give answers the time of a loaded machine, and hide jobs of tests beside this one."""
    monkeypatch.setattr(_cli, "DEFAULT_TIMEOUT_S", 60.0)
    real = control.live_run_dirs

    def own(label):
        here = Detector._session and Detector._session._control
        return [path for path in real(label) if here and path == here.path]

    monkeypatch.setattr(control, "live_run_dirs", own)


@pytest.fixture
def job(tmp_path_factory, monkeypatch):
    """A detector with a control socket in a place of its own; returns its run directory."""
    place = tmp_path_factory.mktemp("r")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(place))
    monkeypatch.setenv("TMPDIR", str(place))
    place.chmod(0o700)
    Detector.initialize(cuda_profiling="off")
    Detector.generate_report_if_interval_elapsed()
    yield Detector._session._control.path
    Detector.shutdown()
    assert list(place.iterdir()) == []


def test_status_and_changes(job, capsys):
    """A change is shown as pending, and is in force after the next report."""
    with Detector.detection_section("fw"):
        pass
    Detector.generate_report()
    change = ["set", "--run-dir", job, "--profiling-interval", "3", "--gpu-rel-threshold", "0.9"]
    assert main(change) == 0
    assert "profiling_interval = 1  -> 3 from the next report on" in capsys.readouterr().out
    Detector.generate_report()
    assert main(["status", "--run-dir", job, "--json"]) == 0
    status = json.loads(capsys.readouterr().out)
    assert status["settings"] == status["pending"]
    assert status["settings"]["profiling_interval"] == 3
    assert status["settings"]["gpu_rel_threshold"] == 0.9
    assert Detector.generate_report().thresholds["gpu_rel_threshold"] == 0.9
    assert main(["disable", "--run-dir", job]) == 0
    Detector.generate_report()
    with Detector.detection_section("other"):
        pass
    assert "other" not in Detector.custom_sections
    assert main(["enable", "--run-dir", job]) == 0
    Detector.generate_report()
    with Detector.detection_section("other"):
        pass
    assert "other" in Detector.custom_sections


@pytest.mark.parametrize(
    ("option", "name", "value"),
    [
        ("--report-interval", "report_time_interval", 30.5),
        ("--profiling-interval", "profiling_interval", 7),
        ("--ranks", "ranks", "0"),
        ("--gpu-rel-threshold", "gpu_rel_threshold", 0.93),
        ("--section-rel-threshold", "section_rel_threshold", 0.9),
        ("--gpu-indiv-threshold", "gpu_indiv_threshold", 0.95),
        ("--section-indiv-threshold", "section_indiv_threshold", 0.85),
    ],
)
def test_each_setting_takes_effect(job, option, name, value):
    """Whatever `set` changes, and nothing else, is in force on the rank after the next report."""
    session = Detector._session
    expected = {**session.settings.to_dict(), "version": 1, name: value}
    assert main(["set", "--run-dir", job, option, str(value)]) == 0
    Detector.generate_report()
    assert session.settings.to_dict() == expected
    assert session.tracker.time_interval == expected["report_time_interval"]
    assert session.registry.interval == session.tracker.profiling_interval
    assert session.registry.interval == expected["profiling_interval"]
    thresholds = Detector.generate_report().thresholds
    assert thresholds == {key: expected[key] for key in thresholds}


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["set", "--ranks", "3-1"], "ranks"),
        (["set", "--profiling-interval", "0"], "profiling_interval"),
        (["set", "--profiling-interval", str(10**18)], "1000000000"),
        (["set", "--report-interval", "nan"], "report_time_interval"),
        (["set", "--gpu-rel-threshold", "7"], "gpu_rel_threshold"),
        (["set", "--ranks", ""], "ranks=''"),
        (["set", "--ranks", "7"], "this job has rank 0"),
    ],
)
def test_wrong_changes_are_refused(job, capsys, arguments, named):
    """A wrong value is one line that names the setting, exit code 2, and changes nothing."""
    before = Detector._session.pending
    assert main([*arguments, "--run-dir", job]) == 2
    error = capsys.readouterr().err
    assert named in error
    assert error.count("\n") == 1
    assert Detector._session.pending is before


@pytest.mark.serial  # another test's job of this user would be found, too
def test_job_is_found_or_named(job, capsys, tmp_path):
    """The only job is found by itself; what is no job of ours is an error with a next step."""
    assert main(["status"]) == 0
    assert "1 rank, rank 0 is process" in capsys.readouterr().out
    assert main(["status", "--run-dir", str(tmp_path / "absent")]) == 2
    assert "cannot be reached" in capsys.readouterr().err
    Detector.shutdown()
    assert main(["status"]) == 2
    assert "no job with a straggler detector" in capsys.readouterr().err
    Detector.initialize(cuda_profiling="off")
    Detector.generate_report_if_interval_elapsed()


@pytest.mark.parametrize(
    ("environment", "job"),
    [
        ({"TORCHELASTIC_RUN_ID": "none"}, ""),  # what torchrun calls a job without a name
        ({"TORCHELASTIC_RUN_ID": "exp-7"}, "exp-7"),
        ({"TORCHELASTIC_RUN_ID": "exp-7", "SLURM_JOB_ID": "42"}, "42"),
    ],
)
def test_status_names_the_job(monkeypatch, environment, job):
    """The state has the scheduler's or the launcher's name of the job, if it has one."""
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    Detector.initialize(cuda_profiling="off", control=False)
    assert Detector._session._status().job == job


def test_garbage_is_not_answered(job, capsys, caplog):
    """Bytes that are no request end the connection; the job goes on answering its user."""
    assert oct(os.stat(job).st_mode & 0o777) == "0o700"
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(20)
        sock.connect(os.path.join(job, "control.sock"))
        sock.sendall(b"\0\0\0\x03abc")
        assert sock.recv(1) == b""
    assert main(["status", "--run-dir", job]) == 0


PROGRAM = """
import sys
from nvidia_resiliency_ext.attribution.straggler._cli import main
code = main(sys.argv[1:])
print("torch" in sys.modules, code)
"""


def run_command(*arguments):
    """Run a command in a process of its own, which says if it loaded torch, and the code."""
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments],
        capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip


def test_silent_clients_do_not_hold_up_the_others(job, capsys, caplog):
    """However many clients connect and say nothing or half a request, a command is answered."""
    silent = [socket.socket(socket.AF_UNIX) for _ in range(40)]
    try:
        for number, sock in enumerate(silent):
            sock.settimeout(60)
            sock.connect(os.path.join(job, "control.sock"))
            if number % 2:
                sock.sendall(b"\0\0\0\x09ab")
        assert main(["status", "--run-dir", job]) == 0
        # The oldest had to go, so that descriptors do not run out.
        assert silent[0].recv(1) == b""
    finally:
        for sock in silent:
            sock.close()


def test_an_interrupted_command_is_silent(job, capsys, monkeypatch):
    """Control-C ends a command that waits, with the exit code of a signal and no traceback."""

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(_cli, "ask", interrupt)
    assert main(["status", "--run-dir", job]) == 130
    assert capsys.readouterr() == ("", "")


def test_commands_need_no_torch(job):
    """A command that goes through the run directory does not load torch, which takes seconds."""
    result = run_command("status", "--run-dir", job)
    assert result.stdout.endswith("False 0\n"), result.stderr


def test_several_jobs_are_told_apart(job):
    """With two jobs of one user on a host, a command names both and steers the one it is given."""
    other = control.ControlServer(Detector._session._answer)
    try:
        result = run_command("status")
        assert result.stdout.endswith("False 2\n")
        assert "choose one with --run-dir" in result.stderr
        assert job in result.stderr
        assert other.path in result.stderr
        assert main(["status", "--run-dir", job]) == main(["status", "--run-dir", other.path]) == 0
    finally:
        other.close()


def test_server_goes_on_after_a_failure(job, capsys, caplog, monkeypatch):
    """A request that fails and a connection that cannot be taken do not end the server."""

    class Broken:
        def table(self, k):
            raise KeyError(k)

    def open_descriptors():
        return len(os.listdir("/proc/self/fd"))

    monkeypatch.setattr(Detector._session, "last_report", Broken())
    before = open_descriptors()
    assert main(["status", "--run-dir", job]) == 2
    assert "could not answer: KeyError" in capsys.readouterr().err
    monkeypatch.setattr(Detector._session, "last_report", None)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    deadline = time.monotonic() + 60
    while open_descriptors() > before and time.monotonic() < deadline:
        time.sleep(0.01)  # the server closes its end a moment after we have the answer
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(60)
        free = os.dup(0)
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
        try:
            sock.connect(os.path.join(job, "control.sock"))
            deadline = time.monotonic() + 60
            while "cannot be taken" not in caplog.text and time.monotonic() < deadline:
                time.sleep(0.01)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert "cannot be taken" in caplog.text
    assert main(["status", "--run-dir", job]) == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_other_users_are_refused(job):
    """A process of another user, even one that can reach the socket, gets no answer."""
    os.chmod(job, 0o755)
    os.chmod(os.path.join(job, "control.sock"), 0o777)
    for parent in (job, *[str(p) for p in Path(job).parents][:3]):
        if os.stat(parent).st_uid == os.geteuid() and parent not in ("/", "/tmp"):
            os.chmod(parent, os.stat(parent).st_mode | 0o055)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.setuid(65534)
        code = b"?"
        try:
            with socket.socket(socket.AF_UNIX) as sock:
                sock.settimeout(20)
                sock.connect(os.path.join(job, "control.sock"))
                code = b"refused" if sock.recv(1) == b"" else b"answered"
        except ConnectionError:
            code = b"refused"
        except OSError as error:
            code = repr(error).encode()
        os.write(writer, code)
        os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    answer = os.read(reader, 200)
    os.close(reader)
    os.chmod(job, 0o700)
    assert answer == b"refused"


@pytest.fixture
def store(tmp_path, monkeypatch):
    """A job's store and token file, with a detector that takes requests through it."""
    token = tmp_path / "token"
    token.touch(0o600)
    token.write_text("of the job")
    served = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "FATAL")  # else a command sets it for all tests
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(served.port))
    monkeypatch.setenv("NVRX_STRAGGLER_TOKEN_FILE", str(token))
    Detector.initialize(cuda_profiling="off")
    Detector.generate_report_if_interval_elapsed()
    yield dist.PrefixStore("nvrx-straggler/control/0", served)
    Detector.shutdown()


def test_requests_through_the_store(store, capsys):
    """With the job's token, status and changes go through the store, applied by a report."""
    address = ["--store", f"127.0.0.1:{store.underlying_store.port}"]
    assert main(["set", *address, "--profiling-interval", "3"]) == 0
    assert "profiling_interval = 1  -> 3" in capsys.readouterr().out
    Detector.generate_report()
    assert main(["status", *address, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["settings"]["profiling_interval"] == 3
    assert main(["set", *address, "--profiling-interval", "0"]) == 2
    assert "profiling_interval" in capsys.readouterr().err


def test_two_commands_at_once_are_both_answered(store):
    """Requests that overwrite each other in the store are sent again until each is answered."""
    address = ["--store", f"127.0.0.1:{store.underlying_store.port}", "--timeout", "60"]
    threads = 6
    with ThreadPoolExecutor(threads) as pool:
        codes = list(pool.map(main, [["status", *address]] * 4 * threads))
    assert codes == [0] * 4 * threads


def test_requests_through_the_store_are_refused_to_others(store, capsys, caplog, tmp_path):
    """Another token, a request that is sent again and bytes that are none change nothing.

    A request that is sent again has no answer and no warning: a command repeats it by itself.
    """
    address = ["--store", f"127.0.0.1:{store.underlying_store.port}"]
    other = tmp_path / "other"
    other.touch(0o600)
    other.write_text("guessed")

    @contextlib.contextmanager
    def one_request():
        """Wait for the next challenge at the end: it comes after the answer."""
        before = store.get(store_control._CHALLENGE)
        yield
        deadline = time.monotonic() + 60
        while store.get(store_control._CHALLENGE) == before:
            assert time.monotonic() < deadline
            time.sleep(0.01)

    with one_request():
        assert main(["disable", *address, "--token-file", str(other)]) == 2
    assert "not signed with this token" in capsys.readouterr().err
    token = TokenFile(os.environ["NVRX_STRAGGLER_TOKEN_FILE"]).token()
    challenge = store.get(store_control._CHALLENGE)
    nonce = bytes([1]) * 16
    answer = f"{store_control._ANSWER}{nonce.hex()}"
    again = store_control._seal(token, b"request", challenge, nonce, Change({"enabled": False}))
    for data in (again, again, b"", b"x", bytes(100), bytes(2 << 20)):
        store.delete_key(answer)
        with one_request():
            store.set(store_control._REQUEST, data)
        with one_request():
            assert main(["status", *address]) == 0
    assert Detector._session.pending.version == 1
    assert not store.check([answer])
    assert "challenge" not in caplog.text
    assert main(["status", *address, "--token-file", str(tmp_path / "absent")]) == 2
    assert "--token-file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("listens", "message"),
    [
        (True, "does not answer as a job's store within 2 s"),
        (False, "Connection refused): give MASTER_ADDR and MASTER_PORT"),
    ],
)
def test_a_store_that_is_none_is_one_line(tmp_path, listens, message):
    """A mute or absent listener costs the time of --timeout, and one line without C++ frames."""
    token = tmp_path / "token"
    token.touch(0o600)
    token.write_text("of the job")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        place = f"127.0.0.1:{listener.getsockname()[1]}"
        if not listens:
            listener.close()
        arguments = ["--store", place, "--token-file", str(token), "--timeout", "2"]
        result = run_command("status", *arguments)
    assert result.stdout.endswith(f"{listens} 2\n")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["status", "--first-rank", "2"], "--first-rank needs --store"),
        (["status", "--store", "h:1", "--token-file", "f", "--first-rank", "-1"], "not a rank"),
        (["status", "--store", "h:1", "--token-file", "f", "--first-rank", "x"], "--first-rank"),
        (["status", "--store", "h"], "is not HOST:PORT"),
        (["status", "--timeout", "0"], "not a number of seconds"),
        (["set"], "set needs at least one setting"),
    ],
)
def test_wrong_commands_are_refused(capsys, monkeypatch, arguments, message):
    """A command that cannot be meant ends with code 2 and a line that names the option."""
    monkeypatch.delenv("NVRX_STRAGGLER_TOKEN_FILE", raising=False)
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_a_name_server_that_is_silent_does_not_hold_up_a_command(store, monkeypatch):
    """Before a command connects to a store, it bounds how long it waits for the store's name."""
    monkeypatch.delenv("RES_OPTIONS")
    assert main(["status", "--store", f"127.0.0.1:{store.underlying_store.port}"]) == 0
    assert os.environ["RES_OPTIONS"] == "timeout:1 attempts:2"


def test_a_store_without_a_detector_is_named(store, capsys):
    """Where rank 0 takes no requests, the error names what rank 0 needs."""
    Detector.shutdown()
    assert (
        main(["status", "--store", f"127.0.0.1:{store.underlying_store.port}", "--timeout", "3"])
        == 2
    )
    assert "is NVRX_STRAGGLER_TOKEN_FILE set for rank 0" in capsys.readouterr().err


STORE = """
import signal
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
signal.pause()
"""


def test_a_store_that_stands_still_does_not_hold_up_the_end(tmp_path, monkeypatch):
    """The end of control through a store whose process is stopped is bounded."""
    token = tmp_path / "token"
    token.touch(0o600)
    token.write_text("of the job")
    served = subprocess.Popen([sys.executable, "-c", STORE], stdout=subprocess.PIPE, text=True)
    try:
        port = int(served.stdout.readline())
        server = store_control.StoreControlServer(
            "127.0.0.1", port, TokenFile(str(token), "token"), lambda _: None, 0
        )
        client = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        client.wait([f"nvrx-straggler/control/0/{store_control._CHALLENGE}"])
        served.send_signal(signal.SIGSTOP)
        monkeypatch.setattr(store_control, "_CLOSE_TIMEOUT_S", 1.0)
        monkeypatch.setattr(store_control, "_STORE_TIMEOUT", timedelta(seconds=1))
        DeadlineCaller().run("close", server.close, 60.0)
    finally:
        served.kill()
        served.communicate()
    for thread in (server._thread, *store_sockets.given_up):
        thread.join(60.0)


@pytest.mark.parametrize("part", ["EventLoop", "Thread"])
def test_a_server_that_cannot_start_leaves_nothing(monkeypatch, part):
    """A control server of which one part cannot be made leaves no descriptor and no directory."""

    def fail(*_, **__):
        raise RuntimeError("no more of these")

    if part == "EventLoop":
        monkeypatch.setattr(control, "EventLoop", fail)
    else:
        monkeypatch.setattr(control.threading.Thread, "start", fail)
    gc.collect()  # what earlier tests left is closed now, and not meanwhile
    before = sorted(os.listdir("/proc/self/fd"))
    # The error is kept: its traceback keeps what was not closed from the garbage collector.
    with pytest.raises(RuntimeError, match="no more of these") as _raised:
        control.ControlServer(lambda _: None)
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_stragglers_are_recorded(tmp_path, monkeypatch):
    """Each report with a straggler leaves an event with its ranks, scores and kind."""
    monkeypatch.setenv("NVRX_EVENT_DIR", str(tmp_path))
    monkeypatch.setenv("NVRX_CYCLE", "2")
    Detector.initialize(
        scores_to_compute="individual_perf_scores", cuda_profiling="off", control=False
    )
    for milliseconds in (1.0, 4.0):
        with Detector.detection_section("fw"):
            pass
        section = Detector.custom_sections["fw"]
        section.cpu_elapsed_times.clear()
        section.cpu_elapsed_times.append(milliseconds)
        report = Detector.generate_report()
    Detector._session._record(replace(report, gpu_relative_perf_scores={0: 0.5}))
    Detector.shutdown()
    (path,) = tmp_path.iterdir()
    stragglers = [event for event in read_events(path).events if event.kind == "straggler"]
    assert [(r.cycle, r.fields["ranks"], r.fields["reason"]) for r in stragglers] == [
        (2, "0", "gpu_relative")
    ]
