# SPDX-License-Identifier: Apache-2.0
"""The arguments of `Wrapper` and whether they fit together."""

import asyncio
import dataclasses
from datetime import timedelta

import pytest
import torch.distributed as dist

from nvidia_resiliency_ext.inprocess._call import rendezvous
from nvidia_resiliency_ext.inprocess._call.rendezvous import require_valid_rank
from nvidia_resiliency_ext.inprocess._call.settings import Settings, bounded, check_settings
from nvidia_resiliency_ext.inprocess.abort import Abort
from nvidia_resiliency_ext.inprocess.compose import Compose
from nvidia_resiliency_ext.inprocess.rank_assignment import (
    ActiveWorldSizeDivisibleBy,
    FilterCountGroupedByKey,
    RankAssignment,
    RankFilter,
    ShiftRanks,
)
from nvidia_resiliency_ext.inprocess.rank_filter import MaxActiveWorldSize
from nvidia_resiliency_ext.inprocess.state import State
from nvidia_resiliency_ext.inprocess.store import (
    BarrierOverflow,
    BarrierTimeout,
    StoreMixin,
    TCPStore,
)
from nvidia_resiliency_ext.inprocess.wrap import Wrapper


class StandInStore(StoreMixin):
    pass


class StandInAssignment(RankAssignment):
    def __call__(self, ctx):
        return ctx


class StandInFilter(RankFilter):
    def __call__(self, ctx):
        return ctx


class SomeAbort(Abort):
    def __call__(self, state):
        return state


TIMES = [field.name for field in dataclasses.fields(Settings) if field.type == "timedelta"]


def seconds(value: float) -> timedelta:
    return timedelta(seconds=value)


def check(**changes) -> None:
    available = changes.pop("available", True)
    given = {"store_factory": StandInStore, "rank_assignment": StandInAssignment(), **changes}
    check_settings(Settings(**given), is_distributed_available=available)


def test_defaults_are_in_order() -> None:
    """The defaults of the contract pass, and so does what the reference user gives."""
    check()
    check(
        heartbeat_interval=seconds(30),
        heartbeat_timeout=seconds(60),
        termination_grace_time=seconds(1),
        abort=Compose(SomeAbort(), SomeAbort()),
        store_kwargs={"timeout": seconds(300), "port": 29502},
        last_call_wait=seconds(0),
        monitor_process_logfile="/tmp/log_{rank}",
    )
    assert len(TIMES) == 11


@pytest.mark.parametrize("name", TIMES)
@pytest.mark.parametrize("value", [60, 1.5, "1 s", None])
def test_times_are_timedeltas(name, value) -> None:
    """A number of seconds, or nothing, is a TypeError that begins with the argument's name."""
    with pytest.raises(TypeError, match=f"^{name} must be timedelta, not "):
        check(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("store_factory", dict),
        ("store_factory", StandInStore()),
        ("store_factory", None),
        ("store_kwargs", [1]),
        ("store_kwargs", {1: 2}),
        ("initialize", SomeAbort()),
        ("initialize", lambda state: state),
        ("abort", SomeAbort),
        ("abort", Compose(lambda state: state)),
        ("finalize", 3),
        ("health_check", "gpu"),
        ("completion", SomeAbort()),
        ("terminate", SomeAbort()),
        ("rank_assignment", None),
        ("rank_assignment", StandInAssignment),
        ("rank_filter", StandInAssignment()),
        ("monitor_process_logfile", 3),
        ("monitor_process_pidfile", b"/tmp/pid"),
        ("enabled", 1),
    ],
)
def test_wrong_types_are_named(name, value) -> None:
    """A wrong type is a TypeError that begins with the argument's name."""
    with pytest.raises(TypeError, match=f"^{name} must be "):
        check(**{name: value})


