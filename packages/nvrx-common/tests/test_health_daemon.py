# SPDX-License-Identifier: Apache-2.0
"""The node health daemon, asked over real gRPC on a Unix socket."""

import contextlib
import json
import os
import random
import socket
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from nvidia_resiliency_ext.shared_utils._health.node_daemon import evaluate_answer, socket_of
from nvidia_resiliency_ext.shared_utils.health_check import NodeHealthCheck

DEFAULT_ARGS = ["--no-slurm", "--group", "prolog", "epilog", "logs", "gpu"]


@pytest.fixture
def place(socket_folder):
    """Return a short folder for sockets."""
    return socket_folder


@pytest.fixture
def fake_daemon():
    """Return the class of fake daemons, where gRPC is installed."""
    pytest.importorskip("grpc", reason="needs grpcio")
    pytest.importorskip("google.protobuf", reason="needs protobuf")
    from nvidia_resiliency_ext.testing_utils.fake_hardware import FakeNodeDaemon

    return FakeNodeDaemon


def test_daemon_is_asked_with_the_usual_arguments(fake_daemon, place) -> None:
    """A daemon that is content makes the check healthy, and gets the default arguments."""
    with fake_daemon(place / "s") as daemon:
        assert NodeHealthCheck(daemon.socket_path).check().status == "healthy"
        assert NodeHealthCheck(Path(daemon.socket_path)).check().status == "healthy"
        assert NodeHealthCheck(endpoint=f"unix://{daemon.socket_path}", args=["a"])()
    assert daemon.requests == [DEFAULT_ARGS, DEFAULT_ARGS, ["a"]]


@pytest.mark.parametrize(
    ("answer", "healthy"),
    [
        ({"success": True, "output": '{"fail_count": 0}'}, True),
        ({"success": True, "output": '{"fail_count": 2, "failed_checks": ["ib", "gpu"]}'}, False),
        ({"success": True, "output": '{"fail_count": "2"}'}, True),
        ({"success": True, "output": '{"fail_count": true}'}, True),
        ({"success": True, "output": "rubbish"}, True),
        ({"success": True, "output": "[" * 5000}, True),
        ({"success": True}, True),
        ({"success": False, "exit_code": 3, "error": "broken"}, False),
        ({"success": False, "output": '{"fail_count": 0}'}, False),
    ],
)
def test_answers(fake_daemon, place, answer, healthy) -> None:
    """Only success=false or a positive fail_count is unhealthy; unusable details pass."""
    with fake_daemon(place / "s", answer) as daemon:
        result = NodeHealthCheck(daemon.socket_path).check()
    assert bool(result) is healthy
    if "ib" in str(answer):
        assert "ib" in result.reason


def test_daemon_that_starts_later_is_asked(fake_daemon, place) -> None:
    """The socket is looked up at each look, before and after a daemon came and went."""
    check = NodeHealthCheck(str(place / "s"))
    assert check.check().status == "skipped"
    for _ in range(2):
        with fake_daemon(place / "s", {"success": False, "error": "x"}):
            assert not check()
        if (place / "s").exists():
            (place / "s").unlink()
    assert check.check().status == "skipped"


def test_unreachable_can_be_unhealthy(place) -> None:
    """A site may say that a daemon that cannot be asked is a failure."""
    assert not NodeHealthCheck(str(place / "s"), on_unreachable="unhealthy")()
    with pytest.raises(ValueError, match="on_unreachable"):
        NodeHealthCheck(on_unreachable="ignore")


def test_slow_daemon_has_a_deadline(fake_daemon, place) -> None:
    """A daemon that does not answer in time cannot be asked."""
    release = threading.Event()
    with fake_daemon(place / "s", handler=lambda _args: release.wait(30) and None) as daemon:
        check = NodeHealthCheck(
            daemon.socket_path, request_timeout_sec=0.3, on_unreachable="unhealthy"
        )
        reason = check.check().reason
        release.set()
    assert "DEADLINE_EXCEEDED" in reason


def test_answers_are_limited_and_may_be_garbage(fake_daemon, place) -> None:
    """Two MiB of answer and random bytes are no answer, and no exception."""
    rng = random.Random(3)
    replies = [b"\x1a" + b"\x80\x80\x80\x01" + b"x" * (1 << 21)]
    replies += [rng.randbytes(rng.randrange(1, 40)) for _ in range(30)]
    pending = list(replies)
    with fake_daemon(place / "s", handler=lambda _args: pending.pop(0)) as daemon:
        first = NodeHealthCheck(daemon.socket_path, on_unreachable="unhealthy").check()
        assert "RESOURCE_EXHAUSTED" in first.reason
        for _ in replies[1:]:
            assert "itself failed" not in NodeHealthCheck(daemon.socket_path).check().reason


