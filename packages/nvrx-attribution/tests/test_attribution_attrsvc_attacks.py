# SPDX-License-Identifier: Apache-2.0
"""The service under garbage, links, crowds, SIGKILL and full disks; and its page in a browser."""

import contextlib
import http.client
import json
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import ports
import pytest
from attribution_running import OOM, running
from browser import NAMES, Browser, find_browser

from nvidia_resiliency_ext.attribution.trace_analyzer.fr_support import extract_fr_dump_path

pytestmark = pytest.mark.slow

fastapi = pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

ENDED = {"analysis_intent": "terminal", "log_complete": True}
LIMIT_S = 60.0


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    """One service on TCP that refuses nobody for asking often."""
    root = tmp_path_factory.mktemp("logs")
    limits = {f"RATE_LIMIT_{kind}": "1000000/second" for kind in ("SUBMIT", "ANALYZE", "PREVIEW")}
    short = {"RESTART_AGENT_LOG_QUIET_SECONDS": "0.1"}
    with ports.claimed() as port, running(root, f"http://127.0.0.1:{port}", **limits, **short) as s:
        s.root = root
        yield s


@pytest.mark.parametrize("mode", ["positive", "negative"])
def test_garbage_is_answered(service, mode):
    """Whatever fits or breaks our own OpenAPI gets JSON or text, and never a server error."""
    schemathesis = pytest.importorskip("schemathesis")
    hypothesis = pytest.importorskip("hypothesis")
    described = service.request("GET", "/openapi.json")[1]
    schema = schemathesis.openapi.from_dict(described)
    generation = schemathesis.GenerationMode(mode)
    settings = hypothesis.settings(
        max_examples=8,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    tried = []
    for found in schema.get_all_operations():
        operation = found.ok()
        strategy = operation.as_strategy(generation_mode=generation)

        @settings
        @hypothesis.given(case=strategy)
        def send(case):
            reply = case.call(base_url=service.endpoint, timeout=LIMIT_S)
            assert reply.status_code < 500, reply.text
            tried.append((case.method, case.path, reply.status_code))
            if reply.status_code >= 400 and "json" in reply.headers["content-type"]:
                assert set(reply.json()) == {"error_code", "message", "details"}

        # An operation without parameters has nothing that could be wrong.
        with contextlib.suppress(hypothesis.errors.Unsatisfiable):
            send()
    assert {method for method, _, _ in tried} == {"GET", "POST"}
    assert service.request("GET", "/healthz")[0] == 200


def test_links_out_of_the_root(service, tmp_path):
    """A folder or file that becomes a link to elsewhere after it was submitted is not read."""
    secret = tmp_path / "secret.log"
    secret.write_text(OOM + "the secret word\n")
    folder = service.root / "job"
    folder.mkdir()
    log = folder / "a.log"
    assert service.post(log, analysis_intent="progressive")[0] == 200
    log.symlink_to(secret)
    status, reply = service.get(log)
    assert (status, reply["error_code"]) == (403, "outside_root")
    (service.root / "away").symlink_to(tmp_path)
    assert service.post(service.root / "away" / "secret.log")[0] == 403
    later = service.root / "later"
    later.mkdir()
    assert service.post(later / "secret.log")[0] == 200
    later.rmdir()
    later.symlink_to(tmp_path)
    status, reply = service.get(later / "secret.log")
    assert status == 403
    assert "secret word" not in json.dumps(service.request("GET", "/jobs")[1])
    for path in (f"{service.root}/../{tmp_path.name}/secret.log", f"{service.root}/a\x00b", "//x"):
        assert service.post(path)[0] in {400, 403, 404}
    os.mkfifo(service.root / "pipe.log")
    assert service.post(service.root / "pipe.log", **ENDED)[0] == 400


@pytest.mark.parametrize("change", ["renamed", "truncated and regrown"])
def test_log_that_is_rotated_while_it_is_read(service, change):
    """The verdict is about the log that has the name at the end, not about a file moved away."""
    log = service.root / f"{change.partition(' ')[0]}.log"
    log.write_text("step: 1 loss: 0.5\n")
    assert service.post(log, analysis_intent="progressive")[0] == 200
    assert service.get(log, wait="false")[1]["status"] == "in_flight"
    if change == "renamed":
        log.rename(f"{log}.1")
    log.write_text("step: 2 loss: 0.5\nstep: 3 loss: 0.5\n[rank3]: " + OOM)
    reply = service.get(log, wait="false")[1]
    assert reply["candidate_recommendation"]["reason"].startswith("gpu.oom")
    assert service.post(log, **ENDED)[0] == 200
    found = service.get(log)[1]["attribution"]
    assert (found["reason_code"], found["progress"]["last_step"]) == ("gpu.oom", 3)


def test_body_that_does_not_come(service):
    """A client that announces a body and sends none is answered and let go."""
    host, port = service.endpoint.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=LIMIT_S) as client:
        client.sendall(b"POST /logs HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        assert client.recv(4096).startswith(b"HTTP/1.1 408 ")


@pytest.fixture
def many_descriptors():
    """Let this process have a thousand of them, if the system does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(1000, hard)), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("many_descriptors")
@pytest.mark.parametrize("said", [b"", b"GET /healthz HTTP/1.1\r\nHost: "])
def test_connections_that_ask_nothing(tmp_path, said):
    """More connections than descriptors that ask nothing, or half of it, keep no request out."""
    log = tmp_path / "a.log"
    log.write_text(OOM)
    with (
        ports.claimed() as port,
        running(tmp_path, f"127.0.0.1:{port}") as service,
        contextlib.ExitStack() as held,
    ):
        resource.prlimit(service.process.pid, resource.RLIMIT_NOFILE, (512, 512))
        asked = time.monotonic()
        for _ in range(800):
            client = held.enter_context(socket.create_connection(("127.0.0.1", port), LIMIT_S))
            client.sendall(said)
        assert service.post(log, **ENDED)[0] == 200
        assert service.get(log)[1]["recommendation"]["action"] == "STOP"
        assert time.monotonic() - asked < 30
        assert client.recv(1) == b""  # the last of them is let go in the end, too


@pytest.mark.usefixtures("many_descriptors")
def test_crowd_that_connects_at_once(service):
    """200 clients get a connection however busy the service is, and each its answer."""
    where = service.endpoint.removeprefix("http://").split(":")
    service.process.send_signal(signal.SIGSTOP)
    try:
        crowd = [socket.create_connection((where[0], int(where[1])), 10) for _ in range(200)]
    finally:
        service.process.send_signal(signal.SIGCONT)
    for client in crowd:
        client.settimeout(LIMIT_S)
        client.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    for client in crowd:
        with client:
            assert client.recv(4096).startswith(b"HTTP/1.1 200 ")


def test_pipe_in_the_place_of_a_read_log(service):
    """A log that becomes a pipe, however late, holds no reader up."""
    pipe = service.root / "becomes-a-pipe"
    os.mkfifo(pipe)
    assert extract_fr_dump_path(str(pipe), str(service.root)) is None
    for number in range(4):
        log = service.root / f"pipe{number}.log"
        log.write_text(OOM)
        assert service.post(log, analysis_intent="progressive")[0] == 200
        assert service.get(log, wait="false")[1]["status"] == "in_flight"
        log.unlink()
        os.mkfifo(log)
        assert service.post(log, **ENDED)[0] in {200, 400}
    log = service.root / "after-pipes.log"
    log.write_text(OOM)
    assert service.post(log, **ENDED)[0] == 200
    assert service.get(log)[1]["recommendation"]["action"] == "STOP"


def test_many_ask_for_one_log(service):
    """Of 16 clients that wait for one log one computation is made, and all get its result."""
    log = service.root / "crowd.log"
    log.write_text(OOM)
    before = service.request("GET", "/stats")[1]
    assert service.post(log)[0] == 200
    with ThreadPoolExecutor(16) as pool:
        replies = list(pool.map(lambda _: service.get(log), range(16)))
    after = service.request("GET", "/stats")[1]
    assert {status for status, _ in replies} == {200}
    assert all(reply == replies[0][1] for _, reply in replies)
    assert after["misses"] - before["misses"] == 1


def test_many_jobs_at_once(service):
    """Logs of 24 jobs that are submitted at once do not mix."""
    codes = {"gpu.oom": OOM, "user.import_error": "ModuleNotFoundError: No module named 'x'\n"}
    wanted = [list(codes)[number % 2] for number in range(24)]

    def ask(number):
        log = service.root / f"mixed{number}.log"
        log.write_text(codes[wanted[number]])
        assert service.post(log, job_id=f"mixed{number}", cycle_id=0, **ENDED)[0] == 200
        return service.get(log)[1]["attribution"]["reason_code"]

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, range(24))) == wanted


def test_killed_while_it_writes(tmp_path):
    """However often it is killed: what was accepted is known, and half a line harms nothing."""
    root, state = tmp_path / "logs", tmp_path / "state"
    root.mkdir()
    accepted = []
    draw = random.Random(4)
    with ports.claimed() as port:
        for life in range(2):
            with (
                contextlib.suppress(AssertionError),
                running(root, f"127.0.0.1:{port}", STATE_DIR=state) as service,
            ):
                known = {job["log_path"] for job in service.request("GET", "/jobs")[1]["jobs"]}
                assert known >= set(accepted)
                ended = threading.Timer(draw.uniform(0.1, 0.5), service.process.kill)
                for number in range(100_000):
                    if number == 3:  # however slow the machine is, some were accepted
                        ended.start()
                    log = root / f"{life}-{number}.log"
                    try:
                        if service.post(log, job_id=f"{life}-{number}")[0] == 200:
                            accepted.append(str(log))
                    except (OSError, http.client.HTTPException):
                        break
                ended.join()
                service.process.wait()
        with (state / "journal.jsonl").open("ab") as journal:
            journal.write(b'{"submitted": {"log_pa')
        with (state / "history.jsonl").open("ab") as history:
            history.write(b'{"log_path": "/x", "job')
        with running(root, f"127.0.0.1:{port}", STATE_DIR=state) as service:
            known = {job["log_path"] for job in service.request("GET", "/jobs")[1]["jobs"]}
            assert known >= set(accepted)
            assert len(accepted) > 3


def test_full_disk_of_the_state(tmp_path):
    """Where the state takes nothing more verdicts are made as before, and health says so."""
    root, state = tmp_path / "logs", tmp_path / "state"
    root.mkdir()
    log = root / "full.log"
    log.write_text(OOM)
    # No file may grow over 64 bytes: as on a full disk a write fails, or only a part is written.
    with ports.claimed() as port, running(root, f"127.0.0.1:{port}", STATE_DIR=state) as service:
        resource.prlimit(service.process.pid, resource.RLIMIT_FSIZE, (64, resource.RLIM_INFINITY))
        for number in range(3):
            assert service.post(root / f"{number}.log")[0] == 200
        assert service.post(log, **ENDED)[0] == 200
        assert service.get(log)[1]["recommendation"]["action"] == "STOP"
        health = service.request("GET", "/healthz")[1]
        assert health["status"] == "degraded"
        assert "journal" in health["issues"][0]
        no_limit = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
        resource.prlimit(service.process.pid, resource.RLIMIT_FSIZE, no_limit)
        assert service.post(root / "kept.log")[0] == 200
        assert service.request("GET", "/healthz")[1]["status"] == "ok"
        lines = (state / "journal.jsonl").read_bytes().splitlines()
    assert [json.loads(line)["submitted"]["log_path"] for line in lines] == [str(root / "kept.log")]


def run(state, endpoint):
    """Run the service until it gives up; return its exit code and what it said."""
    environ = {**os.environ, "NVRX_ATTRSVC_ALLOWED_ROOT": "/tmp", "NVRX_ATTRSVC_STATE_DIR": state}
    environ["NVRX_ATTRSVC_ENDPOINT"] = endpoint
    argv = [sys.executable, "-m", "nvidia_resiliency_ext.services.attrsvc"]
    done = subprocess.run(
        argv, env=environ, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    return done.returncode, done.stderr


def test_a_state_of_another(tmp_path, socket_folder):
    """Two services do not share a state; one that cannot be used is one line and exit code 2."""
    root = tmp_path / "logs"
    root.mkdir()
    with running(root, f"unix://{socket_folder}/s", STATE_DIR=tmp_path / "state"):
        code, said = run(str(tmp_path / "state"), f"unix://{socket_folder}/t")
        assert (code, said.count("\n")) == (2, 1), said
        assert "another process uses the state" in said
    (tmp_path / "file").touch()
    code, said = run(str(tmp_path / "file"), f"unix://{socket_folder}/t")
    assert (code, said.count("\n")) == (2, 1), said
    assert str(tmp_path / "file") in said


@pytest.mark.browser
@pytest.mark.timeout(180)
def test_the_page_in_a_browser(service, tmp_path):
    """Jobs are listed, a click shows verdict and evidence, and no text of a log becomes markup."""
    program = find_browser()
    if program is None:
        pytest.skip(f"none of {', '.join(NAMES)} is installed: tools/install_browser.sh does it")
    log = service.root / "page.log"
    evil = "<img src=x onerror='window.evil=1'>"
    log.write_text(f"{evil}\n{evil}torch.OutOfMemoryError: CUDA out of memory. {evil}\n")
    assert service.post(log, job_id=evil, user=evil, **ENDED)[0] == 200
    assert service.get(log)[1]["status"] == "completed"
    with contextlib.closing(Browser(program, tmp_path, f"{service.endpoint}/")) as browser:

        def wait_for(expression):
            deadline = time.monotonic() + LIMIT_S
            while not browser.run(expression):
                assert time.monotonic() < deadline, expression
                time.sleep(0.05)  # the page asks the service in its own time

        wait_for("[...document.querySelectorAll('#jobs td')].some(td => td.className == 'STOP')")
        browser.run(
            "[...document.querySelectorAll('#jobs tr')].find(tr => tr.textContent.includes("
            f"{json.dumps(str(log))})).id = 'wanted'"
        )
        browser.click("#wanted")
        wait_for("document.getElementById('evidence').textContent.includes('out of memory')")
        assert browser.run("document.getElementById('title').textContent") == "STOP gpu.oom"
        assert browser.run("window.evil") is None
        assert browser.run("document.querySelectorAll('img').length") == 0
        bad = {"Runtime.exceptionThrown", "Log.entryAdded"}
        assert not [event for event in browser.events if event.get("method") in bad]
