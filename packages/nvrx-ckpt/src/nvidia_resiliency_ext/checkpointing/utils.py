# SPDX-License-Identifier: Apache-2.0
"""Helpers around saves: timing, copies to the host, comparison of nested states."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import gc
import logging
import time
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = [
    "debug_msg",
    "debug_time",
    "dict_list_map_outplace",
    "diff",
    "logger_stack",
    "preload_tensors",
    "wrap_for_async",
]

logger = logging.getLogger(__name__)

_R = TypeVar("_R")
_Path = tuple[object, ...]
_Difference = tuple[list[Any], list[Any], list[Any]]

_names: contextvars.ContextVar[tuple[str, ...]] = contextvars.ContextVar("names", default=())
_loggers: contextvars.ContextVar[tuple[logging.Logger, ...]] = contextvars.ContextVar(
    "loggers", default=()
)


@contextlib.contextmanager
def logger_stack(
    name: str | None = None, current_logger: logging.Logger | None = None
) -> Iterator[tuple[str, logging.Logger]]:
    """Add a name and a logger for messages inside the block; each thread has its own.

    Args:
        name: Appended to the dotted name; None: nothing is.
        current_logger: Logger to use from here on; default the surrounding one.

    Yields:
        The dotted name, and the logger in force.
    """
    names = _names.set((*_names.get(), name) if name else _names.get())
    loggers = _loggers.set((*_loggers.get(), current_logger) if current_logger else _loggers.get())
    try:
        yield ".".join(_names.get()), (_loggers.get() or (logger,))[-1]
    finally:
        _names.reset(names)
        _loggers.reset(loggers)


@contextlib.contextmanager
def debug_time(
    name: str,
    logger: logging.Logger | None = None,
    threshold: float = float("-inf"),
    level: int | None = None,
) -> Iterator[None]:
    """Log how long the block, or each call of the decorated function, took.

    Args:
        name: What is timed.
        logger: Where to log; default the one of `logger_stack`.
        threshold: Seconds below which nothing is logged. Default: all is logged.
        level: Default DEBUG, or WARNING where a threshold is given.

    Example:
        >>> with debug_time("gather", threshold=60.0):
        ...     total = sum(range(10))
    """
    if level is None:
        level = logging.DEBUG if threshold == float("-inf") else logging.WARNING
    with logger_stack(name, logger) as (stacked_name, last_logger):
        begin = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - begin
            if seconds >= threshold:
                last_logger.log(level, "%s took %.4fs", stacked_name, seconds)


def debug_msg(msg: str) -> None:
    """Log a message at DEBUG under the names of `logger_stack`.

    Args:
        msg: The message.
    """
    with logger_stack() as (stacked_name, last_logger):
        last_logger.debug("%s %s", stacked_name, msg)


def preload_tensors(state_dict: dict[Any, Any], non_blocking: bool = True) -> dict[Any, Any]:
    """Return a copy of a nested dict or list with tensors in private memory of the host.

    Copies from devices are complete when it returns.

    Args:
        state_dict: Nested dict and list; it is not changed.
        non_blocking: Let copies from several devices overlap. Default True.
    """
    import torch

    devices = set()

    def copy(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        value = value.detach()
        if value.device.type == "cpu":
            return value.clone()
        if value.is_cuda:
            devices.add(value.device)
        return value.to("cpu", non_blocking=non_blocking and value.is_cuda)

    copied: dict[Any, Any] = dict_list_map_outplace(copy, state_dict)
    for device in devices:
        torch.cuda.synchronize(device)
    return copied


@contextlib.contextmanager
def _disable_gc() -> Iterator[None]:
    """Switch the garbage collector off inside the block, and on again if it was on."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def wrap_for_async(fn: Callable[..., _R]) -> Callable[..., _R]:
    """Return `fn(state_dict, *args, **kwargs)` that runs without garbage collection."""

    @functools.wraps(fn)
    def wrapped(state_dict: Any, *args: Any, **kwargs: Any) -> _R:
        with _disable_gc():
            return fn(state_dict, *args, **kwargs)

    return wrapped


def dict_list_map_outplace(f: Callable[[Any], Any], x: Any) -> Any:
    """Return nested dicts and lists rebuilt with a function applied to each leaf.

    Args:
        f: Takes a leaf and returns its replacement.
        x: The structure; anything that is no dict or list is a leaf.
    """
    if isinstance(x, dict):
        return {key: dict_list_map_outplace(f, value) for key, value in x.items()}
    if isinstance(x, list):
        return [dict_list_map_outplace(f, value) for value in x]
    return f(x)


def diff(x1: Any, x2: Any, prefix: _Path = ()) -> _Difference:
    """Compare two nested states.

    Args:
        x1: Left state: dicts, lists, tuples, arrays, tensors, other values.
        x2: Right state.
        prefix: Where they stand in a larger one.

    Returns:
        Paths that only the left one has, paths that only the right one has, and mismatches as
        `(path, type of left, type of right)`.

    Example:
        >>> diff({"step": 1, "lr": 0.1}, {"step": 2})
        ([('lr',)], [], [(('step',), <class 'int'>, <class 'int'>)])
    """
    if isinstance(x1, dict) and isinstance(x2, dict):
        only_left = [(*prefix, key) for key in x1 if key not in x2]
        only_right = [(*prefix, key) for key in x2 if key not in x1]
        common = [(key, x1[key], x2[key]) for key in x1 if key in x2]
    elif _is_sequence(x1) and type(x1) is type(x2):
        size = min(len(x1), len(x2))
        only_left = [(*prefix, index) for index in range(size, len(x1))]
        only_right = [(*prefix, index) for index in range(size, len(x2))]
        common = [(index, x1[index], x2[index]) for index in range(size)]
    else:
        same = _same(x1, x2)
        return [], [], [] if same else [(prefix, type(x1), type(x2))]
    mismatch: list[Any] = []
    for key, left, right in common:
        parts = diff(left, right, (*prefix, key))
        only_left += parts[0]
        only_right += parts[1]
        mismatch += parts[2]
    return only_left, only_right, mismatch


def _is_sequence(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return True
    return type(value).__name__ == "ndarray" and value.ndim > 0


def _same(left: Any, right: Any) -> bool:
    import torch

    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        if left.shape != right.shape or left.dtype != right.dtype:
            return False
        return bool(torch.equal(left.detach().cpu(), right.detach().cpu()))
    if hasattr(left, "replica_id") and type(left) is type(right):
        return _same(left.data, right.data)
    try:
        return not bool(left != right)
    except (ValueError, RuntimeError, TypeError):
        return False
