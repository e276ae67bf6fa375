# SPDX-License-Identifier: Apache-2.0
"""Checks made from annotations: does a decoded value fit the field of a dataclass?

Messages come from peers, so a field declared `int` must not arrive as a list. It knows the
annotations that messages use and refuses others when the type is first used.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import sys
import types
import typing
from collections.abc import Callable, Mapping

__all__ = ["Check", "field_checks"]

Check = Callable[[object], bool]


def field_checks(kind: type) -> Mapping[str, Check]:
    """Return a check for each field of a dataclass that its constructor takes.

    Raises:
        TypeError: An annotation cannot be resolved, or is of a kind that no message may have.
    """
    checks = {}
    for field in dataclasses.fields(kind):
        if field.init:
            try:
                checks[field.name] = _check(_resolve(field.type, kind))
            except TypeError as error:
                raise TypeError(f"field {kind.__name__}.{field.name}: {error}") from error
    return checks


class _Names(dict[str, object]):
    """Names that an annotation may use although its module imports them for type checkers only."""

    def __missing__(self, name: str) -> object:
        for module in (collections.abc, typing):
            if hasattr(module, name):
                value: object = getattr(module, name)
                return value
        raise KeyError(name)


def _resolve(annotation: object, kind: type) -> object:
    if not isinstance(annotation, str):
        return annotation
    # An inherited field means the names of the module that declares it.
    modules = (sys.modules.get(base.__module__) for base in kind.__mro__)
    for module in modules:
        try:
            # The text is our own source code, never a peer's.
            return eval(annotation, {}, _Names(vars(module) if module else {}))  # noqa: S307
        except NameError:
            continue
    raise TypeError(f"annotation {annotation!r} names something unknown")


def _check(annotation: object) -> Check:
    origin = typing.get_origin(annotation)
    arguments = typing.get_args(annotation)
    if annotation in (typing.Any, object):
        return lambda _: True
    if annotation in (None, type(None)):
        return lambda value: value is None
    if origin in (typing.Union, types.UnionType):
        choices = [_check(argument) for argument in arguments]
        return lambda value: any(choice(value) for choice in choices)
    if origin is typing.Literal:
        return lambda value: any(
            type(value) is type(allowed) and value == allowed for allowed in arguments
        )
    if origin is typing.Annotated:
        return _check(arguments[0])
    if hasattr(annotation, "__supertype__"):  # typing.NewType
        return _check(annotation.__supertype__)
    if hasattr(annotation, "__value__"):  # the type statement
        return _check(annotation.__value__)
    return _check_class(origin if origin is not None else annotation, arguments)


def _check_class(kind: object, arguments: tuple[object, ...]) -> Check:
    if not isinstance(kind, type):
        raise TypeError(f"no message can hold {kind!r}")
    if kind is float:
        # As type checkers have it, an integer is a float.
        return lambda value: isinstance(value, (float, int))
    if kind is tuple and arguments:
        return _check_tuple(arguments)
    if issubclass(kind, collections.abc.Mapping) and arguments:
        key, item = (_check(argument) for argument in arguments)
        return lambda value: (
            isinstance(value, kind)
            and isinstance(value, dict)
            and all(key(k) and item(v) for k, v in value.items())
        )
    if issubclass(kind, collections.abc.Iterable) and len(arguments) == 1:
        element = _check(arguments[0])
        return lambda value: (
            isinstance(value, kind)
            and isinstance(value, (list, tuple, set, frozenset))
            and all(element(v) for v in value)
        )
    return lambda value: isinstance(value, kind)


def _check_tuple(arguments: tuple[object, ...]) -> Check:
    if len(arguments) == 2 and arguments[1] is Ellipsis:  # noqa: PLR2004
        every = _check(arguments[0])
        return lambda value: isinstance(value, tuple) and all(every(v) for v in value)
    each = [_check(argument) for argument in arguments if argument != ()]
    return lambda value: (
        isinstance(value, tuple)
        and len(value) == len(each)
        and all(check(v) for check, v in zip(each, value, strict=True))
    )
