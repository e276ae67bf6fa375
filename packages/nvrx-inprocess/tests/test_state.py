# SPDX-License-Identifier: Apache-2.0
"""Where a rank stands, and the snapshot that callbacks get."""

import dataclasses
import gc
import os
import pickle
import threading
import typing
import weakref
from pathlib import Path

import pytest

from nvidia_resiliency_ext.inprocess import state as state_module
from nvidia_resiliency_ext.inprocess.state import FrozenState, Mode, State, freeze_dataclass


class TwoArgumentsError(Exception):
    """Cannot be copied: its constructor wants more than `args` holds."""

    def __init__(self, first: object, second: object) -> None:
        super().__init__(f"{first} {second}")
        self.second = second


@pytest.fixture
def env(monkeypatch):
    """Put back the ranks of the environment after the test."""
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "x")
        monkeypatch.delenv(name)
    return monkeypatch


def test_modes_keep_their_order() -> None:
    """The members of `Mode` are the contract's, in its order."""
    assert [mode.name for mode in Mode] == ["INITIALIZED", "ACTIVE", "INACTIVE", "TERMINATED"]


def test_initial_numbers_default_to_the_present_ones() -> None:
    """Who gives no initial rank and world size starts with the present ones."""
    state = State(3, 8)
    assert (state.initial_rank, state.initial_world_size) == (3, 8)
    assert (State(3, 8, initial_rank=5).initial_rank, State(3, 8).mode) == (5, Mode.INITIALIZED)


@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, (0, 1)), ({"RANK": "3", "WORLD_SIZE": "8"}, (3, 8)), ({"WORLD_SIZE": " 2 "}, (0, 2))],
)
def test_from_env(env, given, expected) -> None:
    """Rank and world size come from the environment, and are 0 of 1 without it."""
    for name, value in given.items():
        env.setenv(name, value)
    state = State.from_env()
    assert (state.rank, state.world_size) == expected


@pytest.mark.parametrize("value", ["", "None", "-1", "1.0", "٣", "9" * 5000])
def test_bad_environment_is_named(env, value) -> None:
    """What is not a number in the environment is an error that names the variable."""
    env.setenv("RANK", value)
    with pytest.raises(ValueError, match="RANK="):
        State.from_env()


def test_active_numbers_are_exported(env) -> None:
    """The function finds its active rank and the active world size in the environment."""
    State(5, 8, active_rank=2, active_world_size=4).set_distributed_vars()
    assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == ("2", "4")


def test_reserve_rank_finds_numbers_in_the_environment(env) -> None:
    """A rank without active rank gets a pair that fits, never the word None."""
    state = State(5, 6, None, 4, initial_rank=7, initial_world_size=8, mode=Mode.INACTIVE)
    state.set_distributed_vars()
    assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == ("7", "8")
    assert State.from_env() == State(7, 8)


def test_advance_begins_the_next_iteration_without_exception() -> None:
    """The iteration counts up, and nothing of the old one is kept alive."""

    class Model:
        pass

    model = Model()
    gone = weakref.ref(model)
    state = State(0, 1)
    try:
        _fail_with(model)
    except ValueError as error:
        state.fn_exception = error
    del model
    gc.collect()
    assert gone() is not None, "the frames of the traceback hold it"
    state.advance()
    assert (state.iteration, state.fn_exception) == (1, None)
    gc.collect()
    assert gone() is None


def _fail_with(model: object) -> None:
    raise ValueError("failed")


@pytest.mark.parametrize(
    "exception",
    [TwoArgumentsError("a", threading.Lock()), ValueError(threading.Lock()), OSError(1, "x")],
)
def test_snapshot_shares_the_exception(exception) -> None:
    """Also an exception that cannot be copied, or holds a lock, is in the snapshot as it is."""
    state = State(1, 2, 1, 2, fn_exception=exception, iteration=4, mode=Mode.ACTIVE)
    frozen = state.freeze()
    assert frozen.fn_exception is exception
    assert vars(frozen) == vars(state)


def test_snapshot_of_a_tensor_in_an_exception_is_no_copy() -> None:
    """A tensor in an exception stays where it is."""
    torch = pytest.importorskip("torch")
    tensor = torch.zeros(3, requires_grad=True) * 2  # not a leaf: deep copies of it fail
    frozen = State(0, 1, fn_exception=ValueError(tensor)).freeze()
    assert frozen.fn_exception is not None
    assert frozen.fn_exception.args[0] is tensor


def test_snapshot_is_frozen_and_does_not_follow() -> None:
    """Assignment fails, and what happens to the state later does not show."""
    state = State(1, 2)
    frozen = state.freeze()
    state.rank = 0
    assert frozen.rank == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        frozen.rank = 5  # type: ignore[misc]
    assert not isinstance(frozen, State)


def test_frozen_state_has_the_fields_of_state() -> None:
    """Names, defaults and types are the same, also in what type checkers see."""
    pairs = zip(dataclasses.fields(State), dataclasses.fields(FrozenState), strict=True)
    for field, frozen in pairs:
        assert (field.name, field.default, field.type) == (frozen.name, frozen.default, frozen.type)
    source = Path(state_module.__file__).read_text()
    declared = source.partition("class FrozenState:")[2].partition("else:")[0]
    for field in dataclasses.fields(State):
        assert f"{field.name}: {field.type}" in declared
    assert typing.get_type_hints(FrozenState)["mode"] is Mode


def test_frozen_state_can_be_pickled() -> None:
    """A snapshot can be sent to another process, if its exception can."""
    frozen = State(1, 2, fn_exception=None).freeze()
    assert pickle.loads(pickle.dumps(frozen)) == frozen


def test_freeze_dataclass_keeps_factories_and_refuses_other_classes() -> None:
    """Any dataclass can be frozen, other classes are a TypeError."""

    @dataclasses.dataclass
    class Box:
        size: int
        items: list[int] = dataclasses.field(default_factory=list, repr=False)

    frozen = freeze_dataclass(Box)(1)
    assert repr(frozen).endswith("FrozenBox(size=1)")
    assert frozen.items == []
    with pytest.raises(TypeError):
        freeze_dataclass(int)


def test_copy_from_takes_the_named_fields() -> None:
    """All fields by default, else only the named ones; an unknown name changes nothing."""
    state, other = State(0, 4), State(3, 8, 3, 8, iteration=2)
    state.copy_from(other, ["rank"])
    assert (state.rank, state.world_size) == (3, 4)
    with pytest.raises(ValueError, match="'colour'"):
        state.copy_from(other, ["world_size", "colour"])
    assert state.world_size == 4
    state.copy_from(other.freeze())
    assert state == other
