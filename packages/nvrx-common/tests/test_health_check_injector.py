# SPDX-License-Identifier: Apache-2.0
"""Injected failures of health checks: who fails when, and what a mistyped list does."""

import logging

import pytest

from nvidia_resiliency_ext.testing_utils import health_check_injector as injector
from nvidia_resiliency_ext.testing_utils.health_check_injector import HealthCheckInjector

VARIABLE = "NVRX_INJECT_GPU_FAILURE"


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    injector.reset_for_tests()
    yield
    injector.reset_for_tests()


def test_only_the_named_cycle_and_rank_fail() -> None:
    """A failure hits its cycle on its rank, several of one cycle included, and nobody else."""
    injector = HealthCheckInjector("2:0,2:1, 5:3")
    hits = [(c, r) for c in range(7) for r in range(5) if injector.should_inject_failure(c, r)]
    assert hits == [(2, 0), (2, 1), (5, 3)]
    injector.set_current_cycle(2)


def test_kinds() -> None:
    """A third part names the check that fails; who names no kind is told of any."""
    injector = HealthCheckInjector("1:0:storage,1:0:hang,1:1")
    assert injector.kinds(1, 0) == {"storage", "hang"}
    assert injector.should_inject_failure(1, 0)
    assert injector.should_inject_failure(1, 0, "storage")
    assert not injector.should_inject_failure(1, 0, "gpu")
    assert injector.should_inject_failure(1, 1, "gpu")


def test_older_callers_may_tell_the_cycle(monkeypatch) -> None:
    """Setting a cycle is accepted, of an injector and of the module, and changes no answer."""
    monkeypatch.setenv(VARIABLE, "1:1")
    injector.set_current_cycle(2)
    HealthCheckInjector().set_current_cycle(2)
    assert injector.should_inject_failure(1, 1)
    assert not injector.should_inject_failure(2, 1)


@pytest.mark.parametrize(
    "bad", ["x:1", "1:y", "1", "1:2:3:4", "1:0:disk", "-1:0", "1.5:0", ":", "1:", "\u0661:0"]
)
def test_bad_entries_are_said_and_passed_over(bad, caplog) -> None:
    """A mistake costs its own entry and one warning; the others count."""
    with caplog.at_level(logging.WARNING, "nvrx"):
        injector = HealthCheckInjector(f"7:1,{bad},8:2")
    assert injector.should_inject_failure(7, 1)
    assert injector.should_inject_failure(8, 2)
    assert len([each for each in caplog.records if VARIABLE in each.getMessage()]) == 1


def test_environment_is_read_once(monkeypatch, caplog) -> None:
    """Without the variable nothing is injected; what it says is kept until it is read anew."""
    assert not injector.should_inject_failure(1, 1)
    monkeypatch.setenv(VARIABLE, "1:1")
    with caplog.at_level(logging.WARNING, "nvrx"):
        assert injector.should_inject_failure(1, 1)
        monkeypatch.setenv(VARIABLE, "2:2")
        assert injector.should_inject_failure(1, 1)
    assert caplog.text.count("on purpose") == 1
    assert caplog.text.count("injecting a gpu") == 2
    injector.reset_for_tests()
    assert injector.should_inject_failure(2, 2)
    monkeypatch.setenv(VARIABLE, "")
    assert not injector.should_inject_failure(2, 2)
