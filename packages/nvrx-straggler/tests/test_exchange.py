# SPDX-License-Identifier: Apache-2.0
"""How a rank waits for the others and takes over what they have agreed on, without other ranks."""

import logging
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


@pytest.fixture
def session():
    """The session of a detector without ranks."""
    Detector.initialize(cuda_profiling="off", control=False)
    return Detector._session


def test_a_rank_that_comes_at_the_last_moment_is_not_named(monkeypatch):
    """A rank that joins just before a report's time is over, and says so, is not missing in it."""
    now = 0.0

    def sleep(seconds):
        nonlocal now
        now += seconds

    class Peers:
        """Rank 1 has joined after 59.9 s and tells it when it has waited as long as this rank."""

        announced_at = None

        def announce(self, _stage):
            self.announced_at = now

        def absent(self):
            return "rank 2 has" if now >= 59.9 + self.announced_at else "ranks 1-2 have"

    monkeypatch.setattr(worker_module, "time", SimpleNamespace(monotonic=lambda: now, sleep=sleep))
    worker = ExchangeWorker(Peers(), timeout_s=60.0)
    worker._current = Exchange(lambda _: None, 60.0)
    worker._announced, worker._number, worker._started = False, 1, now
    worker._wait(worker._current._woken.is_set)
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
