# SPDX-License-Identifier: Apache-2.0
"""Several callbacks as one."""

import copy
import functools
import pickle
import warnings
from dataclasses import dataclass
from unittest import mock

import pytest

from nvidia_resiliency_ext.inprocess.abort import Abort
from nvidia_resiliency_ext.inprocess.compose import Compose, find_common_ancestor
from nvidia_resiliency_ext.inprocess.finalize import Finalize
from nvidia_resiliency_ext.inprocess.health_check import FaultCounter, HealthCheck
from nvidia_resiliency_ext.inprocess.initialize import Initialize, RetryController


class Noted(Abort):
    """Notes that it was called."""

    calls: list[str] = []  # noqa: RUF012 - one list for all

    def __init__(self, name: str = "") -> None:
        self.name = name

    def __call__(self, state):
        self.calls.append(self.name)
        return state


class OtherAbort(Abort):
    def __call__(self, state):
        return state


def add_one(x):
    return x + 1


def double(x):
    return x * 2


def test_last_is_called_first() -> None:
    """`Compose(a, b)(x)` is `a(b(x))`, also nested and for plain functions."""
    assert Compose(add_one, double)(5) == 11
    assert Compose(double, add_one)(5) == 12
    assert Compose(add_one)(5) == 6
    assert Compose(Compose(add_one, double), Compose(double, add_one))(1) == 9
    Noted.calls.clear()
    assert Compose(Noted("a"), Noted("b"), Noted("c"))("state") == "state"
    assert Noted.calls == ["c", "b", "a"]


def test_tuples_become_arguments() -> None:
    """A returned tuple is spread over the next member's parameters; the last one stays a tuple."""
    assert Compose(lambda a, b: a - b, lambda a: (a, 1))(5) == 4
    assert Compose(lambda a: (a, 1), lambda a, b: a + b)(5, 2) == (7, 1)
    assert Compose(lambda: "none", lambda _: ())(5) == "none"


def test_members_without_parameters_get_none() -> None:
    """Who takes no positional argument is called without, whatever came before."""
    called = []
    assert Compose(lambda: called.append(1) or 7)(5) == 7
    assert Compose(lambda *, key=3: key)(5) == 3
    assert Compose(functools.partial(add_one, 4))(9) == 5
    assert Compose(abs, int)("-5") == 5
    assert called == [1]


def test_lost_argument_warns() -> None:
    """A member that got an argument and returned None is named; None for None is in order."""
    with pytest.warns(UserWarning, match="forgetful"):
        assert Compose(add_nothing, forgetful)(5) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Compose(add_nothing, add_nothing)(None) is None
        assert Compose(lambda: None)(5) is None
        assert Compose(lambda *_: None)() is None


def forgetful(x):
    return None


def add_nothing(x):
    return x


def test_empty_compose_is_an_error() -> None:
    """There is nothing that an empty composition could be."""
    with pytest.raises(ValueError, match="at least one"):
        Compose()


@pytest.mark.parametrize("bad", [None, 3, "name", [add_one]])
def test_members_must_be_callable(bad) -> None:
    """A member that cannot be called is named at construction."""
    with pytest.raises(TypeError, match="callable"):
        Compose(add_one, bad)


def test_the_whole_is_of_the_members_kind() -> None:
    """It is a `Compose` and of the lowest class that all members share."""
    whole = Compose(Noted(), OtherAbort())
    assert isinstance(whole, Compose)
    assert isinstance(whole, Abort)
    assert not isinstance(whole, Noted)
    assert isinstance(Compose(Noted(), Noted()), Noted)
    assert isinstance(Compose(Compose(Noted(), OtherAbort()), Compose(OtherAbort())), Abort)
    assert not isinstance(Compose(Noted(), FaultCounter()), (Abort, HealthCheck))


def test_instances_are_as_given() -> None:
    """The members can be read, in order, nested ones as they are."""
    first, inner = Noted("a"), Compose(Noted("b"), Noted("c"))
    assert Compose(first, inner).instances == (first, inner)


def test_common_ancestor() -> None:
    """The lowest common class is found along the first member's classes."""
    assert find_common_ancestor(Noted(), OtherAbort()) is Abort
    assert find_common_ancestor(RetryController()) is RetryController
    assert find_common_ancestor(1, "x") is object
    assert find_common_ancestor(True, 2) is int
    assert find_common_ancestor(Compose(Noted(), OtherAbort()), OtherAbort()) is Abort
    with pytest.raises(ValueError, match="nothing"):
        find_common_ancestor()


@dataclass(frozen=True)
class FrozenAbort(Abort):
    """A member whose class forbids assignment and wants arguments."""

    size: int

    def __call__(self, state):
        return state


class Closed(Finalize):
    """A member whose class cannot have subclasses."""

    def __init_subclass__(cls) -> None:
        raise TypeError("closed")

    def __call__(self, state):
        return state


class Wide(Initialize):
    """A member whose class has another abstract method."""

    def __call__(self, state):
        return state


def test_unusual_classes_as_common_ancestor() -> None:
    """Frozen, closed and slotted classes can be composed, as what they can be."""
    whole = Compose(FrozenAbort(1), FrozenAbort(2))
    assert isinstance(whole, FrozenAbort)
    assert whole("state") == "state"
    assert len({whole, whole}) == 1
    assert whole != Compose(FrozenAbort(1), FrozenAbort(2))
    assert isinstance(Compose(Closed(), Closed()), Finalize)
    assert isinstance(Compose(Wide(), Wide()), Initialize)
    partial = Compose(functools.partial(add_one), functools.partial(double))
    assert partial(3) == 7


def test_stand_ins_can_be_members() -> None:
    """Mocks, which are callable and have no signature of their own, get the arguments."""
    member = mock.Mock(return_value=4)
    assert Compose(add_one, member)(3) == 5
    member.assert_called_once_with(3)


def test_errors_of_members_pass_unchanged() -> None:
    """What a member raises is what the caller gets, and the rest is not called."""

    def fail(x):
        raise KeyError(x)

    Noted.calls.clear()
    with pytest.raises(KeyError, match="5"):
        Compose(Noted("a"), fail)(5)
    assert Noted.calls == []


def test_copies_and_text() -> None:
    """It can be copied and sent like its members, and shows them."""
    whole = Compose(RetryController(3), RetryController(4))
    copied = copy.deepcopy(whole)
    assert [each.max_iterations for each in copied.instances] == [3, 4]
    assert isinstance(pickle.loads(pickle.dumps(whole)), RetryController)
    assert repr(Compose(abs, len)) == "Compose(<built-in function abs>, <built-in function len>)"
