# SPDX-License-Identifier: Apache-2.0
"""The Slurm monitor with programs named like Slurm's and the real attribution service."""

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time

import ports
import pytest
from attribution_running import OOM, running
from attribution_slurm import FakeSlurm, slurm_job

from nvidia_resiliency_ext.attribution import engine
from nvidia_resiliency_ext.services.smonsvc import JobState, SlurmJobMonitor
from nvidia_resiliency_ext.services.smonsvc.models import MonitoredJob, MonitorState, SlurmJob
from nvidia_resiliency_ext.services.smonsvc.slurm import JobRecord, SlurmClient, expand_path
from nvidia_resiliency_ext.services.smonsvc.status_server import StatusServer
from nvidia_resiliency_ext.shared_utils.errors import ConfigError

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

pytestmark = pytest.mark.slow

LIMIT_S = 60.0
PROGRAM = [sys.executable, "-m", "nvidia_resiliency_ext.services.smonsvc"]
STEPS = "0: step: 1 loss: 0.5\n0: step: 2 loss: 0.5\n"


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """Slurm's programs, first on PATH."""
    made = FakeSlurm(tmp_path / "slurm")
    monkeypatch.setenv("PATH", made.path)
    return made


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    """A real service at a Unix socket, that gives verdicts after 0.5 s of silence."""
    root = tmp_path_factory.mktemp("logs")
    with (
        tempfile.TemporaryDirectory(prefix="nvrx-", dir="/tmp") as folder,
        running(root, f"unix://{folder}/s", RESTART_AGENT_LOG_QUIET_SECONDS="0.5") as found,
    ):
        found.root = root
        yield found


@pytest.fixture
def monitor_of(service):
    """Return a function that makes monitors; these are polled by the test."""
    with contextlib.ExitStack() as stack:

        def make(endpoint=service.endpoint, **more):
            made = SlurmJobMonitor(endpoint, partitions=[], **more)
            made._client._gap_s = 0.0
            return stack.enter_context(contextlib.closing(made))

        yield make


def job(monitor, job_id):
    """Return what a monitor knows of a job."""
    return monitor.state.jobs[job_id]


def test_jobs_from_queue_to_verdict(slurm, service, monitor_of, caplog):
    """Each job's log is submitted while it runs; its end, in Slurm's words, gives the verdict."""
    root = service.root
    logs = {"1": STEPS, "2": STEPS, "3": OOM, "4": STEPS}
    for job_id, text in logs.items():
        (root / f"train-{job_id}.out").write_text(text)
    jobs = [slurm_job(job_id, root / "train-%j.out") for job_id in logs]
    slurm.all_say(*jobs)
    monitor = monitor_of()
    monitor.poll_once()
    assert all(job(monitor, job_id).is_submitted for job_id in logs)
    assert job(monitor, "1").log_path == str(root / "train-1.out")
    assert (len(slurm.calls("squeue")), len(slurm.calls("scontrol"))) == (1, 1)
    slurm.says("squeue", jobs[3])
    slurm.says("scontrol", {**jobs[0], "state": "TIMEOUT"}, jobs[3])
    gone = [{**jobs[1], "state": "NODE_FAIL", "failed": "n2"}, {**jobs[2], "state": "FAILED"}]
    slurm.says("sacct", *gone, is_old=True)
    with caplog.at_level("INFO", "nvrx"):
        monitor.poll_once()
    found = {job_id: (job(monitor, job_id).action, job(monitor, job_id).is_done) for job_id in logs}
    assert found == {
        "1": ("STOP", True), "2": ("RESTART", True), "3": ("STOP", True), "4": ("", False),
    }  # fmt: skip
    reasons = [job(monitor, job_id).reason.partition(":")[0] for job_id in "123"]
    assert reasons == ["sched.time_limit", "sched.node_fail", "gpu.oom"]
    assert "job 2 (ada, train, NODE_FAIL): RESTART: sched.node_fail" in caplog.text
    verdict = service.get(root / "train-2.out", wait="false")[1]["attribution"]
    assert verdict["suspect_nodes"] == ["n2"]
    assert (len(slurm.calls("squeue")), len(slurm.calls("scontrol"))) == (2, 2)


