# SPDX-License-Identifier: Apache-2.0
"""The client of the attribution service, against a real HTTP server."""

import contextlib
import http.client
import logging
import random
import shutil
import socket
import ssl
import subprocess
import threading
import time

import pytest
from common_attribution_server import Service

from nvidia_resiliency_ext.shared_utils import attribution_client, health_check
from nvidia_resiliency_ext.shared_utils import attribution_client as requests
from nvidia_resiliency_ext.shared_utils.attribution_wire import LogSubmission
from nvidia_resiliency_ext.shared_utils.health_check import AttributionService
from nvidia_resiliency_ext.shared_utils.json_http import JsonConnection, parse_endpoint

STOP = {"status": "completed", "recommendation": {"action": "STOP", "reason": "user error"}}
CONTINUE = {"status": "completed", "recommendation": {"action": "CONTINUE"}}


@pytest.fixture(params=["tcp", "unix"])
def service(request, socket_folder):
    """Return a running service, on a port and on a socket."""
    path = socket_folder / "s" if request.param == "unix" else None
    with Service(path) as found:
        yield found


@pytest.fixture
def client_of(monkeypatch):
    """Return a function that makes clients, which are stopped at the end."""
    # Who tests a silent service says so; all others answer, however late.
    monkeypatch.setattr(attribution_client, "_REQUEST_TIMEOUT_S", 30.0)
    monkeypatch.setenv("SLURM_JOB_USER", "alice")
    monkeypatch.setenv("SLURM_JOB_ID", "42")
    monkeypatch.delenv("SLURM_ARRAY_JOB_ID", raising=False)
    monkeypatch.delenv("NVRX_ATTRSVC_TOKEN_FILE", raising=False)
    made = []

    def make(endpoint, **options):
        client = AttributionService(endpoint, **{"poll_interval_s": 0.01, **options})
        made.append(client)
        return client

    yield make
    for client in made:
        client.stop_poller()


