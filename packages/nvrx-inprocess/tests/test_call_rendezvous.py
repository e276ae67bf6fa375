# SPDX-License-Identifier: Apache-2.0
"""How the ranks of a call come together."""

from datetime import timedelta

import pytest

from nvidia_resiliency_ext.inprocess._call import rendezvous
from nvidia_resiliency_ext.inprocess._call.settings import Settings
from nvidia_resiliency_ext.inprocess.rank_assignment import ShiftRanks
from nvidia_resiliency_ext.inprocess.state import State
from nvidia_resiliency_ext.inprocess.store import FileStore, TCPStore


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
