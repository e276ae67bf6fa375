# SPDX-License-Identifier: Apache-2.0
"""A main thread that waits for a torch store, or in one, can be interrupted."""

import contextlib
import datetime as dt
import functools
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import ports
import pytest
import torch.distributed as dist
from interrupters import interrupt_main_thread

from nvidia_resiliency_ext.inprocess._call.interrupt import (
    AtomicLock,
    MainThreadInterrupter,
    RankShouldRestart,
)
from nvidia_resiliency_ext.inprocess._unblock.waits import (
    RendezvousError,
    StoreWaits,
    Wait,
    is_in_futex,
    kernel_wait,
    patient_rendezvous,
)

DEADLINE_S = 60.0
# Shorter than a test may take: a wait that is not ended is then a failure of its own test.
LONG = dt.timedelta(seconds=30)
GLOO = dt.timedelta(seconds=30)
HOST = """
import sys
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def host() -> Any:
    """Host a store."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def connect(port: int) -> Any:
    """Return a connection of a store that waits long."""
    return dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=LONG)


def is_in_poll() -> bool:
    """Return whether the main thread waits in poll()."""
    return kernel_wait(os.getpid())[0] is Wait.POLL


def wait_until(condition: Callable[[], object]) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        threading.Event().wait(0.002)


def interrupt(function: Callable[[], object], when: Callable[[], object] = is_in_poll) -> float:
    """Call a function and interrupt it when it waits; return how long it took to leave it."""
    interrupter, lock = MainThreadInterrupter(), AtomicLock()
    took_s: list[float] = []

    def ask() -> None:
        # Before it is inside, too, the main thread waits for this and that.
        wait_until(lambda: interrupter._stay is not None and when())
        start = time.monotonic()
        interrupt_main_thread(interrupter, "because", 30.0, lock)
        took_s.append(time.monotonic() - start)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        with pytest.raises(RankShouldRestart), interrupter:
            function()
    finally:
        # If the test's timeout came at the exit, the exception would be raised in pytest itself.
        interrupter.leave()
        thread.join()
    return took_s[0]


@pytest.mark.parametrize("what", ["get", "wait", "init"])
def test_wait_in_a_store_is_left_and_the_store_is_of_use(host: Any, what: str) -> None:
    """Who waits for a key that nobody sets is out soon, and its connection serves it further."""
    store = connect(host.port)
    group = dist.PrefixStore("group", store)
    waits = {
        "get": lambda: store.get("never"),
        "wait": lambda: store.wait(["never", "nor this"]),
        "init": lambda: dist.init_process_group("gloo", store=group, rank=1, world_size=2),
    }
    assert interrupt(waits[what]) < 25.0
    for number in range(3):
        store.set(what, str(number))
        assert store.get(what) == str(number).encode()
    assert store.add(f"count-{what}", 2) == 2


class DeafStore(dist.Store):
    """Takes what is set; every query gets an error."""

    def __init__(self, below: Any) -> None:
        super().__init__()
        self._below = below

    def set(self, key: str, value: Any) -> None:
        """Set."""
        self._below.set(key, value)

    def get(self, key: str) -> Any:
        """Fail."""
        raise RuntimeError(f"no {key} is to be had")


