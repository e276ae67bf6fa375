# SPDX-License-Identifier: Apache-2.0
"""Lines by which tools follow several layers of restart."""

import logging
import re

import pytest

from nvidia_resiliency_ext.inprocess.abort import Abort
from nvidia_resiliency_ext.inprocess.completion import Completion
from nvidia_resiliency_ext.inprocess.compose import Compose
from nvidia_resiliency_ext.inprocess.initialize import Initialize, RetryController
from nvidia_resiliency_ext.inprocess.nested_restarter import (
    NestedRestarterAborted,
    NestedRestarterCallback,
    NestedRestarterFinalized,
    NestedRestarterHandlingCompleted,
    NestedRestarterHandlingStarting,
    NestedRestarterLogger,
)
from nvidia_resiliency_ext.inprocess.state import State
from nvidia_resiliency_ext.inprocess.terminate import Terminate

LINE = re.compile(
    r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}\] \[ALWAYS\] \[InprocessRestarter\.Restarter\] "
    r"\[NestedRestarter\] name=\[InProcess\] (state=.*)"
)


def lines(capsys) -> list[str]:
    """Return what the lines on standard output say; each must have the agreed form."""
    matches = [LINE.fullmatch(line) for line in capsys.readouterr().out.splitlines()]
    assert all(matches)
    return [match[1] for match in matches if match]


def at(iteration=0, *, initial_rank=0, rank=0):
    return State(rank, 4, iteration=iteration, initial_rank=initial_rank).freeze()


@pytest.mark.parametrize(
    ("kind", "base", "expected"),
    [
        (NestedRestarterHandlingStarting, Abort, "state=handling stage=starting"),
        (NestedRestarterFinalized, Completion, "state=finalized"),
        (NestedRestarterAborted, Terminate, "state=aborted"),
    ],
)
def test_callbacks_write_their_line(capsys, kind, base, expected) -> None:
    """Each is a callback of its kind, returns the state and writes one line of the agreed form."""
    callback = kind()
    assert isinstance(callback, base)
    given = at(3)
    assert callback(given) is given
    assert lines(capsys) == [expected]


def test_initialize_and_completed_for_each_call(capsys) -> None:
    """Each call of the function begins with `initialize`; later iterations complete a handling."""
    callback = NestedRestarterHandlingCompleted()
    assert isinstance(callback, Initialize)
    for iteration in (0, 1, 2, 0, 1):
        callback(at(iteration))
    completed = "state=handling stage=completed"
    expected = ["state=initialize", completed, completed, "state=initialize", completed]
    assert lines(capsys) == expected


def test_the_first_time_is_initialize_and_what_follows_is_not(capsys) -> None:
    """Without a call around it the first use writes `initialize`, the same state again does not."""
    callback = NestedRestarterHandlingCompleted()
    given = at(1)
    callback(given)
    callback(given)
    assert lines(capsys) == ["state=initialize", "state=handling stage=completed"]


@pytest.mark.parametrize("kind", [NestedRestarterHandlingCompleted, NestedRestarterFinalized])
def test_only_the_special_rank_writes(capsys, kind) -> None:
    """Only the rank with that initial rank writes, whatever its present one."""
    kind()(at(initial_rank=1, rank=0))
    kind(special_rank=2)(at(initial_rank=0))
    assert lines(capsys) == []
    kind(special_rank=2)(at(initial_rank=2, rank=1))
    assert len(lines(capsys)) == 1


def test_callbacks_can_be_composed(capsys) -> None:
    """With others of their kind they are one callback."""
    whole = Compose(RetryController(), NestedRestarterHandlingCompleted())
    assert isinstance(whole, Initialize)
    whole(at())
    assert lines(capsys) == ["state=initialize"]


def test_line_of_ones_own(capsys) -> None:
    """The base class writes any state and stage, with any logger of the kind."""
    logger = NestedRestarterLogger()
    NestedRestarterCallback("resting", "early", logger, special_rank=3)(at(initial_rank=3))
    assert lines(capsys) == ["state=resting stage=early"]
    assert logger.rank == 3


def test_logger_is_configured_once_and_for_itself(capsys) -> None:
    """Several objects write each line once, and no other logger has a new handler."""
    first, second = NestedRestarterLogger(), NestedRestarterLogger()
    root = list(logging.getLogger().handlers)
    assert isinstance(first.restarter_logger, logging.Logger)
    assert first.restarter_logger is second.restarter_logger
    first.set_connected_rank(4)
    first.log_for_restarter("[NestedRestarter] name=[InProcess] state=100%s")
    assert lines(capsys) == ["state=100%s"]
    assert logging.getLogger().handlers == root
    assert not logging.getLogger("nvidia_resiliency_ext.inprocess").handlers
