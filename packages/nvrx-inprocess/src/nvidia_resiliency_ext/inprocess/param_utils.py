# SPDX-License-Identifier: Apache-2.0
"""Put the `CallWrapper` into a function's arguments by annotation or name; check arguments.

An annotation may be a class, a union, or the text of one (`from __future__ import annotations`). A
text is read as an expression whose names are looked up, and never run; a name that is missing at
run time, as after `if TYPE_CHECKING:`, is compared by its last part.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import functools
import importlib
import inspect
import linecache
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, ForwardRef, Optional, Union

__all__ = [
    "check_type", "count_type_in_params", "enforce_subclass", "enforce_type", "enforce_value",
    "substitute_param_value",
]  # fmt: skip

_DEEPEST = 10  # aliases of aliases; a text may name itself
_FORMS = {"Optional": Optional, "Union": Union, "Annotated": Annotated}
_MISSING = object()


class _Unknown:
    """A name that cannot be looked up."""

    def __init__(self, name: str) -> None:
        self.name = name


def means_class(annotation: object, cls: type, scope: Mapping[str, object]) -> bool:
    """Return whether an annotation is the class, or a union with it; `scope` has a text's names."""
    return any(
        member.name == cls.__name__ if isinstance(member, _Unknown) else member is cls
        for member in _members(annotation, scope)
    )


def is_open(annotation: object, scope: Mapping[str, object]) -> bool:
    """Return whether an annotation is missing, `Any` or `Optional[Any]`."""
    if annotation is inspect.Parameter.empty:
        return True
    found = _members(annotation, scope)
    members = [each for each in found if each is not None and each is not types.NoneType]
    return bool(members) and all(map(_is_any, members))


def signature_of(function: Callable[..., Any]) -> inspect.Signature | None:
    """Return a signature whose annotations may be texts; `None` for what does not tell its own."""
    try:
        if sys.version_info >= (3, 14):
            # Annotations are run there when asked for: names may be missing without an error.
            lenient = importlib.import_module("annotationlib").Format.FORWARDREF
            return inspect.signature(function, annotation_format=lenient)
        return inspect.signature(function)
    except (ValueError, TypeError):
        return None


def scope_of(function: Callable[..., Any]) -> dict[str, object]:
    """Return the names that a function's annotations can use, with their objects."""
    inner = _plain_function(function)
    if inner is None:
        return {}
    scope = dict(inner.__globals__)
    for name, cell in zip(inner.__code__.co_freevars, inner.__closure__ or (), strict=False):
        try:
            scope[name] = cell.cell_contents
        except ValueError:  # not yet bound
            continue
    return scope


def _plain_function(function: Any) -> types.FunctionType | None:
    for _ in range(_DEEPEST):
        function = inspect.unwrap(function)
        if isinstance(function, functools.partial):
            function = function.func
        elif isinstance(function, types.MethodType):
            function = function.__func__
        elif isinstance(function, type):
            function = inspect.getattr_static(function, "__init__", None)
        elif not isinstance(function, types.FunctionType):
            function = getattr(type(function), "__call__", None)  # noqa: B004 - asked for itself
        if isinstance(function, types.FunctionType) and not hasattr(function, "__wrapped__"):
            return function
    return None


def _is_any(member: object) -> bool:
    return member is Any or (isinstance(member, _Unknown) and member.name == "Any")


def _members(
    annotation: object, scope: Mapping[str, object], depth: int = _DEEPEST
) -> Iterator[object]:
    if depth == 0:
        return
    if isinstance(annotation, ForwardRef):
        annotation = annotation.__forward_arg__
    if isinstance(annotation, str):
        with contextlib.suppress(SyntaxError, ValueError, RecursionError, MemoryError):
            annotation = ast.parse(annotation.strip(), mode="eval").body
        if isinstance(annotation, ast.expr):
            yield from _members_of_node(annotation, scope, depth - 1)
        return
    origin = typing.get_origin(annotation)
    if origin is Union or origin is types.UnionType:
        for argument in typing.get_args(annotation):
            yield from _members(argument, scope, depth - 1)
    elif origin is Annotated:
        yield from _members(typing.get_args(annotation)[0], scope, depth - 1)
    elif sys.version_info >= (3, 12) and isinstance(annotation, typing.TypeAliasType):
        try:
            value = annotation.__value__
        except Exception:  # noqa: BLE001 - runs foreign code, such as a name that is not there
            return
        yield from _members(value, scope, depth - 1)
    else:
        yield annotation


