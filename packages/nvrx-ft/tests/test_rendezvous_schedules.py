# SPDX-License-Identifier: Apache-2.0
"""The protocol of many nodes over a real store, under random delays and faults."""

import pytest
import rendezvous_schedules

pytestmark = pytest.mark.slow

PER_TEST = 16


@pytest.mark.parametrize("first", range(0, 32, PER_TEST))
def test_every_schedule_keeps_the_rules(first: int) -> None:
    """One rank per node, rounds closed once and never reopened, all learn of all, all end."""
    wrong = rendezvous_schedules.run_all(list(range(first, first + PER_TEST)), at_once=8)
    assert not wrong, f"seeds that went wrong: {wrong}"
