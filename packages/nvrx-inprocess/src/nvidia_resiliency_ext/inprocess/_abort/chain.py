# SPDX-License-Identifier: Apache-2.0
"""Runs an abort with all its members, whatever one of them does, within a deadline."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nvidia_resiliency_ext.inprocess.compose import Compose
from nvidia_resiliency_ext.inprocess.state import FrozenState
from nvidia_resiliency_ext.inprocess.utils import format_exc
from nvidia_resiliency_ext.shared_utils.clock import Deadline

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["AbortStep", "run_abort"]

logger = logging.getLogger("nvrx")


@dataclass(frozen=True, slots=True)
class AbortStep:
    """What became of one member.

    Attributes:
        name: The member.
        duration_s: How long it took, or was waited for.
        error: What it raised, as text: the exception would keep its frames and all they hold.
        is_late: It was still running when it was left behind.
    """

    name: str
    duration_s: float
    error: str | None = None
    is_late: bool = False


def run_abort(
    abort: Callable[[FrozenState], Any], state: FrozenState, deadline_s: float
) -> tuple[AbortStep, ...]:
    """Call an abort, or the members of a `Compose` of aborts, the last one first.

    A member that raises does not keep the others from running; one that is late does not, either:
    it may use half of the time that is left, the last one all of it, and goes on by itself.

    Returns:
        One step per member, in the order of the calls; they have been logged.
    """
    deadline = Deadline.after(deadline_s)
    members = list(_members(abort))
    steps = []
    given: object = (state,)
    for index, member in enumerate(members):
        is_last = index == len(members) - 1
        patience_s = deadline.remaining() * (1.0 if is_last else 0.5)
        step, returned = _run(member, given, patience_s)
        steps.append(step)
        # After a failure the next one gets what this one got.
        if returned is not None:
            given = returned if isinstance(returned, tuple) else (returned,)
    return tuple(steps)


def _members(abort: Any) -> Iterator[Any]:
    if not isinstance(abort, Compose):
        yield abort
        return
    for member in reversed(abort.instances):
        yield from _members(member)


def _run(member: Any, given: Any, patience_s: float) -> tuple[AbortStep, object]:
    results: list[object] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            # Knows which members take no arguments.
            results.append(Compose(member)(*given))
        except BaseException as error:  # noqa: BLE001 - told in the step
            errors.append(error)

    name = _name_of(member)
    start = time.monotonic()
    thread = threading.Thread(target=run, name=f"nvrx-abort-{name}", daemon=True)
    thread.start()
    thread.join(patience_s)
    duration_s = time.monotonic() - start
    if errors:
        error = errors.pop()
        logger.error("abort %s failed after %.3f s", name, duration_s, exc_info=error)
        return AbortStep(name, duration_s, error=format_exc(error)), None
    if not results:
        logger.error("abort %s has not ended in %.3f s; it is left behind", name, duration_s)
        return AbortStep(name, duration_s, is_late=True), None
    logger.info("abort %s took %.3f s", name, duration_s)
    return AbortStep(name, duration_s), results[0]


def _name_of(member: Any) -> str:
    try:
        return str(getattr(member, "__name__", type(member).__name__))
    except Exception:  # noqa: BLE001 - a user's class may do anything
        return type(member).__name__
