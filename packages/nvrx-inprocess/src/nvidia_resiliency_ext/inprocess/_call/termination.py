# SPDX-License-Identifier: Apache-2.0
"""How a rank leaves its function: abort, then an exception in the main thread until it is out."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from nvidia_resiliency_ext.inprocess._abort.chain import run_abort

if TYPE_CHECKING:
    from nvidia_resiliency_ext.inprocess._abort.base import Abort
    from nvidia_resiliency_ext.inprocess._abort.chain import AbortStep
    from nvidia_resiliency_ext.inprocess.state import FrozenState

    from .gate import AtomicLock, MainThreadGate

__all__ = ["ABORT_DEADLINE_S", "Pausable", "Phases", "terminate"]

logger = logging.getLogger("nvrx")

# Of the 30 s between the default soft and hard timeouts. One member may use half of it, as much as
# `AbortTorchDistributed` allows itself.
ABORT_DEADLINE_S = 20.0


class Pausable(Protocol):
    """What stamps progress."""

    def pause(self) -> object:
        """Stamp no more."""
        ...


@dataclass(frozen=True, slots=True)
class Phases:
    """Where the time of a termination went, in seconds.

    Attributes:
        lock_s: Until no atomic block was running.
        abort_s: The abort.
        raise_s: Until the main thread had the exception; 0 if it left by itself.
        unwind_s: Until it was out of the function; 0 if it was out already.
        raised: How often the exception was raised.
        steps: The members of the abort.
    """

    lock_s: float
    abort_s: float
    raise_s: float
    unwind_s: float
    raised: int
    steps: tuple[AbortStep, ...]


def terminate(  # noqa: PLR0913 - one of each part
    abort: Abort | None,
    state: FrozenState,
    gate: MainThreadGate,
    lock: AtomicLock,
    watchdog: Pausable,
    message: str,
    *,
    quiet_s: float,
    deadline_s: float = ABORT_DEADLINE_S,
) -> Phases:
    """Unblock the main thread and make it leave; from a helper thread, returns when it is out.

    Args:
        abort: What unblocks it.
        state: Given to the abort.
        gate: Where the main thread is.
        lock: Held by atomic blocks.
        watchdog: Paused before the exception is raised.
        message: Argument of the exception.
        quiet_s: How long the first unwinding is left in peace.
        deadline_s: How long the abort may take; what is late is left to itself.
    """
    start = time.monotonic()
    with lock:
        locked = time.monotonic()
        try:
            steps = () if abort is None else run_abort(abort, state, deadline_s)
        except Exception:
            # Whatever the user's object does: the main thread must come out.
            logger.exception("the abort failed")
            steps = ()
        aborted = time.monotonic()
        watchdog.pause()
        interruption = gate.begin(message)
    raised = None if interruption is None else interruption.see_out(quiet_s, lock)
    first_s = 0.0 if raised is None or raised.first_s is None else raised.first_s
    return Phases(
        lock_s=locked - start,
        abort_s=aborted - locked,
        raise_s=first_s,
        unwind_s=0.0 if raised is None else raised.left_s - first_s,
        raised=0 if raised is None else raised.count,
        steps=steps,
    )