def test_jobs_outlive_the_monitor(slurm, service, monitor_of, tmp_path):
    """A monitor that is started again goes on where the other was; nothing is asked for twice."""
    state = str(tmp_path / "state.jsonl")
    log = service.root / "again.out"
    log.write_text(OOM)
    slurm.all_say(slurm_job("7", log))
    first = monitor_of(state_file=state)
    first.poll_once()
    first.close()
    slurm.all_say(slurm_job("7", log, "FAILED"))
    second = monitor_of(state_file=state)
    assert job(second, "7").is_submitted
    second.poll_once()
    assert job(second, "7").action == "STOP"
    second.close()
    third = monitor_of(state_file=state)
    third.poll_once()
    assert (job(third, "7").action, third.state.counts["submitted"]) == ("STOP", 0)
    third.close()
    with open(state, "ab") as file:
        file.write(
            b'{"job_id": "8", "user": "a"\n{"job_id": "--x", "user": "a", "name": "b"}\n[]\n'
        )
    fourth = monitor_of(state_file=state)
    assert list(fourth.state.jobs) == ["7"]


def test_a_service_that_is_away_loses_no_job(slurm, monitor_of, tmp_path, socket_folder):
    """Jobs that end meanwhile are submitted when it is back."""
    root = tmp_path / "logs"
    root.mkdir()
    (root / "a.out").write_text(OOM)
    path = f"unix://{socket_folder}/s"
    slurm.all_say(slurm_job("5", root / "a.out"))
    monitor = monitor_of(path)
    monitor.poll_once()
    assert not job(monitor, "5").is_submitted
    assert monitor.state.problems() == ["the attribution service does not answer"]
    slurm.all_say(slurm_job("5", root / "a.out", "FAILED"))
    monitor.poll_once()
    assert job(monitor, "5").has_ended
    with running(root, path, RESTART_AGENT_LOG_QUIET_SECONDS="0.5"):
        monitor.poll_once()
    assert (job(monitor, "5").action, monitor.state.problems()) == ("STOP", [])


STOLEN = "[rank1]: RuntimeError: CUDA error: an illegal memory access was encountered\n"


def attempts(state):
    """Return the attempts that a service has kept, as (requeues, fingerprint, node)."""
    lines = (state / "history.jsonl").read_text().splitlines()
    return [(a["attempt_index"], a["fingerprint"], a["node"]) for a in map(json.loads, lines)]


@pytest.mark.parametrize("is_seen", [True, False], ids=["seen", "between two looks"])
def test_each_run_of_a_requeued_job_counts(slurm, monitor_of, tmp_path, is_seen, socket_folder):
    """A fault that comes back in the next run is a repeat, whether or not its end was looked at."""
    root, state = tmp_path / "logs", tmp_path / "state"
    root.mkdir()
    log = root / "requeued.out"
    kept = str(tmp_path / "monitor.jsonl")
    first = slurm_job("31", log)
    second = {**first, "restarts": 1, "start": "2026-11-20T11:00:00"}
    with running(
        root, f"unix://{socket_folder}/s", STATE_DIR=state, RESTART_AGENT_LOG_QUIET_SECONDS="0.5"
    ) as service:
        monitor = monitor_of(service.endpoint, state_file=kept)
        slurm.all_say(first)
        log.write_text(STEPS + STOLEN)
        monitor.poll_once()
        if is_seen:
            waits = {**first, "state": "PENDING", "restarts": 1}
            slurm.all_say(waits)
            slurm.says("sacct", {**first, "state": "REQUEUED"})
            monitor.poll_once()
            assert (job(monitor, "31").action, job(monitor, "31").state) == ("RESTART", "REQUEUED")
        slurm.all_say(second)
        slurm.says("sacct", {**first, "state": "REQUEUED"}, second)
        monitor.poll_once()
        assert (job(monitor, "31").action == "RESTART") is not is_seen
        monitor.poll_once()
        assert job(monitor, "31").attempt_index == 1
        with log.open("a") as file:
            file.write(STEPS + STOLEN)
        monitor.close()
        monitor = monitor_of(service.endpoint, state_file=kept)
        slurm.all_say({**second, "state": "FAILED"})
        monitor.poll_once()
        assert job(monitor, "31").action == "STOP"
        assert "retry_budget_exhausted" in job(monitor, "31").reason
    found = attempts(state)
    assert [index for index, _, _ in found] == [0, 1]
    assert found[0][1] == found[1][1] != ""


