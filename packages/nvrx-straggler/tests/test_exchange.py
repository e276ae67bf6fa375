# SPDX-License-Identifier: Apache-2.0
"""How a rank waits for the others and takes over what they have agreed on, without other ranks."""

import logging
import math
from types import SimpleNamespace

import pytest

from nvidia_resiliency_ext.attribution.straggler import Detector
from nvidia_resiliency_ext.attribution.straggler._exchange import worker as worker_module
from nvidia_resiliency_ext.attribution.straggler._exchange.generator import Outcome
from nvidia_resiliency_ext.attribution.straggler._exchange.worker import (
    Exchange,
    ExchangeSkippedError,
    ExchangeWorker,
)
from nvidia_resiliency_ext.attribution.straggler.interval_tracker import NEVER


@pytest.fixture
def session():
    """The session of a detector without ranks."""
    Detector.initialize(cuda_profiling="off", control=False)
    return Detector._session


@pytest.fixture
def waiting_worker(monkeypatch):
    """A worker with an exchange of 60 s, and peers, on a clock that only waits move."""
    clock = SimpleNamespace(now=0.0)

    def sleep(seconds):
        clock.now += seconds

    class Peers:
        """Rank 1 has joined after 59.9 s and tells it when it has waited as long as this rank."""

        announced_at = None

        def announce(self, _stage):
            self.announced_at = clock.now

        def absent(self):
            return "rank 2 has" if clock.now >= 59.9 + self.announced_at else "ranks 1-2 have"

    times = SimpleNamespace(monotonic=lambda: clock.now, sleep=sleep)
    monkeypatch.setattr(worker_module, "time", times)
    worker = ExchangeWorker(Peers(), timeout_s=60.0)
    worker._current = Exchange(lambda _: None, 60.0)
    worker._announced, worker._number, worker._started = False, 1, 0.0
    return worker, clock


def test_a_rank_that_comes_at_the_last_moment_is_not_named(waiting_worker):
    """A rank that joins just before a report's time is over, and says so, is not missing in it."""
    worker, _ = waiting_worker
    worker._wait(worker._current._woken.is_set)
    with pytest.raises(ExchangeSkippedError, match="rank 2 has not joined the report within 60 s"):
        worker._current.result()


@pytest.mark.parametrize("joined_at", [30.0, 60.5, 61.0, 61.9])
def test_ranks_are_named_in_whichever_collective_they_are_missed(waiting_worker, joined_at):
    """A collective that ends when names are due leaves them to the next one of the report."""
    worker, clock = waiting_worker
    worker._wait(lambda: clock.now > joined_at)
    if worker._current._woken.is_set():  # the caller is told once
        assert joined_at > 61.0
    worker._wait(worker._current._woken.is_set)
    assert clock.now < 63.0  # the caller still waits
    with pytest.raises(ExchangeSkippedError, match="rank 2 has not joined the report within 60 s"):
        worker._current.result()


class Missing:
    """A report that other ranks have not joined."""

    def result(self, **_):
        raise ExchangeSkippedError("rank 1 has not joined the report within 60 s")


def test_a_second_absence_is_a_warning_again(session, caplog):
    """An absence is told of once; after a whole report in between, the same one is told again."""
    with caplog.at_level(logging.WARNING, logger="nvrx"):
        for exchange in (Missing(), Missing(), SimpleNamespace(result=lambda **_: 1), Missing()):
            session._await(exchange)
    assert caplog.text.count("rank 1 has not joined") == 2


def test_older_settings_are_not_taken_over(session):
    """A report that is looked at after a later one leaves the later one's settings in force."""
    session.generator.rank = 1
    first = session.settings.changed({"profiling_interval": 2}, 1)
    second = first.changed({"profiling_interval": 3}, 1)
    for settings in (second, first):
        session._apply(Outcome(None, settings.encode()), session.settings)
        assert (session.settings, session.registry.interval) == (second, 3)


def test_an_estimate_that_is_not_withdrawn_is_not_put_off(session, caplog):
    """A rank that is late for the first interval tells of a later one only if there will be one."""

    def answer(exchange):
        session._submit = lambda *_, **__: exchange
        return session._agree_on_interval(5.0)

    voted = Exchange(lambda exchange: exchange.vote() and 7.0, 0.0, is_behind=True)
    voted.run()
    failed = Exchange(lambda exchange: exchange.vote() / 0, 60.0)
    failed.run()
    with caplog.at_level(logging.WARNING, logger="nvrx"):
        assert answer(voted) == 7.0
        assert caplog.text == ""
        assert answer(Exchange(lambda _: 7.0, 0.0, is_behind=True)) == math.inf
        assert caplog.text.count("agreed on 16 iterations later") == 1
        assert answer(failed) == NEVER
    assert caplog.text.count("straggler reports end here") == 1


def test_what_is_withdrawn_stays_withdrawn():
    """A rank that has withdrawn, and is asked again after its thread has voted, has not joined."""
    exchange = worker_module.Exchange(lambda _: None, 1.0)
    assert exchange.withdraw()
    assert not exchange.vote()
    assert exchange.withdraw()
