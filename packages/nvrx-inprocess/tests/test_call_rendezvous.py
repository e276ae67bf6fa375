# SPDX-License-Identifier: Apache-2.0
"""How the ranks of a call come together."""

import threading
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch.distributed as dist

from nvidia_resiliency_ext.inprocess._call import rendezvous
from nvidia_resiliency_ext.inprocess._call.settings import Settings
from nvidia_resiliency_ext.inprocess.rank_assignment import ShiftRanks
from nvidia_resiliency_ext.inprocess.state import State
from nvidia_resiliency_ext.inprocess.store import BarrierTimeout, FileStore, TCPStore


@pytest.mark.parametrize("is_launchers", [True, False])
def test_store_waits_as_long_as_its_arguments_say(
    is_launchers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The timeout in `store_kwargs` is that of `call.store`, in a later call, too.

    Connecting has limits of its own: `barrier_timeout`, and 5 s where the store was seen before.
    """
    monkeypatch.setenv("RANK", "0")
    server = TCPStore("127.0.0.1", 0, 1, wait_for_workers=False)
    monkeypatch.setattr(rendezvous, "_served", {("127.0.0.1", server.port)})
    environ = {"MASTER_ADDR": "127.0.0.1"}
    if is_launchers:
        environ["NVRX_INPROCESS_STORE"] = f"127.0.0.1:{server.port}"
    told = timedelta(seconds=200)
    settings = Settings(
        store_factory=TCPStore,
        rank_assignment=ShiftRanks(),
        store_kwargs={"port": server.port, "timeout": told},
    )
    assert rendezvous.hold_rendezvous(settings, State(0, 1), environ).store.timeout == told


def test_a_port_that_the_environment_overrules_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With a store in the environment one line at INFO says that the given port is not used."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(rendezvous, "_logged", set())
    server = TCPStore("127.0.0.1", 0, 1, wait_for_workers=False)
    address = f"127.0.0.1:{server.port}"
    settings = Settings(
        store_factory=TCPStore, rank_assignment=ShiftRanks(), store_kwargs={"port": 29555}
    )
    caplog.set_level("INFO", "nvrx")
    for _ in range(2):
        rendezvous.hold_rendezvous(settings, State(0, 1), {"NVRX_INPROCESS_STORE": address})
    told = [each for each in caplog.records if "port=29555" in each.message]
    assert [each.levelname for each in told] == ["INFO"]
    assert address in told[0].message


def test_what_a_factory_raises_comes_first() -> None:
    """A factory's own exception reaches the caller, also of one that no monitor could import."""

    class Broken(FileStore):
        def __init__(self) -> None:
            raise ZeroDivisionError("mine")

    settings = Settings(store_factory=Broken, rank_assignment=ShiftRanks())
    with pytest.raises(ZeroDivisionError, match="mine"):
        rendezvous.hold_rendezvous(settings, State(0, 1), {})


@pytest.fixture
def come(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Return a function: a rank of two comes to its first call, or to that of the number given."""
    store = dist.HashStore()
    monkeypatch.setattr(rendezvous, "_next_call", 0)
    monkeypatch.setattr(rendezvous, "_connect", lambda *_: store)

    def come(rank: int, limit_s: float, number: int = 0) -> int:
        rendezvous._next_call = number
        settings = Settings(
            store_factory=TCPStore,
            rank_assignment=ShiftRanks(),
            store_kwargs={"host_name": "127.0.0.1", "port": 1},
            barrier_timeout=timedelta(seconds=limit_s),
        )
        return rendezvous.hold_rendezvous(settings, State(rank, 2), {}).call

    come.store = store  # type: ignore[attr-defined]
    return come


def test_who_gave_up_is_not_counted(come: Callable[..., int]) -> None:
    """A rank that comes after another one has given up waits for that one to come again."""
    with pytest.raises(BarrierTimeout):
        come(1, 0.05)
    with pytest.raises(BarrierTimeout, match="1 of 2 ranks have arrived"):
        come(0, 0.05)


def test_who_waits_is_woken_by_a_later_call(come: Callable[..., int]) -> None:
    """A rank in an earlier call than the others comes to theirs, and has waited in the store once.

    torch prints a warning for each wait that ends in vain.
    """
    waits: list[object] = []
    store = come.store  # type: ignore[attr-defined]
    found: list[int] = []
    waiting = threading.Thread(target=lambda: found.append(come(0, 60.0)))
    real_wait = rendezvous.CallStore.wait

    def wait(self: rendezvous.CallStore, *arguments: object) -> None:
        waits.append(arguments)
        real_wait(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rendezvous.CallStore, "wait", wait)
        waiting.start()
        prefix = rendezvous.cycle_prefix({})
        store.wait([f"{prefix}0/nonce"], timedelta(seconds=60))
        while not waits:
            store.check(["another"])
        # As the other rank does, whose process has made three calls.
        rendezvous._take_number(store, prefix, 3)
        store.wait([f"{prefix}3/nonce"], timedelta(seconds=60))
        assert come(1, 60.0, number=3) == 3
        waiting.join(60)
    assert found == [3]
    assert len(waits) <= 2  # One in each of the calls 0 and 3.
