# SPDX-License-Identifier: Apache-2.0
"""The older name of fault injection gives all that the present one has."""

import threading

import pytest

from nvidia_resiliency_ext.inprocess.tools import inject_fault as older
from nvidia_resiliency_ext.shared_utils import inject_fault as present


def test_names_are_the_same_objects() -> None:
    """Every public name is there under both module names, as one object."""
    assert older.__all__ == present.__all__
    assert [
        name for name in present.__all__ if getattr(older, name) is not getattr(present, name)
    ] == []
    assert older.ctx.get_start_method() == present.ctx.get_start_method()
    with pytest.raises(AttributeError, match="nothing_such"):
        older.nothing_such  # noqa: B018


def test_faults_keep_their_numbers() -> None:
    """The first twelve faults have the numbers that ranks send to each other."""
    names = ["GPU_ERROR", "GPU_SLEEP", "WORKLOAD_EXC", "ASYNC_EXC", "SIGNAL_EXC", "OS_ABORT",
             "LOCK_GIL", "SEGFAULT", "SIGINT", "SIGKILL", "SIGTERM", "SIGSTOP"]  # fmt: skip
    assert [older.Fault(number).name for number in range(1, 13)] == names


def test_new_faults_get_the_next_number() -> None:
    """A fault is added by name, with the largest number so far plus one, and can be dispatched."""
    called = threading.Event()
    largest = max(fault.value for fault in older.Fault)
    fault = older.register_fault("IN_PROCESS_TEST", lambda *_: called.set())
    again = older.register_fault("IN_PROCESS_TEST_2", lambda *_: None)
    assert (fault.value, again.value) == (largest + 1, largest + 2)
    assert older.Fault(fault.value) is older.Fault["IN_PROCESS_TEST"] is fault
    older.dispatch_fault_injection(fault, 0, None)
    assert called.wait(30)


def test_single_fault_and_whole_delay_are_taken(monkeypatch) -> None:
    """One fault in place of several and an integer delay draw a plan like any other."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    try:
        handle = older.inject_fault(older.Fault.WORKLOAD_EXC, 1, 1, 0, seed=5)
        assert handle is not None
        assert handle.fault is older.Fault.WORKLOAD_EXC
        assert older.workload_raise_event.wait(30)
        with pytest.raises(older.InjectedException):
            older.maybe_raise_workload_exception()
    finally:
        older.clear_workload_exception()
    older.maybe_raise_workload_exception()
