# SPDX-License-Identifier: Apache-2.0
"""The plain data of ranks and monitors."""

import os
import subprocess
import sys

import pytest

from nvidia_resiliency_ext.fault_tolerance import data


def test_rank_info_comes_from_the_environment(clean_environment):
    """Without a process group the rank is that of the environment."""
    clean_environment.setenv("RANK", "7")
    clean_environment.setenv("LOCAL_RANK", "3")
    info = data.RankInfo.get_for_current_rank()
    assert info == data.RankInfo(7, 3, os.uname().nodename.split(".")[0], os.getpid())


def test_local_rank_may_be_missing(clean_environment):
    """The local rank is -1 when nobody set it."""
    clean_environment.setenv("RANK", "0")
    assert data.RankInfo.get_for_current_rank().local_rank == -1


@pytest.mark.parametrize("rank", [None, "", "first"])
def test_unknown_rank_is_an_error(clean_environment, rank):
    """A rank that nobody knows is a RuntimeError that says what to do."""
    if rank is not None:
        clean_environment.setenv("RANK", rank)
    with pytest.raises(RuntimeError, match="set RANK"):
        data.RankInfo.get_for_current_rank()


def test_asking_for_the_rank_imports_no_torch():
    """A program that has not imported torch does not get it from us."""
    program = (
        "import sys; from nvidia_resiliency_ext.fault_tolerance.data import RankInfo;"
        "print(RankInfo.get_for_current_rank().global_rank, 'torch' in sys.modules)"
    )
    output = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "RANK": "5"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout
    assert output.split() == ["5", "False"]


@pytest.mark.parametrize(
    ("initial", "subsequent", "valid"),
    [(None, None, False), (1.0, None, False), (None, 1.0, False), (1.0, 2.0, True)],
)
def test_heartbeat_timeouts_are_valid_when_both_are_set(initial, subsequent, valid):
    """Both limits are needed."""
    assert data.HeartbeatTimeouts(initial, subsequent).are_valid is valid


@pytest.mark.parametrize(
    ("timeouts", "valid", "calculated"),
    [
        (data.SectionTimeouts(), False, False),
        (data.SectionTimeouts({"a": 1.0}, 2.0), True, False),
        (data.SectionTimeouts({"a": None}, 2.0), False, False),
        (data.SectionTimeouts({"a": 1.0}, None), False, False),
        (data.SectionTimeouts({"a": 1.0}, 2.0, {"a"}, True), True, True),
        (data.SectionTimeouts({"a": 1.0, "b": 1.0}, 2.0, {"a"}, True), True, False),
        (data.SectionTimeouts({"a": 1.0}, 2.0, {"a"}, False), True, False),
    ],
)
def test_section_timeouts_know_whether_they_are_complete(timeouts, valid, calculated):
    """Valid means that no limit is missing, calculated that all were measured."""
    assert timeouts.are_valid is valid
    assert timeouts.were_calculated is calculated


def test_calculated_sections_become_a_set():
    """JSON has no sets: a list is taken as one."""
    assert data.SectionTimeouts(calculated_sections=["a", "a"]).calculated_sections == {"a"}


def test_answers_have_the_attributes_they_were_given():
    """An answer's keyword arguments are its attributes, and others are explained."""
    answer = data.OkMsg(cfg={"a": 1})
    assert answer.cfg == {"a": 1}
    assert answer == data.OkMsg(cfg={"a": 1})
    assert answer != data.OkMsg()
    with pytest.raises(AttributeError, match="no 'timeouts'"):
        _ = answer.timeouts


@pytest.mark.parametrize(
    ("message", "attributes"),
    [
        (data.AuthkeyMsg(), {"authkey": None}),
        (data.InitMsg(), {"rank_info": None, "iteration": None, "num_warmup_iters": None}),
        (data.HeartbeatMsg(1), {"rank": 1, "state": None}),
        (
            data.SectionMsg(1, "a", data.SectionAction.OPEN),
            {"rank": 1, "section": "a", "action": data.SectionAction.OPEN, "iteration": None},
        ),
        (
            data.UpdateConfigMsg(),
            {"hb_timeouts": None, "section_timeouts": None, "current_cycle": None},
        ),
        (data.ErrorMsg(), {"cause": "<not set>"}),
        (
            data.WorkloadControlRequest(data.WorkloadAction.ShutdownWorkload),
            {"action": data.WorkloadAction.ShutdownWorkload, "description": "<not set>"},
        ),
    ],
)
def test_messages_have_public_attributes_and_defaults(message, attributes):
    """Messages are made with their documented defaults."""
    assert vars(message) == attributes


def test_numbers_of_enums():
    """The numbers of actions are fixed."""
    assert {action.name: action.value for action in data.SectionAction} == {
        "OPEN": 1,
        "CLOSE": 2,
        "CLOSE_ALL": 3,
    }
    assert {action.name: action.value for action in data.WorkloadAction} == {
        "Continue": 0,
        "ExcludeThisNode": 1,
        "ShutdownWorkload": 2,
    }