def test_foreign_or_wrong_socket_is_not_asked(place) -> None:
    """A regular file, and a socket of somebody else, are not asked."""
    file = place / "file"
    file.write_text("x")
    assert "is no socket" in NodeHealthCheck(str(file)).check().reason
    if os.geteuid() != 0:
        pytest.skip("only root can give a socket away")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(place / "s"))
        os.chown(place / "s", 12345, 12345)
        assert "belongs to user 12345" in NodeHealthCheck(str(place / "s")).check().reason


@pytest.mark.parametrize(
    ("path", "endpoint", "found"),
    [
        ("/a", None, "/a"), (None, "unix:///a", "/a"), (None, "unix:/a", "/a"), ("/a", "/b", "/b"),
        (None, "./b", "./b"), (None, "host:80", None), (None, "http://x", None), (None, None, None),
        ("", "", None), ("/a\0", None, None), (None, "unix://", None),
    ],
)  # fmt: skip
def test_socket_of(path, endpoint, found) -> None:
    """Paths and unix:// endpoints are sockets, anything else is not."""
    assert socket_of(path, endpoint) == found


@pytest.mark.parametrize(
    ("success", "output", "is_healthy"),
    [
        (True, '{"fail_count": 1}', False), (True, '{"failed_checks": ["gpu"]}', False),
        (True, '{"fail_count": 0, "failed_checks": ["gpu"]}', False), (False, "", False),
        (True, '{"fail_count": 0, "failed_checks": []}', True), (True, "", True),
        (True, "no JSON", True), (True, "[1]", True), (True, '{"fail_count": "3"}', True),
        (True, '{"fail_count": true, "failed_checks": "gpu"}', True),
        (True, '{"fail_count": -1, "failed_checks": {"gpu": 1}}', True),
        (True, '{"fail_count": null, "failed_checks": null}', True),
    ],
)  # fmt: skip
def test_only_a_failure_that_is_said_clearly_counts(success, output, is_healthy) -> None:
    """A failure, a number above 0 or a filled list is unhealthy; what cannot be used passes."""
    answer = SimpleNamespace(success=success, exit_code=0, output=output, error="")
    finding = evaluate_answer(answer)
    assert (finding.status == "healthy") is is_healthy


def test_evaluate_answer_fuzz() -> None:
    """Whatever JSON the daemon prints, evaluating it does not raise."""
    rng = random.Random(5)
    values = [None, True, -1, 1.5, 1e308, "x", [], {}, {"fail_count": [1]}, [1, "y"]]
    for _ in range(500):
        output = json.dumps({"fail_count": rng.choice(values), "failed_checks": rng.choice(values)})
        cut = output[: rng.randrange(len(output) + 1)]
        answer = SimpleNamespace(success=True, exit_code=0, output=cut, error="")
        finding = evaluate_answer(answer)
        assert finding.status in {"healthy", "unhealthy"}


def _drip(peer):
    while True:
        peer.sendall(b"\0")
        time.sleep(0.02)  # how fast a slow peer talks, not a wait of the test


def _huge_frame(peer):
    peer.sendall(b"\0\0\0\4\0\0\0\0\0")
    peer.sendall(b"\xff\xff\xff\1\4\0\0\0\1" + b"\x82" * 100_000)


@pytest.mark.slow
@pytest.mark.parametrize(
    "talk",
    [
        lambda peer: [*iter(lambda: peer.recv(1 << 16), b"")],
        lambda peer: peer.sendall(random.Random(3).randbytes(200_000)),
        lambda peer: peer.close(),
        lambda peer: peer.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 99999999\r\n\r\n"),
        _drip,
        _huge_frame,
    ],
    ids=["silent", "garbage", "closes", "http", "drip", "huge"],
)
def test_peer_that_is_no_daemon(place, talk) -> None:
    """Whatever talks at the socket, the check ends in time and takes nobody out for it."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(place / "s"))
        listener.listen()

        def serve():
            # Until the test closes the listener, or the checker its end.
            with contextlib.suppress(OSError):
                while True:
                    peer, _ = listener.accept()
                    with peer, contextlib.suppress(OSError):
                        peer.settimeout(10)
                        talk(peer)

        thread = threading.Thread(target=serve)
        thread.start()
        start = time.monotonic()
        result = NodeHealthCheck(str(place / "s"), request_timeout_sec=1).check()
        took_s = time.monotonic() - start
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(20)
    assert (result.status, bool(result)) == ("skipped", True)
    assert "cannot be asked" in result.reason
    assert took_s < 10
    assert not thread.is_alive()