@pytest.mark.parametrize("ends", ["FAILED", "CANCELLED"])
def test_a_run_between_two_looks_counts(slurm, monitor_of, tmp_path, ends, socket_folder):
    """A requeued job that fails again before the next look is evaluated; one that is cancelled
    while it waits has no further run.
    """
    root, state = tmp_path / "logs", tmp_path / "state"
    root.mkdir()
    log = root / "short.out"
    first = slurm_job("34", log)
    waits = {**first, "state": "PENDING", "restarts": 1}
    with running(
        root, f"unix://{socket_folder}/s", STATE_DIR=state, RESTART_AGENT_LOG_QUIET_SECONDS="0.5"
    ) as service:
        monitor = monitor_of(service.endpoint)
        slurm.all_say(first)
        log.write_text(STEPS + STOLEN)
        monitor.poll_once()
        slurm.all_say(waits)
        monitor.poll_once()
        monitor.poll_once()
        assert (job(monitor, "34").action, job(monitor, "34").attempt_index) == ("RESTART", 0)
        if ends == "FAILED":
            with log.open("a") as file:
                file.write(STEPS + STOLEN)
        slurm.all_say({**waits, "state": ends, "start": "2026-11-20T11:00:00"})
        monitor.poll_once()
        found = job(monitor, "34")
        expected = ("STOP", 1) if ends == "FAILED" else ("RESTART", 0)
        assert (found.action, found.attempt_index) == expected
        counts = dict(monitor.state.counts)
        monitor.poll_once()
        assert monitor.state.counts["submitted"] == counts["submitted"]


def test_end_of_a_run_before_a_requeue_is_evidence(slurm, monitor_of, tmp_path, socket_folder):
    """A node that was lost in a run that nobody saw end is known by Slurm's accounting."""
    root, state = tmp_path / "logs", tmp_path / "state"
    root.mkdir()
    log = root / "lost.out"
    log.write_text(STEPS)
    first = slurm_job("32", log)
    second = {**first, "restarts": 1, "start": "2026-11-20T11:00:00"}
    endpoint = f"unix://{socket_folder}/s"
    monitor = monitor_of(endpoint)
    slurm.all_say(first)
    monitor.poll_once()
    slurm.all_say(second)
    slurm.says("sacct", {**first, "state": "NODE_FAIL", "failed": "n2"}, second)
    monitor.poll_once()  # the service is away; what Slurm said is kept
    quiet = {"RESTART_AGENT_LOG_QUIET_SECONDS": "0.5"}
    with running(root, endpoint, STATE_DIR=state, **quiet):
        monitor.poll_once()
        assert (job(monitor, "32").action, job(monitor, "32").attempt_index) == ("RESTART", 0)
        monitor.poll_once()
        assert (job(monitor, "32").is_submitted, job(monitor, "32").attempt_index) == (True, 1)
    assert [(index, node) for index, _, node in attempts(state)] == [(0, "n2")]


def test_suspended_jobs_are_no_new_run(slurm, service, monitor_of):
    """A job that leaves the queue without an end and without a requeue is waited for."""
    log = service.root / "suspended.out"
    log.write_text(STEPS)
    slurm.all_say(slurm_job("33", log))
    monitor = monitor_of()
    monitor.poll_once()
    slurm.all_say(slurm_job("33", log, "SUSPENDED"))
    monitor.poll_once()
    assert not job(monitor, "33").has_ended
    slurm.all_say(slurm_job("33", log))
    monitor.poll_once()
    assert (job(monitor, "33").has_ended, monitor.state.counts["submitted"]) == (False, 1)


