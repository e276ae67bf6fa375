# SPDX-License-Identifier: Apache-2.0
"""Hosts that fail again and again: how they are counted, and what the store host makes of it."""

import dataclasses

from nvidia_resiliency_ext.fault_tolerance._core.machine import Cause
from nvidia_resiliency_ext.fault_tolerance._rendezvous import coordinator
from nvidia_resiliency_ext.fault_tolerance._rendezvous.placement import PlacementRules, summary
from nvidia_resiliency_ext.fault_tolerance._rendezvous.records import (
    Arrival,
    Entry,
    Kind,
    NodeMessage,
    Phase,
)
from nvidia_resiliency_ext.fault_tolerance._rendezvous.restarts import (
    BlameRules,
    Budget,
    blamed,
    record_failure,
)

RULES = BlameRules(limit=3, window_s=100.0)


def after(*failures, rules=RULES):
    """Return the count after failures given as (host, time)."""
    counted = {}
    for name, at in failures:
        counted = record_failure(counted, name, at, rules)
    return counted


def test_the_third_failure_within_the_window_is_one_too_many():
    """A host is to blame from its third failure on, until one of them is older than the window."""
    counted = after(("a", 0), ("a", 10), ("b", 15))
    assert blamed(counted, 20, RULES) == frozenset()
    counted = after(("a", 0), ("a", 10), ("b", 15), ("a", 20))
    assert blamed(counted, 99, RULES) == {"a"}
    assert blamed(counted, 101, RULES) == frozenset()


def test_the_count_does_not_grow():
    """Whatever happens, only the last failures of a host are kept, and no host for ever."""
    counted = after(*(("a", t) for t in range(1000)), ("b", 1200))
    assert counted == {"b": (1200,)}
    assert len(after(*(("a", t) for t in range(50)))["a"]) == RULES.limit


def test_a_limit_of_zero_blames_nobody():
    """The rule can be switched off."""
    off = BlameRules(limit=0)
    assert blamed(after(*[("a", 1)] * 9, rules=off), 2, off) == frozenset()


def node(name):
    identity = f"{name}_1_0"
    return NodeMessage(Kind.ARRIVED, identity, arrival=Arrival(node=identity, addr=name, host=name))


def decide(names, failures, **placement):
    sizes = {"min_nodes": 2, "max_nodes": 4, **placement}
    rules = coordinator.CoordinatorRules(
        PlacementRules(**sizes), Budget(9, None), 5.0, RULES, last_call_s=0.0
    )
    memory = coordinator.Memory(failures=failures)
    messages = tuple(node(name) for name in names)
    return coordinator.decide(
        coordinator.View(rules, memory, 50.0, Entry(1, Phase.OPEN, 3), messages)
    )


def names_of(decision):
    return {candidate.addr for candidate in decision.active}


BAD = {"a": (10.0, 20.0, 30.0)}


def test_a_host_to_blame_makes_room_for_a_spare():
    """With a spare the host to blame does not work, and the one line says why."""
    decision = decide("abc", BAD)
    assert names_of(decision) == {"b", "c"}
    assert "1 failed again and again" in summary(decision)
    assert names_of(decide("abc", {})) == {"a", "b"}


def test_a_host_to_blame_works_where_there_is_no_spare():
    """Without enough others everybody works: a job is not given up for that."""
    assert names_of(decide("ab", BAD)) == {"a", "b"}


def test_where_all_nodes_work_nobody_is_left_out():
    """A job that takes every node loses none of them to blame."""
    decision = decide("abc", BAD, elastic=True)
    assert names_of(decision) == {"a", "b", "c"}


def test_all_hosts_to_blame_are_no_obstacle():
    """When everybody failed often, everybody is as good as before."""
    bad = dict.fromkeys("abc", (10.0, 20.0, 30.0))
    assert len(decide("abc", bad).active) == 2


def test_the_rules_travel_to_a_control_plane():
    """A control plane goes by the limit and window that the launchers agree on."""
    from nvidia_resiliency_ext.fault_tolerance._rendezvous.agreement import (
        rules_from_settings,
        settings_of,
    )

    rules = coordinator.CoordinatorRules(
        PlacementRules(2, 3), Budget(9, None), 5.0, blame=BlameRules(7, 60.0)
    )
    assert rules_from_settings(settings_of(rules)) == rules
    assert dataclasses.replace(rules, blame=BlameRules()).blame.limit == 3


def test_only_failures_of_the_node_count():
    """A node that was drained, or a job that began anew, is nobody's fault."""
    from nvidia_resiliency_ext.fault_tolerance._rendezvous.restarts import OF_THE_NODE

    assert Cause("killed", "").kind in OF_THE_NODE
    assert OF_THE_NODE.isdisjoint(("drained", "left", "opened", "mismatch"))
