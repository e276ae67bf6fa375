# SPDX-License-Identifier: Apache-2.0
"""The monitor's states: which may follow which, what events do, which lines are written."""

import pytest

from nvidia_resiliency_ext.fault_tolerance.rank_monitor_state_machine import (
    InvalidStateTransitionException,
    RankMonitorState,
    RankMonitorStateMachine,
)

UNINITIALIZED = RankMonitorState.UNINITIALIZED
INITIALIZE = RankMonitorState.INITIALIZE
START = RankMonitorState.HANDLING_START
PROCESSING = RankMonitorState.HANDLING_PROCESSING
COMPLETED = RankMonitorState.HANDLING_COMPLETED
ABORTED = RankMonitorState.ABORTED
FINALIZED = RankMonitorState.FINALIZED

ALLOWED = {
    UNINITIALIZED: {INITIALIZE, FINALIZED},
    INITIALIZE: {START, FINALIZED},
    START: {COMPLETED, PROCESSING, ABORTED},
    PROCESSING: {COMPLETED, PROCESSING, ABORTED},
    COMPLETED: {START, FINALIZED},
    ABORTED: {FINALIZED},
    FINALIZED: {FINALIZED},
}
LINES = {
    INITIALIZE: "[NestedRestarter] name=[InJob] state=initialize",
    START: "[NestedRestarter] name=[InJob] state=handling stage=starting",
    PROCESSING: "[NestedRestarter] name=[InJob] state=handling stage=processing",
    COMPLETED: "[NestedRestarter] name=[InJob] state=handling stage=completed",
    FINALIZED: "[NestedRestarter] name=[InJob] state=finalized",
    ABORTED: "[NestedRestarter] name=[InJob] state=aborted",
}
# Event, then the state it leads to; AssertionError where it cannot happen.
SIGN_OF_LIFE = {
    UNINITIALIZED: INITIALIZE,
    INITIALIZE: INITIALIZE,
    START: COMPLETED,
    PROCESSING: COMPLETED,
    COMPLETED: COMPLETED,
    ABORTED: AssertionError,
    FINALIZED: AssertionError,
}
EVENTS = {
    "handle_heartbeat_msg": SIGN_OF_LIFE,
    "handle_section_msg": SIGN_OF_LIFE,
    "handle_ipc_connection_lost": {
        UNINITIALIZED: UNINITIALIZED,
        INITIALIZE: START,
        START: ABORTED,
        PROCESSING: ABORTED,
        COMPLETED: START,
        ABORTED: ABORTED,
        FINALIZED: FINALIZED,
    },
    "handle_signal": {
        UNINITIALIZED: UNINITIALIZED,
        INITIALIZE: FINALIZED,
        START: ABORTED,
        PROCESSING: ABORTED,
        COMPLETED: FINALIZED,
        ABORTED: FINALIZED,
        FINALIZED: FINALIZED,
    },
    "periodic_restart_check": {
        UNINITIALIZED: AssertionError,
        INITIALIZE: AssertionError,
        START: PROCESSING,
        PROCESSING: PROCESSING,
        COMPLETED: AssertionError,
        ABORTED: AssertionError,
        FINALIZED: AssertionError,
    },
}


class Lines:
    """Keeps the lines that the state machine writes."""

    def __init__(self):
        self.written = []

    def log_restarter_event(self, message):
        """Keep one line."""
        self.written.append(message)


def machine_in(state):
    """A state machine that is in `state`, and its lines."""
    lines = Lines()
    machine = RankMonitorStateMachine(lines)
    machine.state = state
    return machine, lines


def test_numbers_of_states():
    """The numbers of states are fixed."""
    assert [state.value for state in (UNINITIALIZED, INITIALIZE, START, PROCESSING)] == [1, 2, 3, 4]
    assert [state.value for state in (COMPLETED, FINALIZED, ABORTED)] == [5, 6, 7]


@pytest.mark.parametrize("new", RankMonitorState)
@pytest.mark.parametrize("old", RankMonitorState)
def test_transitions(old, new):
    """Exactly the transitions of the table are allowed, and each writes the new state's line."""
    machine, lines = machine_in(old)
    assert machine.can_transition_to(new) is (new in ALLOWED[old])
    if new in ALLOWED[old]:
        machine.transition_to(new)
        assert machine.state is new
        assert lines.written == [LINES[new]]
    else:
        with pytest.raises(InvalidStateTransitionException, match=f"{new.name}.*{old.name}"):
            machine.transition_to(new)
        assert machine.state is old
        assert not lines.written


@pytest.mark.parametrize("state", RankMonitorState)
@pytest.mark.parametrize("event", EVENTS)
def test_events(event, state):
    """Every event in every state leads where the table says, with a line unless it stays."""
    machine, lines = machine_in(state)
    expected = EVENTS[event][state]
    if expected is AssertionError:
        with pytest.raises(AssertionError, match=state.name):
            getattr(machine, event)()
        return
    getattr(machine, event)()
    assert machine.state is expected
    repeats = {("handle_signal", FINALIZED), ("periodic_restart_check", PROCESSING)}
    changed = expected is not state or (event, state) in repeats
    assert lines.written == ([LINES[expected]] if changed else [])


@pytest.mark.parametrize("state", RankMonitorState)
def test_is_restarting(state):
    """A restart is under way from its start until the rank reports again."""
    assert machine_in(state)[0].is_restarting() is (state in {START, PROCESSING})


def test_starts_uninitialized_and_silent():
    """A new state machine has written nothing."""
    lines = Lines()
    assert RankMonitorStateMachine(lines).state is UNINITIALIZED
    assert not lines.written
