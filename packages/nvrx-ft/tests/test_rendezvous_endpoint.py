# SPDX-License-Identifier: Apache-2.0
"""Who serves the store, and how long others wait for it."""

import socket
import threading
import time
from pathlib import Path

import pytest

from nvidia_resiliency_ext.fault_tolerance._agent.many_nodes import rules_of
from nvidia_resiliency_ext.fault_tolerance._plan.plan import plan_from_args
from nvidia_resiliency_ext.fault_tolerance._rendezvous.endpoint import (
    EndpointError,
    claim,
    read_token,
    wait_until_reachable,
)
from nvidia_resiliency_ext.fault_tolerance.cli_args import parse_args
from nvidia_resiliency_ext.shared_utils import store_sockets
from nvidia_resiliency_ext.shared_utils.clock import SystemClock
from nvidia_resiliency_ext.shared_utils.errors import ConfigError

# An address for documentation: no machine has it.
ELSEWHERE = "192.0.2.1"


def test_the_first_on_a_machine_serves_and_the_second_does_not() -> None:
    """Of two launchers at one endpoint of this machine exactly one listens."""
    first = claim("127.0.0.1", 0, None)
    assert first is not None
    with first:
        port = first.getsockname()[1]
        assert claim("127.0.0.1", port, None) is None
        with pytest.raises(EndpointError, match="cannot be served there"):
            claim("127.0.0.1", port, is_host=True)


def test_an_address_of_another_machine_is_served_there() -> None:
    """Where the endpoint is not ours we do not serve, and must not claim to."""
    assert claim(ELSEWHERE, 29400, None) is None
    with pytest.raises(EndpointError, match="name an address of this machine"):
        claim(ELSEWHERE, 29400, is_host=True)


def test_who_is_told_not_to_be_the_host_is_not() -> None:
    """`is_host=0` holds, whatever the address."""
    assert claim("127.0.0.1", 0, is_host=False) is None


def test_a_name_that_resolves_nowhere_is_said_so() -> None:
    """The error names the endpoint and the reason."""
    with pytest.raises(EndpointError, match=r"no-such-host\.invalid:29400: the name does not"):
        claim("no-such-host.invalid", 29400, None)


def test_waiting_for_an_endpoint_ends_when_somebody_listens() -> None:
    """A host that comes later is found within the pause between two tries."""
    with socket.socket() as late:
        late.bind(("127.0.0.1", 0))
        port = late.getsockname()[1]
        refused = threading.Event()

        def listen() -> None:
            refused.wait(5)
            late.listen()

        helper = threading.Thread(target=listen)
        helper.start()
        address = wait_until_reachable(
            "127.0.0.1", port, 10, SystemClock(), threading.Event(), refused.set
        )
        helper.join()
    assert address == "127.0.0.1"


def test_waiting_for_an_endpoint_ends_in_time() -> None:
    """Nobody listening is an error after the time given, with a question to the reader."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        port = silent.getsockname()[1]
        began = time.monotonic()
        with pytest.raises(EndpointError, match="is the launcher of the first node running"):
            wait_until_reachable("127.0.0.1", port, 0.2, SystemClock(), threading.Event())
        assert 0.2 <= time.monotonic() - began < 20
        with pytest.raises(EndpointError, match=r"localhost:\d+ \(here .*127\.0\.0\.1\)"):
            wait_until_reachable("localhost", port, 0.0, SystemClock(), threading.Event())


def test_waiting_for_an_endpoint_can_be_ended() -> None:
    """A launcher that is told to go does not wait on."""
    stop = threading.Event()
    began = time.monotonic()
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        port = silent.getsockname()[1]
        with pytest.raises(EndpointError):
            wait_until_reachable("127.0.0.1", port, 60, SystemClock(), stop, stop.set)
    assert time.monotonic() - began < 20


def test_a_token_gives_the_same_key_everywhere(tmp_path: Path) -> None:
    """White space around a token does not matter; another token is another key."""
    keys = []
    for text in ("token", "  token\n", "other"):
        path = tmp_path / "token"
        path.write_text(text)
        path.chmod(0o600)
        keys.append(read_token(str(path)))
    assert keys[0] == keys[1] != keys[2]
    assert len(keys[0]) == 32


@pytest.mark.parametrize(
    ("text", "mode", "match"),
    [("token", 0o644, "must be 600"), ("token", 0o620, "must be 600"), (" \n", 0o600, "one line")],
)
def test_a_token_that_is_none_is_refused(tmp_path: Path, text: str, mode: int, match: str) -> None:
    """A token that others can read, or that is empty, is a configuration error."""
    path = tmp_path / "token"
    path.write_text(text)
    path.chmod(mode)
    with pytest.raises(ConfigError, match=match):
        read_token(str(path))
    with pytest.raises(ConfigError, match="No such file"):
        read_token(str(tmp_path / "missing"))


def test_many_may_connect_at_once() -> None:
    """The queue of connections is as long as the kernel allows, for jobs of many nodes."""
    listener = claim("127.0.0.1", 0, None)
    assert listener is not None
    with listener:
        port = listener.getsockname()[1]
        waiting = [socket.create_connection(("127.0.0.1", port), 5) for _ in range(200)]
        for one in waiting:
            one.close()
    assert store_sockets.BACKLOG >= 4096


# Settings ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["join_timeout", "store_connect_wait_seconds", "last_call_timeout"])
@pytest.mark.parametrize("value", ["nan", "inf", "-1", "soon"])
def test_times_of_the_rendezvous_that_are_none_are_refused(key: str, value: str) -> None:
    """They are named before anything starts: a round that never closes must not be an accident."""
    words = ["--nnodes=2", "--rdzv-endpoint=127.0.0.1:1", f"--rdzv-conf={key}={value}"]
    plan = plan_from_args(parse_args([*words, "--no-python", "/bin/true"]), {"PATH": "/bin"})
    with pytest.raises(ConfigError, match=f"{key}='?{value}"):
        rules_of(plan, {})