def wait_until(condition, timeout_s=60.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        threading.Event().wait(0.005)


def test_progressive_then_terminal_then_stop(service, client_of) -> None:
    """A cycle's log is submitted, then asked about; the verdict STOP is latched and enforced."""
    client = client_of(service.endpoint, enforce_stop=True)
    client.start_poller(node_id="node1")
    client._submit_log("/logs/a_cycle0.log")
    service.wait_for(lambda: len(service.posts()) == 1)
    assert client.request_terminal_analysis()
    assert not client()
    service.wait_for(service.polls)
    assert not client.stop_requested()
    service.replies["/logs/a_cycle0.log"] = (200, STOP)
    wait_until(client.stop_requested)
    assert (client.stop_verdict_observed(), client.stop_verdict_count()) == (True, 1)
    assert service.posts() == [
        ("progressive", "/logs/a_cycle0.log"), ("terminal", "/logs/a_cycle0.log"),
    ]  # fmt: skip
    body = service.requests[0][2]
    assert (body["user"], body["job_id"], "log_complete" in body) == ("alice", "42", False)
    terminal = [body for method, _, body, _ in service.requests if method == "POST"][1]
    assert terminal["log_complete"] is True
    assert {query["wait"][0] for method, query, _, _ in service.requests if method == "GET"} == {
        "false"
    }
    assert service.connections == 1
    assert not client.request_terminal_analysis()


def test_a_thread_that_is_to_look_later_is_not_woken(service, client_of, monkeypatch) -> None:
    """While workers start, the thread sleeps on as long as it looks by itself soon enough."""
    monkeypatch.setattr(attribution_client, "_CALM_S", 1000.0)
    client = client_of(service.endpoint)
    client.start_poller()
    client._submit_log("/logs/a")
    wait_until(lambda: time.monotonic() < client._looks_at_s < float("inf"))
    woken = []
    notify = client._changed.notify_all
    monkeypatch.setattr(client._changed, "notify_all", lambda: woken.append(1) or notify())
    client.request_terminal_analysis()
    client._submit_log("/logs/b")
    assert not woken
    client.stop_poller(60.0)
    assert woken
    assert service.posts() == [("terminal", "/logs/a"), ("progressive", "/logs/b")]


def test_stop_without_enforcing_is_only_observed(service, client_of) -> None:
    """Without enforce_stop a STOP is counted, and later cycles are analysed as well."""
    client = client_of(service.endpoint)
    client.start_poller()
    for number in range(2):
        path = f"/logs/{number}"
        service.replies[path] = (200, STOP)
        client._submit_log(path)
        assert client.request_terminal_analysis()
        wait_until(lambda n=number: client.stop_verdict_count() == n + 1)
    assert client.stop_verdict_observed()
    assert not client.stop_requested()


def test_verdict_continue_frees_the_slot(service, client_of) -> None:
    """After CONTINUE the next log can be asked about."""
    client = client_of(service.endpoint, enforce_stop=True)
    client.start_poller()
    service.replies["/a"] = (200, CONTINUE)
    client._submit_log("/a")
    client.request_terminal_analysis()
    client._submit_log("/b")
    wait_until(client.request_terminal_analysis)
    service.wait_for(lambda: ("terminal", "/b") in service.posts())
    assert not client.stop_verdict_observed()


def test_nothing_is_polled_before_it_was_accepted(service, client_of) -> None:
    """A terminal submission that the service refuses is never polled, and frees the slot."""
    service.post_status = 403
    client = client_of(service.endpoint)
    client.start_poller()
    client._submit_log("/a")
    assert client.request_terminal_analysis()
    wait_until(client.request_terminal_analysis)
    assert service.polls() == []


def test_poller_starts_later(service, client_of) -> None:
    """Logs are submitted before the poller is started, verdicts asked for only after that."""
    client = client_of(service.endpoint)
    service.replies["/a"] = (200, STOP)
    client._submit_log("/a")
    client.request_terminal_analysis()
    service.wait_for(lambda: ("terminal", "/a") in service.posts())
    assert service.polls() == []
    client.start_poller()
    wait_until(client.stop_verdict_observed)


@pytest.mark.parametrize(
    "reply",
    [
        (200, b"no json"), (200, b"[" * 100_000), (200, [1]), (500, STOP), (404, STOP),
        (200, {"status": "failed"}), (200, b'"' + b"x" * (1 << 21) + b'"'),
        (200, {"status": "completed", "recommendation": "STOP"}),
    ],
)  # fmt: skip
def test_odd_replies_are_no_verdict(service, client_of, reply) -> None:
    """Nonsense, errors and answers over 1 MiB never become a STOP and never end the client."""
    client = client_of(service.endpoint)
    client.start_poller()
    service.replies["/a"] = reply
    client._submit_log("/a")
    client.request_terminal_analysis()
    service.wait_for(service.polls)
    client._submit_log("/b")
    service.wait_for(lambda: ("progressive", "/b") in service.posts())
    assert not client.stop_verdict_observed()


def test_caller_never_waits(service, client_of) -> None:
    """While the service does not answer, no method of the client blocks."""
    release = threading.Event()
    service.before_reply = lambda: release.wait(30)
    client = client_of(service.endpoint)
    start = time.monotonic()
    for number in range(100):
        client.start_poller()
        client._submit_log(f"/{number}")
        client.request_terminal_analysis()
        client.stop_requested()
    took_s = time.monotonic() - start
    release.set()
    assert took_s < 25.0


@pytest.mark.parametrize("reply", [(200, "no object"), (500, {}), (307, {})])
def test_what_is_wrong_with_a_service_is_said_once(
    service, client_of, monkeypatch, caplog, reply
) -> None:
    """However many cycles pass beside a service that answers nonsense, the log has one line."""
    monkeypatch.setattr(requests, "_MAX_POLL_FAILURES", 2)
    client = client_of(service.endpoint)
    client.start_poller()
    with caplog.at_level(logging.DEBUG, "nvrx"):
        for cycle in range(3):
            path = f"/logs/a_cycle{cycle}.log"
            service.replies[path] = reply
            client._submit_log(path, cycle)
            client.request_terminal_analysis()
            wait_until(lambda path=path: f"no verdict for {path}" in caplog.text)
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert service.endpoint in warnings[0].getMessage()


def test_a_service_that_was_there_meanwhile_is_complained_of_again(
    service, client_of, caplog
) -> None:
    """A submission that is accepted ends the silence about those that are not."""
    client = client_of(service.endpoint)
    client.start_poller()
    for number, status in enumerate((400, 400, 200, 400)):
        service.post_status = status
        client._submit_log(f"/logs/{number}")
        service.wait_for(lambda number=number: len(service.posts()) == number + 1)
        wait_until(lambda: client._state.next_post() is None)
    wait_until(lambda: "/logs/3 was not submitted" in caplog.text)
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [text.partition("/logs/")[2][0] for text in warnings] == ["0", "3"]


def test_restart_count_of_slurm_is_said(client_of, monkeypatch) -> None:
    """A requeued job says how often it was: its logs have the names of the earlier attempt."""
    post = LogSubmission("/a", analysis_intent="terminal")
    client = client_of("http://127.0.0.1:9")
    for text, index in (("2", 2), ("two", None), ("9" * 20, None), ("", None)):
        monkeypatch.setenv("SLURM_RESTART_COUNT", text)
        assert client._submission(post).attempt_index == index


def test_service_that_comes_later_or_back(socket_folder, client_of, monkeypatch) -> None:
    """A service that is not there yet, and one that is restarted, is reached in the end."""
    path = socket_folder / "s"
    # At the pace of this test the usual number of questions may not last until it is back.
    monkeypatch.setattr(requests, "_MAX_POLL_FAILURES", 1_000_000)
    client = client_of(f"unix://{path}")
    client.start_poller()
    with Service(path) as service:
        client._submit_log("/a")
        client.request_terminal_analysis()
        service.wait_for(service.polls)
    path.unlink()
    wait_until(lambda: client._state._failures)
    with Service(path) as service:
        service.replies["/a"] = (200, STOP)
        wait_until(client.stop_verdict_observed)


def test_other_endpoints_do_nothing(client_of, caplog) -> None:
    """An endpoint that cannot be asked gives one warning, and nothing is started."""
    with caplog.at_level(logging.WARNING, "nvrx"):
        client = client_of("ftp://host")
        client.start_poller()
        client._submit_log("/a")
        assert not client.request_terminal_analysis()
        client.stop_poller()
    assert len(caplog.records) == 1
    assert not client.stop_requested()


def test_what_waits_is_sent_at_the_end(service, client_of) -> None:
    """Stopping sends what was asked for, ends the thread, and it can be started again."""
    client = client_of(service.endpoint)
    client._submit_log("/a")
    client.request_terminal_analysis()
    client.stop_poller()
    assert ("terminal", "/a") in service.posts()
    assert not [each for each in threading.enumerate() if each.name == "nvrx-attribution"]
    client._submit_log("/b")
    service.wait_for(lambda: ("progressive", "/b") in service.posts())


def test_stopping_does_not_wait_for_a_dead_service(client_of) -> None:
    """Without a service stopping takes no longer than it may."""
    client = client_of("http://127.0.0.1:9")
    client.start_poller()
    client._submit_log("/a")
    client.request_terminal_analysis()
    start = time.monotonic()
    client.stop_poller(timeout=120.0)
    assert time.monotonic() - start < 60.0


def test_end_that_gets_no_slot_is_sent_at_once(service, client_of) -> None:
    """It wakes the thread, which has nothing else to do and would wait for ever."""
    client = client_of(service.endpoint)
    client._submit_log("/a", 0)
    client.request_terminal_analysis()
    client._submit_log("/b", 1)
    service.wait_for(lambda: ("progressive", "/b") in service.posts())
    wait_until(lambda: client._state.next_post() is None)
    assert not client.request_terminal_analysis()
    due_s = client._not_before_s
    assert not client.request_terminal_analysis()
    assert client._not_before_s == due_s  # who asks again and again delays nothing
    service.wait_for(lambda: ("terminal", "/b") in service.posts())


@pytest.mark.parametrize(("failures", "tries"), [(0, 1), (2, 3), (9, 3)])
def test_end_that_gets_no_slot_is_tried_again(failures, tries) -> None:
    """A failed connection costs no end: there are three tries, as for others; then the next."""
    state = requests.RequestState(enforce_stop=True)
    for cycle, path in enumerate(("/a", "/b", "/c")):
        state.submit(path, cycle)
        state.request_terminal()
    state.posted(state.next_post(), "accepted")
    for path in ("/b", "/c"):
        outcomes = iter(["failed"] * failures + ["accepted"])
        made = 0
        while (post := state.next_post()) is not None and post.log_path == path:
            assert not state.posted(post, next(outcomes))
            made += 1
        assert made == tries
    assert (state.next_post(), state.poll_path) == (None, "/a")


def test_end_that_was_dropped_while_it_was_sent_accepts_nothing() -> None:
    """The answer to it is none to the submission that waits for the slot's verdict."""
    state = requests.RequestState(enforce_stop=True)
    for cycle in range(20):
        state.submit(f"/{cycle}", cycle)
        state.request_terminal()
    sent = LogSubmission("/1", cycle_id=1, analysis_intent="terminal")
    state.posted(sent, "accepted")
    assert (state.next_post().log_path, state.poll_path) == ("/0", None)


def test_job_of_an_array_is_the_whole_array(client_of, monkeypatch) -> None:
    """Tasks of one job name the same job; the one that takes over has its history."""
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "77")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "1")
    post = LogSubmission("/a", analysis_intent="terminal")
    for options, job in (({}, "77"), ({"job_id": "77_1"}, "77_1")):
        assert client_of("http://127.0.0.1:9", **options)._submission(post).job_id == job


