# SPDX-License-Identifier: Apache-2.0
"""Helpers around saves."""

import logging
import threading

import torch

from nvidia_resiliency_ext.checkpointing import utils


def test_preloaded_tensors_are_private():
    """A preloaded tensor does not change with the one that it was copied from."""
    state = {"a": [torch.ones(3), {"b": 1}]}
    copied = utils.preload_tensors(state)
    state["a"][0].zero_()
    assert copied["a"][0].tolist() == [1, 1, 1]
    assert copied["a"][1] == {"b": 1}
    assert copied["a"] is not state["a"]


def test_names_of_messages_belong_to_a_thread(caplog):
    """Names pushed by one thread are not seen by another one."""
    seen = []

    def look():
        with utils.logger_stack("inner") as (name, _):
            seen.append(name)

    with utils.logger_stack("outer", logging.getLogger("x")):
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        look()
    assert seen == ["inner", "outer.inner"]


def test_durations_are_logged(caplog):
    """A timed block and a timed function are logged, unless they stay below a threshold."""
    caplog.set_level(logging.DEBUG)

    @utils.debug_time("function", logging.getLogger("x"))
    def function():
        return 5

    assert function() == 5
    with utils.debug_time("quick", threshold=1000):
        pass
    utils.debug_msg("said")
    assert "function took 0.0" in caplog.text
    assert "quick" not in caplog.text
    assert "said" in caplog.text


def test_differences_are_on_the_right_side():
    """What only one side has is reported for that side, and other shapes are a mismatch."""
    left = {"a": [1, 2, 3], "b": torch.ones(2), "c": (1,), "same": torch.ones(2)}
    right = {"a": [1], "b": torch.ones(3), "c": (1, 2), "same": torch.ones(2), "d": 0}
    only_left, only_right, mismatch = utils.diff(left, right)
    assert only_left == [("a", 1), ("a", 2)]
    assert sorted(only_right) == [("c", 1), ("d",)]
    assert mismatch == [(("b",), torch.Tensor, torch.Tensor)]


def test_wrapped_function_runs_without_garbage_collection():
    """The collector is off inside, and on again outside."""
    import gc

    assert utils.wrap_for_async(lambda _: gc.isenabled())({}) is False
    assert gc.isenabled()
