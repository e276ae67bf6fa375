# SPDX-License-Identifier: Apache-2.0
"""Gives the wrapped function its `CallWrapper`, by annotation or by name; and checks of arguments.

How an annotation is read is in `_call/annotations.py`.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from ._call.annotations import is_open, means_class, scope_of, signature_of
from ._call.enforce import enforce_subclass, enforce_type, enforce_value

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = [
    "check_type",
    "count_type_in_params",
    "enforce_subclass",
    "enforce_type",
    "enforce_value",
    "substitute_param_value",
]

_NAMES = {"CallWrapper": frozenset({"inprocess_call_wrapper", "call_wrapper"})}
"""By class, the parameters that are meant for it even where their type says nothing."""

_COLLECTORS = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def check_type(annotation: object, cls: type) -> bool:
    """Say whether an annotation is a class, `Optional` of it, or a union with it.

    Args:
        annotation: Anything; also the text of an annotation.
        cls: The class. In a text it goes by its own name.
    """
    return means_class(annotation, cls, {})


def count_type_in_params(fn: Callable[..., Any], cls: type) -> int:
    """Return how many parameters of a function are annotated with a class.

    Args:
        fn: The function; whatever tells no signature has no parameters.
        cls: The class.
    """
    signature = signature_of(fn)
    if signature is None:
        return 0
    scope = scope_of(fn)
    return sum(means_class(each.annotation, cls, scope) for each in signature.parameters.values())


def substitute_param_value(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    subs: Mapping[type, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call with defaults filled in and values put in by type.

    A parameter annotated with a key of `subs` gets its value, whatever was passed. So does, for a
    class named `CallWrapper`, a parameter named `inprocess_call_wrapper` or `call_wrapper` that was
    not passed and has no annotation, `Any` or `Optional[Any]`.

    Args:
        fn: What is to be called.
        args: Positional arguments.
        kwargs: Keyword arguments.
        subs: Values by class.

    Raises:
        TypeError: The arguments do not fit the function, as if it had been called.
    """
    signature = signature_of(fn)
    if signature is None:
        return tuple(args), dict(kwargs)
    scope = scope_of(fn)
    bound = signature.bind_partial(*args, **kwargs)
    passed = frozenset(bound.arguments)
    bound.apply_defaults()
    for name, parameter in signature.parameters.items():
        if parameter.kind in _COLLECTORS:
            continue
        for cls, value in subs.items():
            is_named = name not in passed and name in _NAMES.get(cls.__name__, ())
            if means_class(parameter.annotation, cls, scope) or (
                is_named and is_open(parameter.annotation, scope)
            ):
                bound.arguments[name] = value
    signature.bind(*bound.args, **bound.kwargs)
    return bound.args, bound.kwargs