def test_token_is_sent(service, client_of, tmp_path, monkeypatch) -> None:
    """A token from a file travels as bearer token; a bad one is said and left out."""
    token = tmp_path / "token"
    token.write_text("s3cret\n")
    token.chmod(0o600)
    monkeypatch.setenv("NVRX_ATTRSVC_TOKEN_FILE", str(token))
    client_of(service.endpoint)._submit_log("/a")
    service.wait_for(service.posts)
    assert service.requests[0][3]["Authorization"] == "Bearer s3cret"
    token.write_text("bad\r\nX-Injected: 1")
    client_of(service.endpoint)._submit_log("/b")
    service.wait_for(lambda: len(service.posts()) == 2)
    assert not {"Authorization", "X-Injected"} & set(service.requests[1][3])


def test_tls_is_verified(client_of, tmp_path) -> None:
    """A certificate that is not trusted is refused; a trusted one is used."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("needs openssl to make a certificate")
    key, cert = tmp_path / "key", tmp_path / "cert"
    subprocess.run(
        [openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", cert,
         "-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"],
        check=True, capture_output=True, timeout=60,
    )  # fmt: skip
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    with Service(tls=context) as service:
        untrusting = client_of(service.endpoint)
        untrusting._submit_log("/a")
        untrusting.stop_poller()
        assert service.posts() == []
        client_of(service.endpoint, ca_file=str(cert))._submit_log("/b")
        service.wait_for(lambda: service.posts() == [("progressive", "/b")])


def test_profiling_events(service, client_of, caplog) -> None:
    """A request is started once and completed once, with the node's name."""
    client = client_of(service.endpoint)
    client.start_poller(node_id="node1")
    with caplog.at_level(logging.INFO, "nvrx"):
        client._submit_log("/a")
        client.request_terminal_analysis()
        client.request_terminal_analysis()
        # Only now: a request whose verdict has come may be followed by another.
        service.replies["/a"] = (200, STOP)
        wait_until(lambda: "attribution_get_completed" in caplog.text)
    assert caplog.text.count("attribution_get_started") == 1
    assert caplog.text.count("attribution_get_completed") == 1
    assert "Node: node1" in caplog.text


