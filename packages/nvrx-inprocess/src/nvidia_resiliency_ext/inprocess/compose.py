# SPDX-License-Identifier: Apache-2.0
"""Several callbacks as one: `Compose(a, b, c)(x)` is `a(b(c(x)))`. Knows nothing of callbacks."""

from __future__ import annotations

import inspect
import types
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

__all__ = ["Compose", "find_common_ancestor"]

_Member = TypeVar("_Member")


def find_common_ancestor(*instances: object) -> type:
    """Return the lowest common class of all instances.

    Classes are tried in the order of the first instance's; members of a `Compose` stand for it.

    Args:
        instances: The objects to compare.

    Raises:
        ValueError: There are no instances.
    """
    if not instances:
        raise ValueError("nothing was given, so there is no common class")
    return next(_common_ancestors(instances))


class Compose:
    """Calls its members one after the other, the last one first.

    What a member returns goes to the next; a tuple becomes its positional arguments. Members that
    take no arguments are called without. The object is also an instance of the lowest common class
    of its members, so that several `Abort` make one `Abort`.

    Args:
        instances: What is called.

    Attributes:
        instances: The members, in the order given.

    Raises:
        ValueError: There are no members.
        TypeError: A member cannot be called.

    Example:
        >>> from nvidia_resiliency_ext.inprocess import Compose
        >>> Compose(lambda x: x + 1, lambda x: x * 2)(5)
        11
    """

    instances: tuple[Callable[..., Any], ...]
    _without_arguments: tuple[bool, ...]

    # For a type checker the result is what the members have in common: it fits where they fit.
    def __new__(cls, *instances: _Member) -> _Member:  # type: ignore[misc]
        """Make an object of a class below `Compose` and the members' lowest common class."""
        if not instances:
            raise ValueError("Compose() needs at least one member")
        for instance in instances:
            if not callable(instance):
                raise TypeError(f"a member of Compose must be callable, {instance!r} is not")
        made: Any = _make(cls, instances)
        # Past a common class that forbids assignment, such as a frozen dataclass.
        object.__setattr__(made, "instances", instances)
        without = tuple(not _takes_arguments(each) for each in made.instances)
        object.__setattr__(made, "_without_arguments", without)
        return made  # type: ignore[no-any-return]

    if not TYPE_CHECKING:  # a type checker would look here for the type of the result

        def __init__(self, *instances: object) -> None:
            # Not the common class's: the members are initialised, this has nothing of theirs.
            del instances

    def __call__(self, *args: Any) -> Any:
        """Call the members from the last to the first.

        Args:
            args: The arguments of the last member.

        Returns:
            The return value of the first member.
        """
        result: Any = args
        pairs = zip(reversed(self.instances), reversed(self._without_arguments), strict=True)
        for instance, without_arguments in pairs:
            given = result if isinstance(result, tuple) else (result,)
            if without_arguments:
                given = ()
            result = instance(*given)
            if result is None and any(argument is not None for argument in given):
                warnings.warn(
                    f"{instance!r} got arguments and returned None; the next one gets None",
                    UserWarning,
                    stacklevel=2,
                )
        return result

    def __repr__(self) -> str:
        return f"Compose({', '.join(map(repr, self.instances))})"

    def __reduce__(self) -> tuple[Any, ...]:
        return Compose, self.instances

    __eq__ = object.__eq__
    __hash__ = object.__hash__


def members_of(*callbacks: Any) -> Iterator[Any]:
    """Yield callbacks in the order given, with the members of each `Compose` in its place."""
    for callback in callbacks:
        if isinstance(callback, Compose):
            yield from members_of(*callback.instances)
        else:
            yield callback


def _common_ancestors(instances: tuple[object, ...]) -> Iterator[type]:
    members = tuple(members_of(*instances))
    for candidate in type(members[0]).__mro__:
        if all(isinstance(member, candidate) for member in members):
            yield candidate


def _make(cls: type[Compose], instances: tuple[object, ...]) -> Compose:
    for ancestor in _common_ancestors(instances):
        bases = (cls,) if issubclass(cls, ancestor) else (cls, ancestor)
        try:
            # Functions, enums and the like cannot be subclassed; their next class is taken.
            made = types.new_class(cls.__name__, bases)
            return object.__new__(made)
        except TypeError:
            continue
    raise AssertionError("every class can be made from object")


def _takes_arguments(instance: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(instance).parameters.values()
    except (ValueError, TypeError):
        return True  # a builtin that does not tell
    keyword = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD)
    return any(parameter.kind not in keyword for parameter in parameters)