def test_wait_for_a_rank_that_does_not_connect_is_left(
    host: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gloo waits for a peer that has said where it is and then failed: the main thread is out."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    store = connect(host.port)

    def init() -> None:
        # Of two ranks one connects, and is refused; the other waits. It depends on their ports.
        deadline = time.monotonic() + DEADLINE_S
        for number in range(100):
            assert time.monotonic() < deadline
            group = dist.PrefixStore(f"half-{number}", store)
            with contextlib.suppress(RuntimeError):
                dist.ProcessGroupGloo(DeafStore(group), 1, 2, GLOO)
            with contextlib.suppress(RuntimeError):
                dist.ProcessGroupGloo(group, 0, 2, GLOO)

    is_waiting = functools.partial(is_in_futex, os.getpid())
    assert interrupt(init, is_waiting) < 25.0


@pytest.mark.slow
def test_connection_to_a_store_that_hangs_is_ended() -> None:
    """Who waits in a store whose process is stopped is out after seconds, not after its timeout."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOST], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        store = connect(int(process.stdout.readline()))
        process.send_signal(signal.SIGSTOP)
        assert interrupt(lambda: store.get("never")) < 25.0
    finally:
        process.kill()
        process.communicate()


def test_other_connections_are_left_alone() -> None:
    """A thread that waits for something that answers, but is no store, waits on."""
    server = socket.create_server(("127.0.0.1", 0))
    ours = socket.create_connection(server.getsockname())
    theirs, _ = server.accept()
    ids: list[int] = []

    def wait() -> None:
        ids.append(threading.get_native_id())
        poll = select.poll()
        poll.register(ours, select.POLLIN)
        poll.poll(DEADLINE_S * 1000)

    def turn_away() -> None:
        with contextlib.suppress(OSError):
            while True:
                server.accept()[0].close()

    threads = [threading.Thread(target=each) for each in (wait, turn_away)]
    for thread in threads:
        thread.start()
    with ours, theirs:
        wait_until(lambda: ids)
        waits = StoreWaits(ids[0])
        wait_until(lambda: waits._waited_for() == ours.fileno())
        assert not waits.end()
        theirs.sendall(b"a")
        threads[0].join(DEADLINE_S)
        assert ours.recv(1) == b"a"
    with server:
        server.shutdown(socket.SHUT_RDWR)
        threads[1].join(DEADLINE_S)


def init_by_port(rank: int, port: int) -> None:
    """Make a group of two by a port, as `env://` does."""
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2, timeout=LONG
    )


def is_in(name: str) -> bool:
    """Return whether a function is running in the main thread."""
    frame = sys._current_frames()[threading.main_thread().ident or 0]
    while frame is not None:
        if frame.f_code.co_name == name:
            return True
        frame = frame.f_back
    return False


# What is raised anywhere may be raised before a socket that was just made has an owner.
@pytest.mark.filterwarnings(
    "ignore:unclosed <socket:ResourceWarning",
    "ignore:Exception ignored in. <socket:pytest.PytestUnraisableExceptionWarning",
)
def test_wait_for_a_store_that_nobody_hosts_is_left() -> None:
    """Who waits for rank 0 to host the store is out soon."""
    with ports.claimed() as port, patient_rendezvous():
        took_s = interrupt(lambda: init_by_port(1, port), lambda: is_in("wait_until_listening"))
    assert took_s < 60.0


@pytest.mark.parametrize("does_listen", [True, False])
def test_rendezvous_with_what_is_no_store_keeps_its_limit(does_listen: bool) -> None:
    """Who comes to a program that says nothing, or to nobody, has an error when its time is up."""
    limit = dt.timedelta(seconds=0.3)
    with socket.create_server(("127.0.0.1", 0)) as server, patient_rendezvous():
        port = server.getsockname()[1]
        if not does_listen:
            server.close()
        began = time.monotonic()
        with pytest.raises(RendezvousError, match=rf"no store answers at 127.*:{port}: .*0.3 s"):
            dist.init_process_group(
                "gloo",
                init_method=f"tcp://127.0.0.1:{port}",
                rank=1,
                world_size=2,
                timeout=limit,
            )
        assert time.monotonic() - began < 25.0


def test_host_of_a_store_that_nobody_joins_is_left() -> None:
    """Rank 0 that waits for the others is out soon, and its port is free again."""
    with ports.claimed() as port:
        with patient_rendezvous():
            assert interrupt(lambda: init_by_port(0, port)) < 25.0
        wait_until(lambda: is_free(port))


def is_free(port: int) -> bool:
    """Return whether nobody listens at a port."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def test_rendezvous_is_put_back() -> None:
    """After a call torch has what it had before."""
    module = sys.modules["torch.distributed.rendezvous"]
    before = module.TCPStore
    with contextlib.suppress(ValueError), patient_rendezvous():
        assert module.TCPStore is not before
        raise ValueError("because")
    assert module.TCPStore is before
