# SPDX-License-Identifier: Apache-2.0
"""The service over HTTP, as a process of its own."""

import contextlib
import http.client
import json
import os
import subprocess
import sys
import time
from urllib.parse import urlencode

import ports
import pytest
from attribution_running import OOM, running

from nvidia_resiliency_ext.services.attrsvc import Settings, parse_service_endpoint
from nvidia_resiliency_ext.services.attrsvc.limits import RateLimiter, parse_rate
from nvidia_resiliency_ext.services.attrsvc.server import main
from nvidia_resiliency_ext.shared_utils.errors import ConfigError
from nvidia_resiliency_ext.shared_utils.health_check import AttributionService
from nvidia_resiliency_ext.shared_utils.job_metadata import task_id_from_env

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

SEGFAULT = "rank 1: killed by SIGSEGV\n"


def wait_until(condition):
    """Wait for something that another process does."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    """One service on TCP for tests that change nothing of it."""
    root = tmp_path_factory.mktemp("logs")
    with ports.claimed() as port, running(root, f"http://127.0.0.1:{port}") as found:
        found.root = root
        yield found


def test_life_of_a_log(service):
    """Submitted, growing with a candidate, ended with a verdict; the same again changes nothing."""
    log = service.root / "life_cycle0.log"
    assert service.get(log)[0] == 404
    status, reply = service.post(log, job_id="life", cycle_id=0, analysis_intent="progressive")
    assert (status, reply["submitted"], reply["normalized_path"]) == (200, True, str(log))
    log.write_text(OOM)
    reply = service.get(log, wait="false")[1]
    assert reply["status"] == "in_flight"
    assert reply["candidate_recommendation"]["action"] == "STOP"
    fields = {"job_id": "life", "cycle_id": 0, "analysis_intent": "terminal"}
    started = time.monotonic()
    assert service.post(log, **fields, log_complete=True)[0] == 200
    reply = service.get(log)[1]
    assert time.monotonic() - started < 10
    assert (reply["status"], reply["recommendation"]["action"]) == ("completed", "STOP")
    assert reply["recommendation"]["reason"].startswith("gpu.oom")
    assert reply["attribution"]["schema"] == "nvrx_attribution.v1"
    assert reply["result"]["schema_version"] == "restart_agent_response.v1"
    assert service.post(log, **fields)[0] == 200
    assert service.get(log)[1] == reply
    jobs = service.request("GET", "/jobs")[1]["jobs"]
    assert [j["status"] for j in jobs if j["log_path"] == str(log)] == ["completed"]


def test_evidence_follows_the_log(service):
    """What launcher or scheduler say about the end counts as the log's last lines."""
    ended = {"analysis_intent": "terminal", "log_complete": True}
    for number, (said, code) in enumerate(
        [
            ("rank 1: killed by SIGSEGV", "host.segfault"),
            ("State=NODE_FAIL", "sched.node_fail"),
            ("State=CANCELLED ExitCode=0:15 NodeList=n1", "sched.cancelled"),
            ("State=TIMEOUT ExitCode=0:0 NodeList=n1", "sched.time_limit"),
            ("State=PREEMPTED ExitCode=0:0 NodeList=n1", "sched.preempted"),
            ("State=OUT_OF_MEMORY ExitCode=0:125 NodeList=n1", "host.oom"),
            ("State=FAILED ExitCode=0:11 NodeList=n1", "host.segfault"),
            ("State=FAILED ExitCode=0:9 NodeList=n1", "host.sigkill"),
            ("State=FAILED ExitCode=3:0 NodeList=n1", "host.exit_nonzero"),
        ]
    ):
        log = service.root / f"evidence{number}.log"
        log.write_text("0: step: 1 loss: 0.5\n1: step: 1 loss: 0.5")
        assert service.post(log, evidence=[said], **ended)[0] == 200
        verdict = service.get(log)[1]["attribution"]
        assert (verdict["reason_code"], verdict["first_fault"]["line"]) == (code, 3)
    for wrong in (["x" * 2001], ["x"] * 17, "text", [1]):
        assert service.post(log, evidence=wrong, **ended)[0] == 400