def _members_of_node(node: ast.expr, scope: Mapping[str, object], depth: int) -> Iterator[object]:
    parts: list[ast.expr] = []
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        parts = [node.left, node.right]
    elif isinstance(node, ast.Constant):
        yield from _members(node.value, scope, depth)
    elif isinstance(node, (ast.Name, ast.Attribute)):
        found = _look_up(node, scope)
        if isinstance(found, _Unknown):
            yield found
        else:
            yield from _members(found, scope, depth)
    elif isinstance(node, ast.Subscript):
        parts = _parts_of_form(node, scope)
    for part in parts:
        if depth > 0:
            # A long union nests to the left: only what is looked up counts as deeper.
            yield from _members_of_node(part, scope, depth)


def _parts_of_form(node: ast.Subscript, scope: Mapping[str, object]) -> list[ast.expr]:
    form = _look_up(node.value, scope)
    if isinstance(form, _Unknown):
        form = _FORMS.get(form.name)
    inside = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    if form is Annotated:
        return inside[:1]
    if form is Optional:
        return [*inside, ast.Constant(None)]
    return inside if form is Union else []


def _look_up(node: ast.expr, scope: Mapping[str, object]) -> object:
    if isinstance(node, ast.Name):
        found = scope.get(node.id, getattr(builtins, node.id, _MISSING))
        return _Unknown(node.id) if found is _MISSING else found
    if isinstance(node, ast.Attribute):
        owner = _look_up(node.value, scope)
        if isinstance(owner, _Unknown):
            return _Unknown(node.attr)
        try:
            return getattr(owner, node.attr)
        except Exception:  # noqa: BLE001 - may run foreign code
            return _Unknown(node.attr)
    return _Unknown("")


_SHOWN = 200


def enforce_subclass(argument: str, class_or_tuple: type | tuple[type, ...]) -> None:
    """Check that the caller's local variable `argument` is a subclass of `class_or_tuple`.

    Raises:
        TypeError: It is none; the message names it.
    """
    value = _local(argument, sys._getframe(1))  # noqa: SLF001 - the only way to the caller
    if not isinstance(value, type) or not issubclass(value, class_or_tuple):
        raise TypeError(f"{argument} must be a subclass of {_names(class_or_tuple)}, not {value!r}")


def enforce_type(argument: str, class_or_tuple: type | tuple[type, ...]) -> None:
    """Check that the caller's local variable `argument` is an instance of `class_or_tuple`.

    Raises:
        TypeError: It is something else; the message names it.

    Example:
        >>> timeout_s = 5.0
        >>> enforce_type("timeout_s", (int, float))
    """
    value = _local(argument, sys._getframe(1))  # noqa: SLF001 - the only way to the caller
    if not isinstance(value, class_or_tuple):
        raise TypeError(
            f"{argument} must be {_names(class_or_tuple)}, not {type(value).__name__} "
            f"{repr(value)[:_SHOWN]}"
        )


def enforce_value(condition: object) -> None:
    """Check a `condition`, already evaluated.

    Raises:
        ValueError: It is false; the message shows its source, if available, and its values.
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


_NAMES = {"CallWrapper": frozenset({"inprocess_call_wrapper", "call_wrapper"})}
"""By class, the parameters that are meant for it even where their type says nothing."""
_COLLECTORS = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def check_type(annotation: object, cls: type) -> bool:
    """Return whether `annotation`, or its text, is `cls`, `Optional` of it, or a union with it."""
    return means_class(annotation, cls, {})


def count_type_in_params(fn: Callable[..., Any], cls: type) -> int:
    """Return how many parameters of `fn` are annotated with `cls`; 0 if it tells no signature."""
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