def test_a_token_that_is_replaced_costs_no_verdict(
    slurm, monitor_of, tmp_path, monkeypatch, socket_folder
):
    """While the service refuses the monitor's old token its tries for a result do not run out."""
    root = tmp_path / "logs"
    root.mkdir()
    (root / "a.out").write_text(OOM)
    tokens = [tmp_path / name for name in ("service", "monitor")]
    for token in tokens:
        token.touch(0o600)
        token.write_text("first")
    monkeypatch.setattr("nvidia_resiliency_ext.services.smonsvc.monitor._RESULT_PAUSE_S", 0.01)
    with running(root, f"unix://{socket_folder}/s", TOKEN_FILE=tokens[0]) as service:
        monitor = monitor_of(service.endpoint, token_file=str(tokens[1]))
        slurm.all_say(slurm_job("34", root / "a.out"))
        monitor.poll_once()
        assert job(monitor, "34").is_submitted
        job(monitor, "34").is_terminal_submitted = job(monitor, "34").has_ended = True
        tokens[0].write_text("second")
        slurm.all_say(slurm_job("34", root / "a.out", "FAILED"))
        monitor.poll_once()
        assert (job(monitor, "34").tries, job(monitor, "34").is_done) == (0, False)
        job(monitor, "34").looks = 478
        monitor.poll_once()
        assert (job(monitor, "34").looks, job(monitor, "34").is_done) == (479, False)
        lasting = monitor_of(service.endpoint, token_file=str(tokens[1]))
        lasting.state.jobs["35"] = MonitoredJob("35", "u", "n", str(root / "a.out"))
        lasting.state.jobs["35"].is_terminal_submitted = lasting.state.jobs["35"].has_ended = True
        lasting.state.jobs["35"].looks = 479
        lasting.poll_once()
        assert (job(lasting, "35").is_done, "480 looks" in job(lasting, "35").problem) == (
            True,
            True,
        )
        tokens[1].write_text("second")
        job(monitor, "34").is_terminal_submitted = False
        monkeypatch.undo()
        monitor.poll_once()
        assert job(monitor, "34").action == "STOP"


def test_tries_for_a_result_outlast_the_waits_of_the_service(slurm, monkeypatch):
    """Ten tries last longer than a service waits for the end of a log that still grows."""
    asked, pauses = [], []

    class Client:
        is_refused = False

        def get(self, query):
            asked.append(query)
            return 200, {"status": "in_flight"}

        def close(self):
            pass

    with contextlib.closing(SlurmJobMonitor("unix:///none", partitions=[])) as monitor:
        monitor._client.close()
        monitor._client = Client()
        monkeypatch.setattr(monitor._ended, "wait", pauses.append)
        monitor.state.jobs["36"] = MonitoredJob("36", "u", "n", "/l", is_terminal_submitted=True)
        monitor._fetch()
        assert (len(asked), job(monitor, "36").problem) == (10, "the service has no result")
    assert 120 <= sum(pauses) <= 180
    assert pauses == sorted(pauses)


def test_two_monitors_share_no_state(slurm, service, monitor_of, tmp_path):
    """A second monitor with the state file of a running one is refused."""
    state = str(tmp_path / "state.jsonl")
    first = monitor_of(state_file=state)
    with pytest.raises(ConfigError, match="another process uses"):
        monitor_of(state_file=state)
    first.close()
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigError):
        monitor_of(state_file=state, port=taken.getsockname()[1])
    monitor_of(state_file=state)


def test_slurm_that_fails_or_hangs(slurm, service, monitor_of):
    """A failing or hanging program costs a line and its time limit; jobs stay as they were."""
    log = service.root / "fails.out"
    log.write_text(STEPS)
    slurm.all_say(slurm_job("9", log))
    monitor = monitor_of(timeout=10)
    monitor.poll_once()
    slurm.says("squeue", error="slurm_load_jobs error: Unable to contact slurm controller")
    monitor.poll_once()
    assert not job(monitor, "9").has_ended
    assert monitor.state.problems() == ["squeue failed 1 times of 2"]
    slurm.says("squeue")
    slurm.says("scontrol", error="down")
    slurm.says("sacct", error="accounting storage is disabled")
    monitor.poll_once()
    assert (job(monitor, "9").has_ended, job(monitor, "9").misses) == (False, 0)
    slurm.says("scontrol", takes_s=600)
    monitor._slurm._timeout_s = 0.5
    monitor.poll_once()
    assert not job(monitor, "9").has_ended
    # Slurm that answers and does not know the job has forgotten it: after three looks it is over.
    slurm.says("scontrol")
    monitor._slurm._timeout_s = LIMIT_S
    for _ in range(3):
        monitor.poll_once()
    assert (job(monitor, "9").state, job(monitor, "9").is_done) == ("UNKNOWN", True)


def test_hostile_jobs(slurm, service, monitor_of):
    """A job's name forges no field, and a path outside of the root is refused once."""
    inside = service.root / "own.out"
    inside.write_text(STEPS)
    forged = "x\n   StdOut=/etc/passwd|RUNNING|root JobState=FAILED"
    slurm.all_say(
        slurm_job("11", inside, name=forged.replace("\n", " ")),
        slurm_job("12", "/etc/passwd"),
        slurm_job("13", "(null)"),
    )
    monitor = monitor_of(job_pattern="x|train")
    monitor.poll_once()
    assert job(monitor, "11").log_path == str(inside)
    assert "status 403" in job(monitor, "12").problem
    assert job(monitor, "13").log_path == ""
    monitor.poll_once()
    assert monitor.state.counts["refused"] == 1