def test_bad_requests(service):
    """Each wrong request gets its status and error code, and none gets a server error."""
    inside = service.root / "bad.log"
    (service.root / "out").symlink_to("/etc/passwd")
    cases = [
        (service.post("relative"), 400, "invalid_path"),
        (service.post("/etc/passwd"), 403, "outside_root"),
        (service.post(service.root / "out"), 403, "outside_root"),
        (service.post(service.root / "no" / "dir.log"), 404, "not_found"),
        (service.post(inside, cycle_id="1"), 400, "invalid_parameter"),
        (service.post(inside, cycle_id=True), 400, "invalid_parameter"),
        (service.post(inside, analysis_intent="soon"), 400, "invalid_parameter"),
        (service.post(inside, user="a\nb"), 400, "invalid_parameter"),
        (service.request("POST", "/logs", b"{"), 400, "invalid_parameter"),
        (service.request("POST", "/logs", b"[" * 60000), 400, "invalid_parameter"),
        (service.request("POST", "/logs", b"x" * 70000), 413, "too_large"),
        (service.request("GET", "/logs"), 400, "invalid_parameter"),
        (service.get(inside, wl_restart=-1), 400, "invalid_parameter"),
        (service.get(inside), 404, "not_found"),
        (service.request("GET", "/none"), 404, "not_found"),
        (service.request("DELETE", "/logs"), 405, "method_not_allowed"),
        (service.request("GET", "/print?log_path=/etc/passwd"), 403, "outside_root"),
    ]
    for (status, reply), wanted, code in cases:
        assert (status, reply["error_code"]) == (wanted, code)
        assert set(reply) == {"error_code", "message", "details"}


def test_conflicting_submissions(service):
    """A path keeps its job and cycle, and a cycle of a job its path."""
    log, other = service.root / "one.log", service.root / "two.log"
    assert service.post(log, job_id="c", cycle_id=1)[0] == 200
    assert service.post(log, job_id="c", cycle_id=2)[0] == 400
    assert service.post(other, job_id="c", cycle_id=1)[0] == 400
    assert service.post(log, job_id="c", cycle_id=1)[0] == 200


def test_other_routes(service):
    """Preview, counts, indentation and the page are there; the page runs no foreign script."""
    log = service.root / "preview.log"
    log.write_text("a\x1b[31m" + "x" * 9000)
    status, text = service.request("GET", "/print?" + urlencode({"log_path": str(log)}))
    assert (status, len(text), "\x1b" in text) == (200, 4096, False)
    assert "jobs" in service.request("GET", "/stats?pretty")[1]
    assert service.request("GET", "/inflight")[1]["count"] >= 0
    status, page = service.request("GET", "/")
    assert (status, "innerHTML" in page, "<script>" in page) == (200, False, True)


def test_many_submissions(service):
    """A thousand submissions are accepted, and their logs answered for."""
    with contextlib.closing(http.client.HTTPConnection(*_address(service), timeout=30)) as client:
        for number in range(1000):
            body = json.dumps({"log_path": str(service.root / f"many{number}.log")})
            client.request("POST", "/logs", body, {"Content-Type": "application/json"})
            response = client.getresponse()
            response.read()
            assert response.status == 200
    (service.root / "many999.log").write_text(OOM)
    log = service.root / "many999.log"
    assert service.post(log, analysis_intent="terminal", log_complete=True)[0] == 200
    assert service.get(log)[1]["recommendation"]["action"] == "STOP"


def _address(service):
    where = parse_service_endpoint(service.endpoint)
    return where.host, where.port


def test_socket_token_and_limits(tmp_path, socket_folder):
    """On a Unix socket, too, a wrong token and too many requests are refused."""
    root = tmp_path / "logs"
    root.mkdir()
    token = tmp_path / "token"
    token.write_text("secret-token\n")
    token.chmod(0o600)
    path = socket_folder / "s"
    with running(root, f"unix://{path}", TOKEN_FILE=token, RATE_LIMIT_PREVIEW="2/hour") as service:
        assert path.stat().st_mode & 0o077 == 0
        assert service.request("GET", "/jobs")[0] == 401
        assert service.request("GET", "/jobs", Authorization="Bearer wrong")[0] == 401
        good = {"Authorization": "Bearer secret-token"}
        assert service.request("GET", "/jobs", **good)[0] == 200
        statuses = [service.request("GET", "/print?log_path=x", **good)[0] for _ in range(3)]
        assert statuses == [400, 400, 429]
    assert not path.exists()


