# SPDX-License-Identifier: Apache-2.0
"""What a run has done decides about its completion and its timeouts."""

from types import SimpleNamespace

import pytest

from nvidia_resiliency_ext.ptl_resiliency._training_state import (
    SectionUpdate,
    TrainingStateMachine,
    section_update,
)

FULL = "setup load train heartbeat batch batch save heartbeat"


def run(words):
    """Return the state after the named hooks."""
    state = TrainingStateMachine()
    calls = {
        "setup": state.on_setup,
        "load": state.on_load_checkpoint,
        "train": state.on_train_start,
        "heartbeat": state.on_ft_heartbeat_sent,
        "batch": state.on_train_batch_end,
        "save": state.on_save_checkpoint,
        "updated": state.on_ft_timeouts_updated,
        "end": state.on_train_end,
        "teardown": state.on_teardown,
        "error": lambda: state.on_exception(ValueError("x")),
        "exit0": lambda: state.on_exception(SystemExit(0)),
        "exit": lambda: state.on_exception(SystemExit()),
        "exit1": lambda: state.on_exception(SystemExit(1)),
    }
    for word in words.split():
        calls[word]()
    return state


@pytest.mark.parametrize(
    ("words", "is_ready"),
    [
        (FULL, True),
        (f"{FULL} exit0", True),
        (f"{FULL} exit", True),
        (f"{FULL} exit1", False),
        (f"{FULL} error", False),
        (f"{FULL} updated", False),
        (f"{FULL} updated setup", False),
        (FULL.replace("load ", ""), False),
        (FULL.replace("batch ", "", 1), False),
        (FULL.replace(" save", ""), False),
        (FULL.removesuffix(" heartbeat"), False),
        ("load save heartbeat batch batch", False),
    ],
)
def test_timeouts_need_a_measured_run(words, is_ready):
    """Timeouts are updated once, after two iterations, a load and a save between heartbeats."""
    assert run(words).can_update_timeouts is is_ready


@pytest.mark.parametrize(
    ("words", "limits", "is_completed"),
    [
        ("train end", None, True),
        ("teardown", None, True),
        ("train batch end", None, True),
        ("train batch batch end", None, False),
        ("train batch batch end", {"max_steps": 2}, True),
        ("train batch batch end", {"max_steps": 3}, False),
        ("train batch batch end", {"max_epochs": 1}, True),
        ("train batch batch end", {"max_epochs": -1}, False),
        ("train batch batch end", {"max_epochs": None}, False),
        ("train", None, False),
        ("train batch batch error", {"max_steps": 2}, False),
        ("train batch exit0 teardown", None, True),
        ("error teardown", None, False),
    ],
)
def test_training_is_completed(words, limits, is_completed):
    """Training is complete when a limit is reached or nothing was left, and nothing failed."""
    trainer = limits and SimpleNamespace(
        **{"max_steps": -1, "max_epochs": -1, "global_step": 2, "current_epoch": 1, **limits}
    )
    assert run(words).is_training_completed(trainer) is is_completed


@pytest.mark.parametrize(
    ("words", "options", "wanted"),
    [
        ("batch", {}, None),
        ("load batch", {}, SectionUpdate(["setup"], False)),
        ("batch batch batch", {}, SectionUpdate(["step"], False)),
        ("batch save", {}, SectionUpdate(["checkpointing"], False)),
        ("batch save", {"is_async_save": True}, None),
        (
            "load batch batch batch save",
            {"is_final": True},
            SectionUpdate(["setup", "step", "checkpointing"], True),
        ),
        (
            "load batch batch batch save",
            {"is_final": True, "is_async_save": True},
            SectionUpdate(["setup", "step"], True),
        ),
        ("load batch batch batch", {"is_final": True}, SectionUpdate(["setup", "step"], False)),
        ("load batch batch batch save error", {"is_final": True}, None),
    ],
)
def test_sections_that_are_updated(words, options, wanted):
    """Only sections that the run has measured are updated; outside of them only at the end."""
    options = {"min_iterations": 2, "is_async_save": False, "is_final": False, **options}
    assert section_update(run(words), **options) == wanted
