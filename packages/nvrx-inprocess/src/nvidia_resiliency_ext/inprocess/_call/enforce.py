# SPDX-License-Identifier: Apache-2.0
"""Checks of arguments whose message quotes what the caller wrote. It reads the caller's frame."""

from __future__ import annotations

import ast
import linecache
import sys
import types
from typing import Any

__all__ = ["enforce_subclass", "enforce_type", "enforce_value"]

_SHOWN = 200


def enforce_subclass(argument: str, class_or_tuple: type | tuple[type, ...]) -> None:
    """Check that a local variable of the caller is a subclass.

    Args:
        argument: Its name.
        class_or_tuple: Of what.

    Raises:
        TypeError: It is none; the message names it.
    """
    value = _local(argument, sys._getframe(1))  # noqa: SLF001 - the only way to the caller
    if not isinstance(value, type) or not issubclass(value, class_or_tuple):
        raise TypeError(f"{argument} must be a subclass of {_names(class_or_tuple)}, not {value!r}")


def enforce_type(argument: str, class_or_tuple: type | tuple[type, ...]) -> None:
    """Check the type of a local variable of the caller.

    Args:
        argument: Its name.
        class_or_tuple: What it must be.

    Raises:
        TypeError: It is something else; the message names it.
    """
    value = _local(argument, sys._getframe(1))  # noqa: SLF001 - the only way to the caller
    if not isinstance(value, class_or_tuple):
        raise TypeError(
            f"{argument} must be {_names(class_or_tuple)}, not {type(value).__name__} "
            f"{repr(value)[:_SHOWN]}"
        )


def enforce_value(condition: object) -> None:
    """Check a condition.

    Args:
        condition: The condition, already evaluated.

    Raises:
        ValueError: The condition is false; the message shows its source, if available, and its
            values.
    """
    if not condition:
        raise ValueError(_describe(sys._getframe(1)))  # noqa: SLF001 - the only way to the caller


def _local(argument: str, frame: types.FrameType) -> Any:
    if argument not in frame.f_locals:
        raise NameError(f"{frame.f_code.co_name}() has no {argument!r}")
    return frame.f_locals[argument]


def _names(class_or_tuple: type | tuple[type, ...]) -> str:
    classes = class_or_tuple if isinstance(class_or_tuple, tuple) else (class_or_tuple,)
    return " or ".join("None" if cls is types.NoneType else cls.__name__ for cls in classes)


def _describe(frame: types.FrameType) -> str:
    expression = _condition_at(frame)
    if expression is None:
        code = frame.f_code
        place = f"{code.co_filename}:{frame.f_lineno}"
        return f"a condition does not hold in {code.co_name}() ({place})"
    values = []
    names = dict.fromkeys(node.id for node in ast.walk(expression) if isinstance(node, ast.Name))
    for name in names:
        value = frame.f_locals.get(name, frame.f_globals.get(name, types))
        if not isinstance(value, types.ModuleType) and not callable(value):
            values.append(f"{name}={str(value)[:_SHOWN]}")
    text = f"{ast.unparse(expression)} does not hold"
    return f"{text}: {', '.join(values)}" if values else text


def _condition_at(frame: types.FrameType) -> ast.expr | None:
    lines = linecache.getlines(frame.f_code.co_filename, frame.f_globals)
    try:
        tree = ast.parse("".join(lines))
    except (SyntaxError, ValueError):
        return None
    found = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and len(node.args) == 1
        and ast.unparse(node.func).rpartition(".")[2] == enforce_value.__name__
        and node.lineno <= frame.f_lineno <= (node.end_lineno or node.lineno)
    ]
    return found[0].args[0] if len(found) == 1 else None