def test_groups_are_filtered_before_ranks_are_renumbered() -> None:
    """Where nothing renumbers after it a filter of groups would do nothing: it is refused."""
    groups = FilterCountGroupedByKey("rack", bool)
    check(rank_assignment=Compose(ActiveWorldSizeDivisibleBy(2), ShiftRanks(), groups))
    for arguments in (
        {"rank_assignment": groups},
        {"rank_assignment": Compose(groups, ShiftRanks())},
        {"rank_assignment": Compose(ActiveWorldSizeDivisibleBy(2), groups)},
        {"rank_assignment": ShiftRanks(), "rank_filter": groups},
        {
            "rank_assignment": ShiftRanks(),
            "rank_filter": Compose(ActiveWorldSizeDivisibleBy(2), groups),
        },
    ):
        with pytest.raises(ValueError, match=r"must be followed by .* new numbers.*rank_filter="):
            check(**arguments)


def test_both_kinds_of_rank_filter_are_taken() -> None:
    """The present and the older kind of filter pass."""
    with pytest.warns(DeprecationWarning, match="MaxActiveWorldSize"):
        older = MaxActiveWorldSize(4)
    check(rank_filter=older)
    check(rank_filter=StandInFilter())


@pytest.mark.parametrize(
    ("relation", "changes"),
    [
        ("soft_timeout < hard_timeout < barrier_timeout", {"soft_timeout": 90}),
        ("soft_timeout < hard_timeout < barrier_timeout", {"hard_timeout": 120}),
        (
            "monitor_process_interval < barrier_timeout",
            {"monitor_process_interval": 130, "soft_timeout": 10},
        ),
        ("monitor_process_interval < heartbeat_timeout", {"monitor_process_interval": 30}),
        (
            "monitor_process_interval < soft_timeout",
            {"monitor_process_interval": 20, "soft_timeout": 20},
        ),
        ("heartbeat_timeout < barrier_timeout", {"heartbeat_timeout": 120}),
        ("heartbeat_interval < heartbeat_timeout", {"heartbeat_interval": 30}),
        ("monitor_thread_interval < soft_timeout", {"monitor_thread_interval": 60}),
        ("progress_watchdog_interval < soft_timeout", {"progress_watchdog_interval": 61}),
    ],
)
def test_broken_relations_are_quoted(relation, changes) -> None:
    """A relation that does not hold is a ValueError with its text and all its values."""
    times = {name: seconds(value) for name, value in changes.items()}
    with pytest.raises(ValueError, match="does not hold") as caught:
        check(**times)
    assert relation in str(caught.value)
    values = {**{field.name: field.default for field in dataclasses.fields(Settings)}, **times}
    for name in relation.split(" < "):
        assert f"{name}={values[name]}" in str(caught.value)


@pytest.mark.parametrize("name", TIMES)
def test_no_time_is_negative(name) -> None:
    """A negative time is a ValueError that names it."""
    with pytest.raises(ValueError, match=f"{name}=-1 day"):
        check(**{name: timedelta(days=-1)})


@pytest.mark.parametrize(
    "name", ["monitor_process_interval", "heartbeat_interval", "progress_watchdog_interval"]
)
def test_periods_are_not_zero(name) -> None:
    """A period of zero is a ValueError that names it: it would be a loop that never rests."""
    with pytest.raises(ValueError, match=f"^{name} > 0 does not hold: {name}=0:00:00$"):
        check(**{name: timedelta(0)})


@pytest.mark.parametrize("name", ["monitor_process_logfile", "monitor_process_pidfile"])
@pytest.mark.parametrize("path", ["log", "./log", ""])
def test_paths_are_absolute(name, path) -> None:
    """A relative path is a ValueError that names the argument: the monitor runs elsewhere."""
    with pytest.raises(ValueError, match=f"{name}="):
        check(**{name: path})


def test_torch_must_have_distributed() -> None:
    """A torch built without `torch.distributed` is a ValueError that says so."""
    with pytest.raises(ValueError, match=r"torch\.distributed\.is_available\(\)"):
        check(available=False)