def test_finished_jobs_are_forgotten():
    """The newest 1000 finished jobs are kept, and every job that is not."""
    state = MonitorState()
    for number in range(1500):
        state.jobs[str(number)] = MonitoredJob(str(number), "u", "n", is_done=number != 3)
    state.forget_old()
    assert (len(state.jobs), "3" in state.jobs, "499" in state.jobs) == (1001, True, False)


@pytest.mark.parametrize(
    ("text", "state"),
    [
        ("R", JobState.RUNNING), ("CG", JobState.COMPLETING),
        ("OUT_OF_ME+", JobState.OUT_OF_MEMORY),
        ("CANCELLED by 1001", JobState.CANCELLED), ("NF", JobState.NODE_FAIL),
        ("node_fail", JobState.NODE_FAIL), ("COMPL+", JobState.UNKNOWN), ("", JobState.UNKNOWN),
        ("nonsense", JobState.UNKNOWN), ("TIMEOUT", JobState.TIMEOUT),
        ("BF", JobState.BOOT_FAIL), ("DL", JobState.DEADLINE),
        ("RECONFIG_FAIL", JobState.RECONFIG_FAIL),
    ],
)  # fmt: skip
def test_states(text, state):
    """Long, short and cut names of states are understood; what fits two is unknown."""
    assert JobState.from_str(text) is state


@pytest.mark.parametrize(
    ("state", "exit_code", "code", "action"),
    [
        ("BOOT_FAIL", "0:0", "sched.node_fail", "RESTART"),
        ("CANCELLED by 1001", "0:15", "sched.cancelled", "STOP"),
        ("DEADLINE", "0:15", "sched.time_limit", "STOP"),
        ("FAILED", "1:0", "host.exit_nonzero", "RESTART"),
        ("LAUNCH_FAILED", "0:0", "sched.node_fail", "RESTART"),
        ("NODE_FAIL", "0:0", "sched.node_fail", "RESTART"),
        ("OUT_OF_MEMORY", "0:125", "host.oom", "RESTART"),
        ("PREEMPTED", "0:15", "sched.preempted", "RESTART"),
        ("RECONFIG_FAIL", "0:0", "sched.node_fail", "RESTART"),
        ("REVOKED", "0:0", "sched.cancelled", "STOP"),
        ("TIMEOUT", "0:15", "sched.time_limit", "STOP"),
    ],
)
def test_each_end_that_slurm_knows_has_a_reason(state, exit_code, code, action):
    """What Slurm alone says of a job's end is enough for its reason, after a log of good steps."""
    record = JobRecord(JobState.from_str(state), exit_code=exit_code, nodes="n[1-2]")
    assert record.state.is_terminal
    scanner = engine.LogScanner()
    scanner.feed((STEPS + "\n".join(record.evidence()) + "\n").encode())
    found = scanner.finish()
    assert (found.reason_code, found.action) == (code, action)


def test_paths():
    """Patterns of output files are replaced as Slurm does it."""
    member = SlurmJob("45", JobState.RUNNING, "ada", "p", "gpu[07-09],n1", "tr", "42", "3")
    alone = SlurmJob("42", JobState.RUNNING, "ada", "p", "n1.site", "tr")
    assert expand_path("/l/%u/%x-%A_%a-%j.%N", member) == "/l/ada/tr-42_3-45.gpu07"
    assert expand_path("/l/%5j-%A-%n-%t.%N%%", alone) == "/l/00042-42-0-0.n1%"


def test_status_server(tmp_path):
    """Counts, jobs and health are shown; others are asked for a token; nobody listens openly."""
    token = tmp_path / "token"
    token.write_text("t0ken\n")
    token.chmod(0o600)
    state = MonitorState()
    state.jobs["1"] = MonitoredJob("1", "ada", "train")
    with contextlib.closing(StatusServer(state, 0, token_file=str(token))) as server:

        def get(path, **headers):
            with contextlib.closing(http.client.HTTPConnection("127.0.0.1", server.port)) as client:
                client.request("GET", path, headers=headers)
                reply = client.getresponse()
                return reply.status, json.loads(reply.read())

        good = {"Authorization": "Bearer t0ken"}
        assert get("/jobs")[0] == 401
        assert get("/jobs", **good)[1]["jobs"][0]["user"] == "ada"
        assert get("/", **good)[1]["counts"] == {"jobs": 1, "open": 1}
        assert get("/none", **good)[0] == 404
        assert get("/healthz") == (200, {"status": "ok", "issues": []})
        state.counts.update(squeue=4, squeue_failed=2)
        assert get("/healthz")[0] == 503
    with pytest.raises(ConfigError, match="NVRX_SMONSVC_TOKEN_FILE"):
        StatusServer(state, 0, "0.0.0.0")