def test_killed_service_knows_its_submissions(tmp_path):
    """After SIGKILL a new service answers for a log that was submitted before."""
    root = tmp_path / "logs"
    root.mkdir()
    log = root / "a.log"
    state = tmp_path / "state"
    with ports.claimed() as port:
        endpoint = f"127.0.0.1:{port}"
        with contextlib.suppress(AssertionError), running(root, endpoint, STATE_DIR=state) as first:
            assert first.post(log, job_id="k", cycle_id=0)[0] == 200
            first.process.kill()
            first.process.wait()
        log.write_text(OOM)
        with running(root, endpoint, STATE_DIR=state) as second:
            assert second.get(log)[1]["recommendation"]["action"] == "STOP"


def verdict_about(service, log):
    """Return the verdict about a log whose end was submitted."""
    reply = service.get(log)[1]
    assert reply["status"] == "completed", reply
    return reply["attribution"]


def test_launchers_of_an_array_share_a_service(tmp_path, monkeypatch, socket_folder):
    """Tasks that are jobs of their own get verdicts of their own, with own histories."""
    root = tmp_path / "logs"
    root.mkdir()
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "77")
    codes = {0: ("host.segfault", SEGFAULT), 1: ("gpu.oom", OOM)}
    with running(root, f"unix://{socket_folder}/s") as service, contextlib.ExitStack() as stack:
        for cycle in range(2):
            for task, (_, text) in codes.items():
                monkeypatch.setenv("SLURM_ARRAY_TASK_ID", str(task))
                log = root / f"task{task}_cycle{cycle}.log"
                log.write_text(text)
                name = task_id_from_env()
                client = AttributionService(service.endpoint, poll_interval_s=0.05, job_id=name)
                stack.callback(client.stop_poller)
                client.start_poller()
                client._submit_log(str(log), cycle)
                assert client.request_terminal_analysis()
                wait_until(lambda log=log: service.get(log, wait="false")[0] == 200)
        found = {
            (task, cycle): verdict_about(service, root / f"task{task}_cycle{cycle}.log")
            for cycle in range(2)
            for task in codes
        }
        jobs = {job["job_id"] for job in service.request("GET", "/jobs")[1]["jobs"]}
    assert jobs == {"77_0", "77_1"}
    for (task, cycle), verdict in found.items():
        assert verdict["reason_code"] == codes[task][0]
        assert verdict["retry"]["used"] == cycle


