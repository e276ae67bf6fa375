# SPDX-License-Identifier: Apache-2.0
"""Callbacks that write what this layer of restart does, for tools that follow several layers.

The launcher writes the same lines as `InJob`. They go to standard output, whatever the program's
logging is set to: `[<time>] [ALWAYS] [InprocessRestarter.Restarter] [NestedRestarter] ...`.
"""

from __future__ import annotations

import logging
import sys
import weakref
from dataclasses import dataclass, field

from nvidia_resiliency_ext.shared_utils.restarter_lines import (
    IN_PROCESS,
    RestarterStage,
    RestarterState,
    format_restarter_line,
)

from ._inputs import check_integer
from .abort import Abort
from .completion import Completion
from .initialize import Initialize
from .state import FrozenState
from .terminate import Terminate

__all__ = [
    "NestedRestarterAborted",
    "NestedRestarterCallback",
    "NestedRestarterFinalized",
    "NestedRestarterHandlingCompleted",
    "NestedRestarterHandlingStarting",
    "NestedRestarterLogger",
]

_Entered = tuple[RestarterState | str, RestarterStage | str | None]
_LOGGER_NAME = "InprocessRestarter.Restarter"
_FORMAT = "[%(asctime)s] [ALWAYS] [%(name)s] %(message)s"


class _StdoutHandler(logging.Handler):
    """Writes to what is standard output at that moment."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            sys.stdout.write(self.format(record) + "\n")
            sys.stdout.flush()
        except Exception:  # noqa: BLE001 - as every handler: a full disk is no reason to fail
            self.handleError(record)


class NestedRestarterLogger:
    """Writes lines for tools that follow layers of restart.

    Attributes:
        rank: The rank in whose name it writes, an attribute `connected_rank` of each record.
    """

    def __init__(self) -> None:
        self.rank: int | None = None

    @property
    def restarter_logger(self) -> logging.Logger:
        """The logger of these lines; all objects share it."""
        logger = logging.getLogger(_LOGGER_NAME)
        if not any(isinstance(handler, _StdoutHandler) for handler in logger.handlers):
            handler = _StdoutHandler()
            handler.setFormatter(logging.Formatter(_FORMAT))
            logger.addHandler(handler)
            logger.setLevel(logging.INFO)
            logger.propagate = False
        return logger

    def log_for_restarter(self, message: str) -> None:
        """Write `message` as one line."""
        self.restarter_logger.info("%s", message, extra={"connected_rank": self.rank})

    def set_connected_rank(self, rank: int | None) -> None:
        """Set `rank` as the one that later lines name; None names no rank."""
        self.rank = rank


_shared = NestedRestarterLogger()


@dataclass
class NestedRestarterCallback:
    """Writes one line when it is called on the special rank.

    Attributes:
        restarter_state: The state that is entered.
        restarter_stage: The stage of that state, if it has any.
        logger: Writes the line.
        special_rank: Initial rank of the only rank that writes.
    """

    restarter_state: RestarterState | str
    restarter_stage: RestarterStage | str | None = None
    logger: NestedRestarterLogger = field(default=_shared, repr=False)
    special_rank: int = 0

    def __post_init__(self) -> None:
        """Check the arguments."""
        check_integer("special_rank", self.special_rank, least=0)

    def __call__(self, state: FrozenState) -> FrozenState:
        """Write the line if `state.initial_rank` is the special rank, and return `state`."""
        if state.initial_rank == self.special_rank:
            self.logger.set_connected_rank(state.initial_rank)
            entered = self._entered(state)
            self.logger.log_for_restarter(format_restarter_line(IN_PROCESS, *entered))
        return state

    def _entered(self, state: FrozenState) -> _Entered:
        del state
        return self.restarter_state, self.restarter_stage


class NestedRestarterHandlingCompleted(NestedRestarterCallback, Initialize):
    """Writes `initialize` the first time in a call, and later that a fault is handled.

    The same object serves call after call: a call begins where the iteration does not grow.

    Args:
        special_rank: Initial rank of the only rank that writes.
    """

    def __init__(self, special_rank: int = 0) -> None:
        super().__init__(RestarterState.INITIALIZE.value, special_rank=special_rank)
        self._last: weakref.ref[FrozenState] | None = None
        self._last_iteration = -1

    def _entered(self, state: FrozenState) -> _Entered:
        is_again = self._last is not None and self._last() is state
        is_later = self._last is not None and state.iteration > self._last_iteration
        self._last, self._last_iteration = weakref.ref(state), state.iteration
        if is_again or is_later:
            return RestarterState.HANDLING, RestarterStage.COMPLETED
        return RestarterState.INITIALIZE, None


@dataclass
class NestedRestarterHandlingStarting(NestedRestarterCallback, Abort):
    """Writes that the handling of a fault starts.

    Its fields `restarter_state` and `restarter_stage` are those of `NestedRestarterCallback`.

    Example:
        >>> from nvidia_resiliency_ext.inprocess import Compose
        >>> from nvidia_resiliency_ext.inprocess.abort import AbortTorchDistributed
        >>> from nvidia_resiliency_ext.inprocess.nested_restarter import (
        ...     NestedRestarterHandlingStarting)
        >>> abort = Compose(AbortTorchDistributed(), NestedRestarterHandlingStarting())
    """

    restarter_state: RestarterState | str = RestarterState.HANDLING.value
    restarter_stage: RestarterStage | str | None = RestarterStage.STARTING.value


@dataclass
class NestedRestarterFinalized(NestedRestarterCallback, Completion):
    """Writes that the function has completed.

    Its fields `restarter_state` and `special_rank` are those of `NestedRestarterCallback`.
    """

    restarter_state: RestarterState | str = RestarterState.FINALIZED.value


@dataclass
class NestedRestarterAborted(NestedRestarterCallback, Terminate):
    """Writes that the rank leaves with an exception.

    Its fields `restarter_state` and `special_rank` are those of `NestedRestarterCallback`.
    """

    restarter_state: RestarterState | str = RestarterState.ABORTED.value
