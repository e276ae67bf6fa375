# SPDX-License-Identifier: Apache-2.0
"""A budget of restarts that refills."""

from nvidia_resiliency_ext.fault_tolerance._agent import decide
from nvidia_resiliency_ext.fault_tolerance._core import machine
from nvidia_resiliency_ext.fault_tolerance._core.machine import BudgetChanged, Node, Policy
from nvidia_resiliency_ext.fault_tolerance._rendezvous.records import Entry, Phase
from nvidia_resiliency_ext.fault_tolerance._rendezvous.restarts import Budget, RefillingBudget


def test_a_restart_counts_for_the_window_only():
    """Each restart is given back a window after it happened, and not before."""
    budget = RefillingBudget(2, 60.0)
    for cycle, now in enumerate((0.0, 10.0, 30.0)):
        budget.round_begins(cycle, (), now)
    assert budget.left(30.0) == 0
    assert budget.next_change(30.0) == 70.0
    assert budget.left(69.9) == 0
    assert budget.left(70.0) == 1
    assert budget.left(90.0) == 2
    assert budget.next_change(90.0) is None


def test_a_launcher_that_comes_late_counts_what_the_others_know():
    """The ages in the round's decision stand in for what a replacement has not seen."""
    budget = RefillingBudget(3, 60.0)
    budget.round_begins(7, (5.0, 59.0), 1000.0)
    assert budget.left(1000.0) == 1
    assert budget.left(1001.0) == 2


def test_the_number_told_wins_over_the_number_of_the_cycle():
    """With a budget that refills, a high cycle number alone ends nothing."""
    node = Node(Policy(2, 1.0, 1.0, 93), cycle=9)
    assert machine.restarts_left(node) == 0
    node, effects = decide.decide(node, BudgetChanged(2))
    assert (machine.restarts_left(node), effects) == (2, ())


def test_the_hosts_budget_counts_recent_restarts():
    """The store host counts ages within the window, and all rounds without one."""
    entry = Entry(9, Phase.CLOSED, 5, restart_ages_s=(1.0, 50.0, 70.0))
    assert Budget(3, 60.0).left(entry) == 1
    assert Budget(3, 60.0).left(entry, since_entry_s=15.0) == 2
    assert Budget(8).left(entry) == 3
