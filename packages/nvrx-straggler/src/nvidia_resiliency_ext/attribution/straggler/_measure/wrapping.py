# SPDX-License-Identifier: Apache-2.0
"""Replaces attributes by timed callables and puts back exactly what was there."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from types import MethodType, ModuleType
from typing import Any

from nvidia_resiliency_ext.shared_utils.attribute_wrapping import WrappedAttribute

from .sections import SectionRegistry, timed_callable

logger = logging.getLogger("nvrx")


@dataclass(frozen=True, eq=False)
class CallableId:
    """A callable attribute of an object, class or module; compared by identity of the object.

    `str()` is the name of its section: `<module>.<name>`, `<module>.<Class>.<name>`, or
    `<Class>.<name>` for an instance.

    Example:
        >>> import math
        >>> str(CallableId(math, "sqrt"))
        'math.sqrt'

    Args:
        obj: What has the attribute.
        name: The attribute.
        arg_filter_fn: Accepted for compatibility, has no effect.
        extra_args_fn: Accepted for compatibility, has no effect.
        ignored_args: Accepted for compatibility, has no effect.
    """

    obj: object
    name: str
    arg_filter_fn: Callable[[inspect.BoundArguments], bool] | None = None
    extra_args_fn: Callable[[inspect.BoundArguments], dict[str, Any]] | None = None
    ignored_args: tuple[str, ...] | None = None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, CallableId):
            return NotImplemented
        return self.obj is other.obj and self.name == other.name

    def __hash__(self) -> int:
        return hash((id(self.obj), self.name))

    def __str__(self) -> str:
        if isinstance(self.obj, ModuleType):
            return f"{self.obj.__name__}.{self.name}"
        if isinstance(self.obj, type):
            return f"{self.obj.__module__}.{self.obj.__name__}.{self.name}"
        return f"{type(self.obj).__name__}.{self.name}"


class Wrapping:
    """The attributes that are wrapped at present, and what stood in their places.

    Attributes:
        originals: What stood in the object's own `__dict__`; absent ones have the inherited value.
    """

    def __init__(self) -> None:
        self.originals: dict[CallableId, Any] = {}
        self._wrapped: dict[CallableId, WrappedAttribute] = {}

    def wrap(
        self, callable_ids: Iterable[CallableId], registry: SectionRegistry, *, profile_cuda: bool
    ) -> None:
        """Replace attributes by timed callables, all or none; wrapped ones stay as they are.

        Raises:
            AttributeError: There is no such attribute, or it cannot be set.
            TypeError: It is not callable.
        """
        known = len(self._wrapped)
        try:
            for callable_id in callable_ids:
                self._wrap(callable_id, registry, profile_cuda=profile_cuda)
        except BaseException:
            self._restore(list(self._wrapped)[known:])
            raise

    def _wrap(
        self, callable_id: CallableId, registry: SectionRegistry, *, profile_cuda: bool
    ) -> None:
        if not isinstance(callable_id, CallableId):
            raise TypeError(
                f"wrap_callables: {callable_id!r} is no CallableId; give a list such as"
                " [CallableId(trainer, 'train_step')]"
            )
        obj, name = callable_id.obj, callable_id.name
        if callable_id in self._wrapped:
            logger.debug("straggler: %s is wrapped already", callable_id)
            return
        if not callable(getattr(obj, name)):
            raise TypeError(f"{callable_id} is {getattr(obj, name)!r}, which cannot be called")
        section_name = str(callable_id)

        def replacement(wrapped: WrappedAttribute) -> Any:
            def timed(function: Callable[..., Any]) -> Callable[..., Any]:
                section = registry.add(section_name, _definition_place(function))
                return timed_callable(
                    function, section, registry, wrapped, profile_cuda=profile_cuda
                )

            return _of_the_same_kind(callable_id, wrapped.original, timed)

        wrapped = WrappedAttribute(obj, name, replacement)
        self._wrapped[callable_id] = wrapped
        self.originals[callable_id] = wrapped.original
        if any(str(other) == section_name and other.obj is not obj for other in self._wrapped):
            logger.warning(
                "straggler: two objects are wrapped as %r: their times are mixed", section_name
            )

    def restore(self) -> None:
        """Put back everything that is wrapped; what cannot be put back does not stop the rest.

        Raises:
            AttributeError: An attribute can no longer be set; all others are restored.
        """
        self._restore(list(self._wrapped))

    def _restore(self, callable_ids: list[CallableId]) -> None:
        with ExitStack() as stack:
            for callable_id in callable_ids:
                stack.callback(self._wrapped.pop(callable_id).restore)
                del self.originals[callable_id]


def _of_the_same_kind(
    callable_id: CallableId, raw: Any, timed: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Any:
    """Return the timed replacement of an attribute, of the same kind as `raw`."""
    obj, name = callable_id.obj, callable_id.name
    if isinstance(obj, ModuleType):
        return timed(raw)
    if isinstance(obj, type):
        if isinstance(raw, staticmethod | classmethod):
            return type(raw)(timed(raw.__func__))
        # An object that does not bind itself to an instance must go on not doing so.
        return timed(raw) if hasattr(raw, "__get__") else staticmethod(timed(raw))
    bound = getattr(obj, name)
    if isinstance(bound, MethodType):
        # A method, unlike a closure, follows its object into copies.
        return MethodType(timed(bound.__func__), bound.__self__)
    return timed(bound)


def _definition_place(function: Callable[..., Any]) -> str:
    code = getattr(inspect.unwrap(function), "__code__", None)
    return "<callable>" if code is None else f"{code.co_filename}:{code.co_firstlineno}"