def test_cycle_that_ends_while_a_verdict_is_awaited_counts(tmp_path, monkeypatch, socket_folder):
    """A crash loop faster than its verdicts: each is made, and is in the next cycle's history."""
    root = tmp_path / "logs"
    root.mkdir()
    monkeypatch.setenv("SLURM_JOB_ID", "5")
    quiet = {"RESTART_AGENT_LOG_QUIET_SECONDS": "2"}
    with running(root, f"unix://{socket_folder}/s", **quiet) as service:
        client = AttributionService(service.endpoint, log_complete=False, poll_interval_s=0.05)
        client.start_poller()
        logs = [root / f"job_cycle{cycle}.log" for cycle in range(3)]
        for cycle, log in enumerate(logs[:2]):
            log.write_text("0: step: 1 loss: 0.5\n")
            client._submit_log(str(log), cycle)
            asked = client.request_terminal_analysis(("rank 1: killed by SIGSEGV",))
            assert asked == (cycle == 0)
            wait_until(lambda log=log: service.get(log, wait="false")[0] == 200)
        first, second = (verdict_about(service, log) for log in logs[:2])
        assert (first["reason_code"], second["reason_code"]) == ("host.segfault", "host.segfault")
        logs[2].write_text("0: step: 1 loss: 0.5\n1: killed by SIGSEGV\n" + SEGFAULT)
        ended = {"job_id": "5", "cycle_id": 2, "analysis_intent": "terminal"}
        assert service.post(logs[2], **ended, log_complete=True)[0] == 200
        attempts = verdict_about(service, logs[2])["retry"]["used"]
        client.stop_poller()
    assert attempts == 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "ALLOWED_ROOT"),
        ({"ALLOWED_ROOT": "relative"}, "absolute"),
        ({"ALLOWED_ROOT": "/x", "PORT": "0"}, "PORT"),
        ({"ALLOWED_ROOT": "/x", "ENDPOINT": "http://0.0.0.0:80"}, "TOKEN_FILE"),
        ({"ALLOWED_ROOT": "/x", "ENDPOINT": "nonsense"}, "endpoint"),
        ({"ALLOWED_ROOT": "/x", "RATE_LIMIT_SUBMIT": "many"}, "rate"),
        ({"ALLOWED_ROOT": "/x", "COMPUTE_TIMEOUT": "nan"}, "seconds"),
        ({"ALLOWED_ROOT": "/x", "ANALYSIS_BACKEND": "other"}, "lib, mcp"),
        ({"ALLOWED_ROOT": "/x", "EXPORT_URL": "ftp://x"}, "export"),
        ({"ALLOWED_ROOT": "/x", "LLM_TEMPERATURE": "warm"}, "LLM_TEMPERATURE"),
        ({"ALLOWED_ROOT": "/x", "LLM_BASE_URL": "http://h/v1"}, "NVRX_LLM_MODEL"),
        ({"ALLOWED_ROOT": "/x", "RESTART_AGENT_CONFIG": "/no/agent.json"}, "/no/agent.json"),
        ({"ALLOWED_ROOT": "/x", "RESTART_AGENT_PROGRESSIVE_ENABLED": "off?"}, "must be 1 or 0"),
    ],
)
def test_wrong_settings(settings, message):
    """A wrong setting is one line that names it."""
    environ = {f"NVRX_ATTRSVC_{name}": value for name, value in settings.items()}
    with pytest.raises(ConfigError, match=message) as caught:
        Settings.from_environ(environ)
    assert "\n" not in str(caught.value)


def test_endpoints_and_rates():
    """Endpoints and rates have the documented forms; permits come back evenly."""
    assert str(parse_service_endpoint("/run/x")) == "unix:///run/x"
    assert str(parse_service_endpoint("http://[::1]:80/")) == "http://[::1]:80"
    for wrong in ("x", ":80", "http://h:99999", "https://h:1", "unix://relative", "h:1/path"):
        with pytest.raises(ConfigError):
            parse_service_endpoint(wrong)
    limiter = RateLimiter(parse_rate("2/minute"))
    assert [limiter.wait_s("a", 0.0) for _ in range(3)] == [0.0, 0.0, 30.0]
    assert limiter.wait_s("b", 0.0) == 0.0
    assert limiter.wait_s("a", 31.0) == 0.0
    insecure = {"NVRX_ATTRSVC_ALLOWED_ROOT": "/x", "NVRX_ATTRSVC_HOST": "0.0.0.0"}
    assert Settings.from_environ({**insecure, "NVRX_ATTRSVC_INSECURE": "1"}).port == 8000


def test_arguments_are_refused_with_what_to_do(capsys):
    """Who gives a flag is told that settings are environment variables, with exit code 2."""
    with pytest.raises(SystemExit, match="2"):
        main(["--port", "8000"])
    assert "--port: it takes no arguments; set environment variables" in capsys.readouterr().err


def test_address_in_use(socket_folder):
    """An address that cannot be had ends the program with one line and exit code 2."""
    path = socket_folder / "file"
    path.write_text("keep")
    environ = {**os.environ, "NVRX_ATTRSVC_ALLOWED_ROOT": str(socket_folder)}
    argv = [sys.executable, "-m", "nvidia_resiliency_ext.services.attrsvc"]
    environ["NVRX_ATTRSVC_ENDPOINT"] = f"unix://{path}"
    found = subprocess.run(
        argv, env=environ, capture_output=True, text=True, timeout=50, check=False
    )
    assert (found.returncode, found.stderr.count("\n")) == (2, 1)
    assert "not a socket" in found.stderr
    assert path.read_text() == "keep"