@pytest.mark.parametrize(
    ("kwargs", "error", "said"),
    [
        ({"prot": 1}, TypeError, "store_kwargs of TCPStore: .*'prot'"),
        ({"port": "29500"}, TypeError, r"store_kwargs\['port'\] must be an integer, not '29500'"),
        ({"port": True}, TypeError, r"store_kwargs\['port'\] must be an integer"),
        ({"port": 0}, ValueError, r"store_kwargs\['port'\] must be at least 1"),
        ({"port": 70000}, ValueError, r"store_kwargs\['port'\] must be at most 65535"),
        ({"host_name": 5}, TypeError, r"store_kwargs\['host_name'\] must be a str"),
        ({"timeout": 5}, TypeError, r"store_kwargs\['timeout'\] must be a timedelta"),
        ({"timeout": None}, TypeError, r"store_kwargs\['timeout'\] must be a timedelta"),
    ],
)
def test_arguments_of_the_store_are_checked(kwargs, error, said) -> None:
    """A mistaken argument of the store is named when the wrapper is made, used or not."""
    with pytest.raises(error, match=f"^{said}"):
        Wrapper(enabled=False, store_kwargs=kwargs)


@pytest.mark.parametrize("name", TIMES)
def test_never_is_a_time(name) -> None:
    """`timedelta.max` passes, and becomes a time that poll and sums of times take."""
    times = dict.fromkeys(("soft_timeout", "hard_timeout", "barrier_timeout"), timedelta.max)
    settings = bounded(
        Settings(
            store_factory=TCPStore,
            rank_assignment=StandInAssignment(),
            **{**times, name: timedelta.max},
        )
    )
    assert seconds(3600) < getattr(settings, name) <= timedelta(milliseconds=2**31 - 1)
    assert settings.last_call_wait == seconds(1) or name == "last_call_wait"


def _later():
    yield


@pytest.mark.parametrize("function", [5, asyncio.sleep, _later])
def test_what_runs_later_is_not_wrapped(function) -> None:
    """Wrapped is what runs when it is called: no coroutine, no generator, and no number."""
    with pytest.raises(TypeError, match=r"^the wrapped function must "):
        Wrapper(enabled=False)(function)


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"RANK": "1"}, r"RANK=1 \(default 0\), WORLD_SIZE=1 \(default 1\)"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK must be less than WORLD_SIZE"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "WORLD_SIZE=0"),
        ({"WORLD_SIZE": "2"}, "^RANK is not set, though WORLD_SIZE=2$"),
    ],
)
def test_a_rank_without_a_place_waits_for_nobody(environ, said, monkeypatch) -> None:
    """RANK and WORLD_SIZE that do not fit each other are an error at once that names both."""
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=said):
        require_valid_rank(State.from_env())


def test_ranks_that_do_not_come_together_learn_why(monkeypatch) -> None:
    """One rank too many or too few at the start says what it may come from."""
    store = dist.HashStore()
    monkeypatch.setattr(rendezvous, "_next_call", 0)
    monkeypatch.setattr(rendezvous, "_connect", lambda *_: store)
    settings = Settings(
        store_factory=TCPStore,
        rank_assignment=StandInAssignment(),
        store_kwargs={"host_name": "127.0.0.1", "port": 1},
        barrier_timeout=seconds(0.05),
    )
    with pytest.raises(BarrierTimeout, match=r"1 of 2 ranks .* \(barrier_timeout\): .*WORLD_SIZE"):
        rendezvous.hold_rendezvous(settings, State(0, 2), {})
    rendezvous._next_call = 0
    rendezvous.hold_rendezvous(settings, State(0, 1), {})
    rendezvous._next_call = 0
    with pytest.raises(BarrierOverflow, match=r"2 ranks for 1 places: another job .*MASTER_PORT"):
        rendezvous.hold_rendezvous(settings, State(0, 1), {})