def test_a_callback_that_raises_ends_nothing(service, client_of, caplog) -> None:
    """Verdicts come as before, the other callback is called; the log names what failed."""
    calls = []

    def broken(name):
        def call(*args):
            calls.append((name, *args[:2]))
            raise RuntimeError("boom")

        return call

    client = client_of(
        service.endpoint, on_verdict=broken("on_verdict"), on_nodes=broken("on_nodes")
    )
    client.start_poller()
    for number in range(2):
        path = f"/{number}"
        service.replies[path] = (200, {**STOP, "attribution": {"exclude_nodes": ["n7"]}})
        client._submit_log(path)
        assert client.request_terminal_analysis()
        wait_until(lambda n=number: len(calls) == 2 * (n + 1))
    assert client.stop_verdict_count() == 2
    assert calls == [
        (name, first, path)
        for path in ("/0", "/1")
        for name, first in (("on_nodes", ("n7",)), ("on_verdict", "STOP"))
    ]
    wait_until(lambda: caplog.text.count("RuntimeError: boom") >= 4)
    assert "on_verdict" in caplog.text
    assert "on_nodes" in caplog.text


def test_it_is_one_class() -> None:
    """The client under its old name and in its own file is the same."""
    assert health_check.AttributionService is attribution_client.AttributionService


