# SPDX-License-Identifier: Apache-2.0
"""What a node waits for before it joins, and before its workers start; nothing blocks the loop."""

import threading
from types import SimpleNamespace

import pytest

from nvidia_resiliency_ext.fault_tolerance._core.machine import Cause
from nvidia_resiliency_ext.fault_tolerance._health.admission import AdmissionCheck, GpuMemory
from nvidia_resiliency_ext.shared_utils.clock import SystemClock
from nvidia_resiliency_ext.shared_utils.event_loop import EventLoop
from nvidia_resiliency_ext.shared_utils.health_check import HealthResult

LIMIT_S = 60.0
CRASH = Cause("exited", "rank 0 ended: exit code 1", exit_code=1)
BAD = HealthResult("gpu", "unhealthy", "GPU 3: the driver asks to reset the GPU")


class FakeMemory(GpuMemory):
    """GPU memory by local rank, as a test sets it."""

    used: dict

    def ranks(self):
        return list(self.used or {})

    def used_mb(self, ranks):
        return None if self.used is None else {rank: self.used[rank] for rank in ranks}


class Bench:
    """An admission check on a loop of its own."""

    def __init__(self, check, *, backoff_s=30.0, timeout_s=LIMIT_S):
        self.clock = SystemClock()
        self.loop = EventLoop(self.clock)
        config = SimpleNamespace(
            restart_backoff=backoff_s,
            gpu_memory_reclaim_timeout=timeout_s,
            gpu_memory_tolerance_mb=512.0,
            gpu_memory_poll_interval=0.01,
        )
        plan = SimpleNamespace(
            fault_tol_cfg=config, max_nodes=1, nproc_per_node=0, node_health_check_endpoint=None
        )
        self.memory = FakeMemory(0, {}, config)
        self.memory.used = {}
        self.recorded = []
        reporter = SimpleNamespace(
            node_checked=lambda results: self.recorded.append([r.status for r in results]),
            record_phase=lambda _, seconds: self.recorded.append(seconds),
        )
        self.admission = AdmissionCheck(
            plan,
            {},
            host="h",
            infra_rank=-1,
            loop=self.loop,
            clock=self.clock,
            reporter=reporter,
        )
        self.admission.memory = self.memory
        self.admission.checks = SimpleNamespace(run=check)

    def run_until(self, condition):
        deadline = self.clock.monotonic() + LIMIT_S
        while not condition():
            assert self.clock.monotonic() < deadline
            self.loop.run_once(until=deadline)

    def admit(self, cycle=0):
        """Return a list that gets the answer."""
        answers = []
        self.admission.admit(cycle, answers.append)
        return answers

    def start(self):
        """Return a list that gets a word when workers start."""
        started = []
        self.admission.start(lambda: started.append("started"))
        return started


@pytest.fixture
def benches():
    made = []

    def make(check=list, **settings):
        made.append(Bench(check, **settings))
        return made[-1]

    yield make
    for bench in made:
        bench.admission.close()
        bench.loop.close()


def test_a_fit_node_is_admitted(benches):
    """Without a finding the answer is None, and it comes through the loop."""
    bench = benches()
    answers = bench.admit()
    assert answers == []
    bench.run_until(lambda: answers)
    assert answers == [None]


def test_an_unfit_node_is_told_why(benches):
    """A failed check is the cause, with the host and the evidence, and is recorded."""
    bench = benches(lambda: [BAD])
    answers = bench.admit()
    bench.run_until(lambda: answers)
    (cause,) = answers
    assert cause.kind == "unhealthy"
    assert cause.host == "h"
    assert "GPU 3: the driver asks to reset" in cause.what
    assert bench.recorded == [["unhealthy"]]


