# SPDX-License-Identifier: Apache-2.0
"""The registry of what an abort in place must stop."""

import logging
import threading
from collections.abc import Iterator

import pytest

from nvidia_resiliency_ext.shared_utils import abort_hooks
from nvidia_resiliency_ext.shared_utils.abort_hooks import register_abort_hook, run_abort_hooks


@pytest.fixture(autouse=True)
def _own_registry() -> Iterator[None]:
    kept = dict(abort_hooks._hooks)
    abort_hooks._hooks.clear()
    yield
    abort_hooks._hooks.clear()
    abort_hooks._hooks.update(kept)


def test_hooks_run_in_order_and_again() -> None:
    """All hooks run in the order of registration, at every abort."""
    ran: list[str] = []
    register_abort_hook("first", lambda: ran.append("first"))
    register_abort_hook("second", lambda: ran.append("second"))
    assert run_abort_hooks() == []
    assert run_abort_hooks() == []
    assert ran == ["first", "second"] * 2


def test_hook_that_raises_stops_no_other(caplog: pytest.LogCaptureFixture) -> None:
    """A failing hook is logged and returned, and those after it still run."""
    ran: list[str] = []

    def fail() -> None:
        raise RuntimeError("no writer")

    register_abort_hook("bad", fail)
    register_abort_hook("good", lambda: ran.append("good"))
    with caplog.at_level(logging.ERROR, logger="nvrx"):
        [failure] = run_abort_hooks()
    assert (str(failure), ran) == ("no writer", ["good"])


def test_unregistering_leaves_a_replacement_alone() -> None:
    """A hook registered again under its name replaces the old one, whose end then does nothing."""
    ran: list[str] = []
    unregister_old = register_abort_hook("writer", lambda: ran.append("old"))
    unregister_new = register_abort_hook("writer", lambda: ran.append("new"))
    unregister_old()
    run_abort_hooks()
    unregister_new()
    unregister_new()
    run_abort_hooks()
    assert ran == ["new"]


def test_hook_may_register_and_unregister() -> None:
    """The registry is not locked while hooks run, from whatever thread they change it."""

    def replace() -> None:
        thread = threading.Thread(target=register_abort_hook, args=("late", lambda: None))
        thread.start()
        thread.join(10.0)
        assert not thread.is_alive()

    register_abort_hook("replace", replace)
    assert run_abort_hooks() == []