def _drip(peer, first, byte):
    peer.sendall(first)
    while True:
        peer.sendall(byte)
        time.sleep(0.05)  # how slowly this peer talks


@pytest.mark.parametrize(
    "talk",
    [
        lambda peer: peer.recv(1),
        lambda peer: _drip(peer, b"HTTP/1.1 200 ", b"x"),
        lambda peer: _drip(peer, b"HTTP/1.1 200 OK\r\nX-A: ", b"x"),
        lambda peer: _drip(peer, b"HTTP/1.1 200 OK\r\n", b"A: b\r\n"),
        lambda peer: _drip(peer, b"HTTP/1.1 200 OK\r\nContent-Length: 99999\r\n\r\n", b"{"),
        lambda peer: _drip(peer, b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"0"),
        lambda peer: _drip(peer, b"HTTP/1.1 200 OK\r\n\r\n", b"x" * 65536),
        lambda peer: _drip(peer, b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 100 x\r\n\r\n"),
        lambda peer: peer.sendall(random.Random(1).randbytes(200_000)),
    ],
    ids=[
        "silent",
        "status",
        "header",
        "headers",
        "body",
        "chunk",
        "endless",
        "continue",
        "garbage",
    ],
)
def test_hostile_service_has_a_deadline(talk) -> None:
    """No peer holds a request up for longer than its time, however it spreads its bytes."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve():
            with contextlib.suppress(OSError):
                peer, _ = listener.accept()
                with peer:
                    peer.settimeout(120)
                    peer.recv(65536)
                    talk(peer)

        thread = threading.Thread(target=serve)
        thread.start()
        endpoint = parse_endpoint(f"http://127.0.0.1:{listener.getsockname()[1]}")
        connection = JsonConnection(endpoint, 0.5)
        start = time.monotonic()
        try:
            with pytest.raises((OSError, http.client.HTTPException)):
                connection.get("/logs", {"log_path": "/a"})
        finally:
            took_s = time.monotonic() - start
            connection.close()
            listener.close()
            thread.join(30)
    assert took_s < 60