def test_checks_that_began_early_are_not_repeated(benches):
    """Checks begin while workers stop; the join takes their answer, the next one asks anew."""
    calls = []
    bench = benches(lambda: calls.append(1) or [])
    for cycle in range(2):
        bench.admission.prepare()
        bench.admission.prepare()
        bench.run_until(lambda cycle=cycle: len(bench.recorded) == cycle + 1)
        assert bench.admit(cycle) == [None]
    assert len(calls) == 2


def test_a_check_that_hangs_does_not_hold_the_loop(benches):
    """The loop goes on while a check runs, and a second question does not start a second one."""
    release, calls = threading.Event(), []

    def hang():
        calls.append(1)
        release.wait(LIMIT_S)
        return []

    bench = benches(hang)
    first, fired = bench.admit(1), []
    bench.loop.call_at(bench.clock.monotonic(), lambda: fired.append("timer"))
    bench.run_until(lambda: fired)
    second = bench.admit(2)
    release.set()
    bench.run_until(lambda: second)
    assert (first, second, calls) == ([], [None], [1])


def test_an_injected_failure_hits_its_cycle(benches, monkeypatch):
    """A failure that a test wants in a cycle comes then, and only then."""
    wanted = Cause("unhealthy", "on purpose")
    module = "nvidia_resiliency_ext.fault_tolerance._health.admission"
    inject = lambda cycle, rank, *_: wanted if (cycle, rank) == (1, 0) else None  # noqa: E731
    monkeypatch.setattr(f"{module}.injected_failure", inject)
    bench = benches()
    for cycle, expected in ((0, None), (1, wanted)):
        answers = bench.admit(cycle)
        bench.run_until(lambda answers=answers: answers)
        assert answers == [expected]


def test_workers_start_at_once_when_nothing_is_waited_for(benches):
    """Where no GPU is and no crash loop, a start is not delayed by a turn of the loop."""
    assert benches().start() == ["started"]


def test_workers_wait_for_the_memory_of_those_before(benches):
    """New workers start when every GPU is free, and the wait is recorded."""
    bench = benches()
    bench.memory.used = {0: 100.0, 1: 40_000.0}
    bench.admission.workers_gone()
    started = bench.start()
    bench.loop.run_once(until=bench.clock.monotonic() + 0.05)
    assert started == []
    bench.memory.used = {0: 100.0, 1: 512.0}
    bench.run_until(lambda: started)
    assert len(bench.recorded) == 1
    assert bench.recorded[0] > 0


def test_memory_that_stays_in_use_is_an_error_and_no_obstacle(benches, caplog):
    """After the timeout the workers start all the same, with one ERROR line."""
    bench = benches(timeout_s=0.05)
    bench.memory.used = {0: 40_000.0}
    bench.admission.workers_gone()
    started = bench.start()
    bench.run_until(lambda: started)
    (line,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert "rank 0: 40000 MB" in line.getMessage()


def test_a_timeout_of_zero_does_not_look(benches):
    """The wait can be switched off."""
    bench = benches(timeout_s=0.0)
    bench.memory.used = {0: 40_000.0}
    bench.admission.workers_gone()
    assert bench.start() == ["started"]


def test_a_crash_loop_holds_the_start_back(benches):
    """The second short cycle in a row delays the next start, the first does not."""
    bench = benches(backoff_s=1.0)
    bench.admission.cycle_failed(CRASH, 0.1, has_stepped=False)
    assert bench.start() == ["started"]
    before = bench.clock.monotonic()
    bench.admission.cycle_failed(CRASH, 0.1, has_stepped=False)
    started = bench.start()
    assert started == []
    bench.run_until(lambda: started)
    assert bench.clock.monotonic() - before >= 1.0


def test_a_stop_takes_a_held_start_back(benches):
    """Workers that were about to start do not, when the node decides otherwise meanwhile."""
    bench = benches(backoff_s=1.0)
    for _ in range(2):
        bench.admission.cycle_failed(CRASH, 0.1, has_stepped=False)
    first = bench.start()
    bench.admission.shut()
    second = bench.start()
    bench.run_until(lambda: second)
    assert first == []
