# SPDX-License-Identifier: Apache-2.0
"""Small helpers for log lines and versions; nothing here changes anything."""

from __future__ import annotations

import contextlib
import logging
import re
import time
from collections.abc import Iterable, Iterator
from typing import Any

from nvidia_resiliency_ext.shared_utils.rank_sets import format_ranks

from . import _inputs
from .state import FrozenState, State

__all__ = [
    "Logging",
    "find_nearest_handler",
    "format_exc",
    "format_rank_set",
    "format_rank_set_brief",
    "format_rank_set_verbose",
    "log_exc",
    "log_exec",
    "torch_older_than",
]

logger = logging.getLogger("nvrx")

_LONGEST_REPR = 2000


def torch_older_than(version: str) -> bool:
    """Return whether the running torch is older than `version`; its pre-releases count as it.

    Raises:
        ValueError: The version does not begin with a number.
    """
    import torch

    return _release(torch.__version__) < _release(version)


def format_exc(exc: BaseException) -> str:
    """Return an exception and its causes in one line: `KeyError('x') <- ValueError('y')`.

    Args:
        exc: The exception.

    Example:
        >>> from nvidia_resiliency_ext.inprocess.utils import format_exc
        >>> format_exc(ValueError("y"))
        "ValueError('y')"
    """
    texts: list[str] = []
    seen: set[int] = set()
    each: BaseException | None = exc
    while each is not None and id(each) not in seen:
        seen.add(id(each))
        texts.append(_safe_repr(each))
        each = each.__cause__ or (None if each.__suppress_context__ else each.__context__)
    return " <- ".join(texts)


def format_rank_set_verbose(ranks: Iterable[int]) -> str:
    """Return all ranks, runs shortened: `{1-3, 5}`.

    Args:
        ranks: The ranks.

    Example:
        >>> from nvidia_resiliency_ext.inprocess.utils import format_rank_set_verbose
        >>> format_rank_set_verbose([1, 2, 3, 5])
        '{1-3, 5}'
    """
    return "{" + format_ranks(ranks).replace(",", ", ") + "}"


def format_rank_set_brief(ranks: Iterable[int], max_show: int = 8) -> str:
    """Return at most `max_show` ranks: `{0, 1, 2, 3 ... 60, 61, 62, 63} (total: 64)`.

    Args:
        ranks: In any order; one that is given twice counts once.
        max_show: Ranks to show, half of them from the end. Default 8.

    Raises:
        ValueError: `max_show` is less than 2.
    """
    if max_show < 2:  # noqa: PLR2004 - the first and the last
        raise ValueError(f"the first and the last rank are always shown, so not {max_show=}")
    numbers = [str(rank) for rank in sorted(set(ranks))]
    if len(numbers) <= max_show:
        return f"{{{', '.join(numbers)}}}"
    last = max_show // 2
    first = max_show - last
    shown = f"{', '.join(numbers[:first])} ... {', '.join(numbers[-last:])}"
    return f"{{{shown}}} (total: {len(numbers)})"


def format_rank_set(ranks: Iterable[int]) -> str:
    """Return `ranks` for a log line: shortened unless `NVRX_LOG_RANK_FORMAT_VERBOSE` is set."""
    if _inputs.wants_verbose_ranks():
        return format_rank_set_verbose(ranks)
    return format_rank_set_brief(ranks)


def log_exc(rank_or_state: int | State | FrozenState | None, exc: BaseException, name: str) -> str:
    """Return a log line with the rank, the place and the exception.

    Args:
        rank_or_state: The rank, or a state that has it; None: unknown.
        exc: The exception.
        name: The place, such as the name of a function.
    """
    is_rank = rank_or_state is None or isinstance(rank_or_state, int)
    rank: Any = rank_or_state if is_rank else getattr(rank_or_state, "rank", None)
    return f"{rank=} {name}: {format_exc(exc)}"


@contextlib.contextmanager
def log_exec(target: object) -> Iterator[None]:
    """Log at DEBUG the begin, end and duration of `target`, a text or a callable."""
    name = target if isinstance(target, str) else getattr(target, "__qualname__", repr(target))
    start = time.monotonic()
    how = "failed"
    logger.debug("%s begins", name)
    try:
        yield
        how = "ended"
    finally:
        logger.debug("%s %s after %.3f s", name, how, time.monotonic() - start)


def find_nearest_handler(
    logger: logging.Logger, handler_cls: type[logging.Handler]
) -> logging.Handler | None:
    """Return the first `handler_cls` that a record of `logger` reaches; None without one."""
    each: logging.Logger | None = logger
    while each is not None:
        for handler in each.handlers:
            if isinstance(handler, handler_cls):
                return handler
        each = each.parent if each.propagate else None
    return None


class Logging:
    """Kept for its callers: lines go to the logger `nvrx`, which programs set up themselves."""

    @classmethod
    def initialize(cls) -> None:
        """Do nothing; `shared_utils.log_manager` sets up the logger."""

    @classmethod
    def deinitialize(cls) -> None:
        """Do nothing; no handler was installed."""


def _release(version: str) -> tuple[int, ...]:
    found = re.match(r"\s*v?([0-9]+(?:\.[0-9]+)*)", version, re.ASCII)
    if found is None:
        raise ValueError(f"{version!r} is not a version such as '2.6.0'")
    numbers = [int(part) for part in found[1].split(".")]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def _safe_repr(exc: BaseException) -> str:
    try:
        text = repr(exc)
    except Exception:  # noqa: BLE001 - of a foreign class; a log line is no reason to fail
        text = f"{type(exc).__name__}(?)"
    return text if len(text) <= _LONGEST_REPR else f"{text[:_LONGEST_REPR]}..."