@pytest.mark.parametrize(
    ("arguments", "environ", "said"),
    [
        ([], {}, "--attrsvc-endpoint is missing"),
        (["--attrsvc-endpoint", "nonsense"], {}, "is no service"),
        (["--attrsvc-endpoint", "unix:///s", "--interval", "0"], {}, "--interval '0'"),
        (["--attrsvc-endpoint", "unix:///s", "--port", "70000"], {}, "--port"),
        (["--attrsvc-endpoint", "unix:///s", "--job-pattern", "("], {}, "no regular expression"),
        (
            ["--attrsvc-endpoint", "unix:///s", "--state-file", "/no/such/f"],
            {},
            "No such file or directory",
        ),
        (["--attrsvc-endpoint", "unix:///s", "--port", "1", "--host", "0.0.0.0"], {}, "TOKEN_FILE"),
        (
            [],
            {"NVRX_ATTRSVC_ENDPOINT": "unix:///s", "NVRX_SMONSVC_TIMEOUT": "x"},
            "SMONSVC_TIMEOUT",
        ),
        ([], {"NVRX_ATTRSVC_ENDPOINT": "unix:///s", "NVRX_ATTRSVC_TOKEN_FILE": "/no"}, "/no"),
        ([], {"NVRX_ATTRSVC_ENDPOINT": "unix:///s", "PATH": "/nowhere"}, "squeue is not on PATH"),
    ],
)
def test_bad_input_is_one_line(slurm, arguments, environ, said):
    """Each mistake is one line that names it, and exit code 2."""
    environ = {**os.environ, **environ}
    done = subprocess.run(
        [*PROGRAM, *arguments], env=environ, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert said in done.stderr


def test_the_program(slurm, service, tmp_path):
    """It shows a verdict where jobs are shown, ends at SIGTERM, and helps without torch."""
    log = service.root / "program.out"
    log.write_text(OOM)
    slurm.says("scontrol", slurm_job("21", log, "FAILED"))
    slurm.says("squeue")
    state = tmp_path / "state"
    MonitorState(jobs={"21": MonitoredJob("21", "ada", "train", str(log))}).save(str(state))
    with ports.claimed() as port:
        argv = [*PROGRAM, "--attrsvc-endpoint", service.endpoint, "--port", str(port)]
        with subprocess.Popen([*argv, "--state-file", str(state)]) as process:
            try:
                deadline = time.monotonic() + LIMIT_S
                actions = []
                while actions != ["STOP"]:
                    assert time.monotonic() < deadline
                    with contextlib.suppress(OSError):
                        client = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
                        client.request("GET", "/jobs")
                        jobs = json.loads(client.getresponse().read())["jobs"]
                        actions = [found["action"] for found in jobs if found["action"]]
                        client.close()
                    time.sleep(0.05)
                process.send_signal(signal.SIGTERM)
                assert process.wait(LIMIT_S) == 0
            finally:
                process.kill()
    code = "import sys; from nvidia_resiliency_ext.services.smonsvc import main\n"
    code += "try: main(['--help'])\nfinally: print(*{'torch', 'fastapi'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert "NVRX_SMONSVC_INTERVAL" in done.stdout
    assert done.stdout.splitlines()[-1] == ""


def test_other_users_variables_change_nothing(slurm, monkeypatch):
    """A user's SQUEUE_ variables do not filter what the monitor sees."""
    monkeypatch.setenv("SQUEUE_USERS", "nobody")
    slurm.all_say(slurm_job("1", "/x"))
    client = SlurmClient(LIMIT_S, "ada", ["batch", "long"])
    assert [found.job_id for found in client.queue()] == ["1"]
    assert slurm.calls("squeue")[0][-2:] == ["--user=ada", "--partition=batch,long"]
