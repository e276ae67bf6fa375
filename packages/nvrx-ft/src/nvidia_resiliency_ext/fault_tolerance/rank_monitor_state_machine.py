# SPDX-License-Identifier: Apache-2.0
"""The states of a monitor for the log lines of layered restarts; decides nothing about killing."""

from enum import Enum
from typing import Final, Protocol

from nvidia_resiliency_ext.shared_utils.restarter_lines import (
    IN_JOB,
    RestarterStage,
    RestarterState,
    format_restarter_line,
)

__all__ = [
    "InvalidStateTransitionException",
    "RankMonitorState",
    "RankMonitorStateMachine",
    "RestarterEventLogger",
]


class RankMonitorState(Enum):
    """State of the monitor of one rank."""

    UNINITIALIZED = 1
    INITIALIZE = 2
    HANDLING_START = 3
    HANDLING_PROCESSING = 4
    HANDLING_COMPLETED = 5
    FINALIZED = 6
    ABORTED = 7


class InvalidStateTransitionException(Exception):  # noqa: N818 - a public name
    """The requested state cannot follow the current one."""


class RestarterEventLogger(Protocol):
    """The logger that the state machine needs."""

    def log_restarter_event(self, message: str) -> None:
        """Write the line `message` for tools that follow restarts."""


_S = RankMonitorState

_NEXT: Final[dict[RankMonitorState, frozenset[RankMonitorState]]] = {
    _S.UNINITIALIZED: frozenset({_S.INITIALIZE, _S.FINALIZED}),
    _S.INITIALIZE: frozenset({_S.HANDLING_START, _S.FINALIZED}),
    _S.HANDLING_START: frozenset({_S.HANDLING_COMPLETED, _S.HANDLING_PROCESSING, _S.ABORTED}),
    _S.HANDLING_PROCESSING: frozenset({_S.HANDLING_COMPLETED, _S.HANDLING_PROCESSING, _S.ABORTED}),
    _S.HANDLING_COMPLETED: frozenset({_S.HANDLING_START, _S.FINALIZED}),
    _S.ABORTED: frozenset({_S.FINALIZED}),
    _S.FINALIZED: frozenset({_S.FINALIZED}),
}

_HANDLING: Final = frozenset({_S.HANDLING_START, _S.HANDLING_PROCESSING})

_LINES: Final[dict[RankMonitorState, str]] = {
    state: format_restarter_line(IN_JOB, restarter_state, stage)
    for state, restarter_state, stage in (
        (_S.INITIALIZE, RestarterState.INITIALIZE, None),
        (_S.HANDLING_START, RestarterState.HANDLING, RestarterStage.STARTING),
        (_S.HANDLING_PROCESSING, RestarterState.HANDLING, RestarterStage.PROCESSING),
        (_S.HANDLING_COMPLETED, RestarterState.HANDLING, RestarterStage.COMPLETED),
        (_S.FINALIZED, RestarterState.FINALIZED, None),
        (_S.ABORTED, RestarterState.ABORTED, None),
    )
}


class RankMonitorStateMachine:
    """Follows one rank and writes a `[NestedRestarter]` line on every transition.

    | state | may be followed by |
    | --- | --- |
    | UNINITIALIZED | INITIALIZE, FINALIZED |
    | INITIALIZE | HANDLING_START, FINALIZED |
    | HANDLING_START | HANDLING_COMPLETED, HANDLING_PROCESSING, ABORTED |
    | HANDLING_PROCESSING | HANDLING_COMPLETED, HANDLING_PROCESSING, ABORTED |
    | HANDLING_COMPLETED | HANDLING_START, FINALIZED |
    | ABORTED | FINALIZED |
    | FINALIZED | FINALIZED |

    Not thread-safe. Example:
        >>> class Printer:
        ...     def log_restarter_event(self, message: str) -> None:
        ...         print(message)
        >>> RankMonitorStateMachine(Printer()).handle_heartbeat_msg()
        [NestedRestarter] name=[InJob] state=initialize
    """

    def __init__(self, logger: RestarterEventLogger) -> None:
        """Start as UNINITIALIZED; `logger` writes a line for each transition from then on."""
        self.logger = logger
        self.state = RankMonitorState.UNINITIALIZED

    def can_transition_to(self, new_state: RankMonitorState) -> bool:
        """Return whether `new_state` may follow the current one."""
        return new_state in _NEXT[self.state]

    def transition_to(self, new_state: RankMonitorState) -> None:
        """Enter `new_state` and write its line.

        Raises:
            InvalidStateTransitionException: `new_state` may not follow the current one.
        """
        if not self.can_transition_to(new_state):
            raise InvalidStateTransitionException(
                f"{new_state.name} cannot follow {self.state.name}"
            )
        self.state = new_state
        self.logger.log_restarter_event(_LINES[new_state])

    def is_restarting(self) -> bool:
        """Return whether a restart has begun and the rank has not reported since."""
        return self.state in _HANDLING

    def handle_heartbeat_msg(self) -> None:
        """Record a heartbeat of the rank."""
        self._handle_sign_of_life("heartbeat")

    def handle_section_msg(self) -> None:
        """Record a section event of the rank."""
        self._handle_sign_of_life("section")

    def _handle_sign_of_life(self, what: str) -> None:
        if self.state is _S.UNINITIALIZED:
            self.transition_to(_S.INITIALIZE)
        elif self.state in _HANDLING:
            self.transition_to(_S.HANDLING_COMPLETED)
        elif self.state not in (_S.INITIALIZE, _S.HANDLING_COMPLETED):
            raise AssertionError(f"a {what} message cannot come in state {self.state.name}")

    def handle_ipc_connection_lost(self) -> None:
        """Record the end of the connection to the rank."""
        if self.state in (_S.INITIALIZE, _S.HANDLING_COMPLETED):
            self.transition_to(_S.HANDLING_START)
        elif self.state in _HANDLING:
            self.transition_to(_S.ABORTED)

    def handle_signal(self) -> None:
        """Record that the monitor got a signal to end."""
        if self.state in _HANDLING:
            self.transition_to(_S.ABORTED)
        elif self.state is not _S.UNINITIALIZED:
            self.transition_to(_S.FINALIZED)

    def periodic_restart_check(self) -> None:
        """Log that the restart is still in progress; AssertionError: none is under way."""
        if not self.is_restarting():
            raise AssertionError(f"no restart is under way in state {self.state.name}")
        self.transition_to(_S.HANDLING_PROCESSING)
