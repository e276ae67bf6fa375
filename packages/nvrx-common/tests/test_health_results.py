# SPDX-License-Identifier: Apache-2.0
"""What all checks share: results, the boundary for errors, the coroutine, many checks at once."""

import asyncio
import json
import logging
import threading
import time

import pytest

from nvidia_resiliency_ext.shared_utils import health_check
from nvidia_resiliency_ext.shared_utils._health import check as checking
from nvidia_resiliency_ext.shared_utils._health.check import (
    Finding,
    HealthResult,
    PeriodicCheck,
    run_checks,
)
from nvidia_resiliency_ext.shared_utils.abandonable import DeadlineCaller, StuckError
from nvidia_resiliency_ext.shared_utils.clock import ManualClock


class Given(PeriodicCheck):
    """A check that finds what it is given."""

    name = "given"

    def __init__(self, finding, wait=None) -> None:
        super().__init__(0.0)
        self.finding = finding
        self.wait = wait

    def _examine(self) -> Finding:
        if self.wait is not None:
            self.wait.wait(30)
        if isinstance(self.finding, BaseException):
            raise self.finding
        return self.finding


@pytest.mark.parametrize(
    ("finding", "is_true"),
    [
        (Finding("healthy"), True),
        (Finding("skipped", "no hardware"), True),
        (Finding("unhealthy", "broken"), False),
    ],
)
def test_only_unhealthy_is_false(finding, is_true) -> None:
    """The bool of a result and of a call says whether the check is not unhealthy."""
    result = Given(finding).check()
    assert (bool(result), Given(finding)()) == (is_true, is_true)
    assert (result.name, result.status, result.reason) == ("given", finding.status, finding.reason)
    assert result.duration_s >= 0


def test_a_check_that_breaks_is_skipped(caplog) -> None:
    """An error inside a check never reaches the caller and never marks a node as unhealthy."""
    with caplog.at_level(logging.ERROR, "nvrx"):
        result = Given(RuntimeError("oops")).check()
    assert result.status == "skipped"
    assert "oops" in result.reason
    assert "could not run" in caplog.text


def test_skipping_is_logged_once(caplog) -> None:
    """However often a check is skipped, the process has one line about it."""
    checking._logged.clear()
    with caplog.at_level(logging.INFO, "nvrx"):
        for _ in range(3):
            Given(Finding("skipped", "no hardware"))()
    assert [record.getMessage() for record in caplog.records] == [
        "health check given is skipped: no hardware"
    ]


def test_coroutine_awaits_on_failure_each_time() -> None:
    """The coroutine looks again and again, and awaits on_failure after each unhealthy look."""
    calls = []

    async def main() -> None:
        done = asyncio.Event()

        async def on_failure() -> None:
            calls.append(threading.current_thread())
            if len(calls) == 3:
                done.set()

        check = Given(Finding("unhealthy", "broken"))
        check.on_failure = on_failure
        task = asyncio.create_task(check.async_check())
        await asyncio.wait_for(done.wait(), 30)
        task.cancel()

    asyncio.run(main())
    assert calls == [threading.main_thread()] * 3


def test_coroutine_leaves_the_loop_alone() -> None:
    """While a check is stuck the event loop goes on."""
    release = threading.Event()

    async def main() -> None:
        task = asyncio.create_task(Given(Finding("healthy"), release).async_check())
        turns = 0
        while turns < 50:
            await asyncio.sleep(0)
            turns += 1
        release.set()
        task.cancel()

    asyncio.run(asyncio.wait_for(main(), 30))


def test_many_checks_share_one_deadline(monkeypatch) -> None:
    """Checks run at the same time; one that does not end is unhealthy, the others keep results."""
    clock, release = ManualClock(), threading.Event()
    monkeypatch.setattr(checking, "time", clock)

    class NearlyTooLate(Given):
        """Ends after those that were started before it, shortly before the deadline."""

        def _examine(self) -> Finding:
            for thread in threading.enumerate():
                if thread.name == "nvrx-check-told" and thread is not threading.current_thread():
                    thread.join(30)
            clock.advance(29.8)
            return super()._examine()

    checks = [
        Given(Finding("healthy")),
        Given(Finding("unhealthy", "broken")),
        NearlyTooLate(Finding("healthy")),
    ]
    stuck = Given(Finding("healthy"), release)
    stuck.name = "stuck"
    start = time.monotonic()
    results = run_checks([*checks, stuck], 30.0)
    took_s = time.monotonic() - start
    release.set()
    assert [result.status for result in results] == ["healthy", "unhealthy", "healthy", "unhealthy"]
    assert results[1].reason == "broken"
    silent = Given(Finding("healthy"), release)
    silent.late_status = "skipped"
    release.clear()
    monkeypatch.setattr(checking, "time", time)
    assert [result.status for result in run_checks([silent], 0.01)] == ["skipped"]
    release.set()
    assert "not ended within 30 s" in results[3].reason
    assert took_s < 20


def test_a_check_that_ends_its_thread_does_not_end_the_caller() -> None:
    """`sys.exit` in a check is an unhealthy result, and the other checks count as before."""
    ended, other = run_checks([Given(SystemExit(3)), Given(Finding("healthy"))], 30.0)
    assert (ended.status, other.status) == ("unhealthy", "healthy")
    assert "SystemExit: 3" in ended.reason


def test_hung_call_costs_one_thread() -> None:
    """While a call hangs, later ones fail at once without a thread; afterwards calls work again."""
    caller = DeadlineCaller()
    release = threading.Event()
    with pytest.raises(StuckError, match="slow has not returned"):
        caller.run("slow", lambda: release.wait(30), 0.01)
    before = set(threading.enumerate())
    for _ in range(5):
        with pytest.raises(StuckError, match="slow has not returned"):
            caller.run("other", lambda: 1, 30.0)
    assert set(threading.enumerate()) <= before  # one of an earlier test may end meanwhile
    release.set()
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            assert caller.run("other", lambda: 1, 30.0) == 1
            break
        except StuckError:
            continue
    else:
        pytest.fail("it stays stuck")


def test_errors_of_a_call_reach_the_caller() -> None:
    """What a call raises in its thread is raised to whoever waits."""
    with pytest.raises(ZeroDivisionError):
        DeadlineCaller().run("division", lambda: 1 // 0, 30.0)


def test_faces_are_lazy_and_complete() -> None:
    """Every public name can be had, and unknown ones are refused."""
    for name in health_check.__all__:
        assert getattr(health_check, name) is not None
    assert health_check.HealthResult is HealthResult
    with pytest.raises(AttributeError):
        _ = health_check.nonsense


def test_lock_is_held_by_decorated_functions() -> None:
    """`with_pynvml_lock` keeps other threads from the driver while a function runs."""
    taken = []

    @health_check.with_pynvml_lock
    def locked() -> str:
        thread = threading.Thread(
            target=lambda: taken.append(health_check._nvml_lock.acquire(blocking=False))
        )
        thread.start()
        thread.join()
        return "result"

    assert locked() == "result"
    assert taken == [False]


def test_line_for_people_is_one_line() -> None:
    """No name of a path or an adapter can pass for the result of another check."""
    from nvidia_resiliency_ext.shared_utils._health.cli import _line

    result = HealthResult("storage_path", "unhealthy", "missing: /a\nhealthy   gpu\x1b[2J")
    assert _line(result, as_json=False).isprintable()
    assert json.loads(_line(result, as_json=True))["reason"] == result.reason
