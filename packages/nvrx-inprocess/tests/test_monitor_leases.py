# SPDX-License-Identifier: Apache-2.0
"""Leases: which nodes are watched, and when one counts as lost."""

from nvidia_resiliency_ext.inprocess._monitor.timeouts import Ring

NODES = {0: (0, 1), 2: (2, 3), 4: (4, 5), 6: (6, 7)}
ALL = frozenset(range(8))


def ring() -> Ring:
    """Return a ring of four nodes of two ranks, looked at each second, lost after ten."""
    made = Ring(1.0, 10.0)
    made.update(NODES)
    return made


def test_each_node_watches_the_next() -> None:
    """The next node is watched, the first by the last; a node alone watches nobody."""
    assert [ring().to_read(own, ALL) for own in NODES] == [[2], [4], [6], [0]]
    assert ring().to_read(0, {0, 1}) == []


def test_nodes_without_participants_are_passed_over() -> None:
    """A node whose ranks have all left is not waited for."""
    assert ring().to_read(0, {0, 1, 5}) == [4]


def test_unchanged_lease_is_a_lost_node() -> None:
    """Its ranks are named once, when the lease has not changed for the timeout."""
    under_test = ring()
    lost = []
    for second in range(20):
        values = {each: 7 if each == 2 else second for each in under_test.to_read(0, ALL)}
        found = under_test.looked(values, 100.0 + second)
        lost += [(second, found)] if found else []
    assert lost == [(10, [2, 3])]


def test_a_late_lease_makes_us_look_at_all() -> None:
    """After half the timeout all leases are read, so nodes lost together are found together."""
    under_test = ring()
    found = []
    for second in range(30):
        wanted = under_test.to_read(0, ALL)
        values = {each: 7 if each in {2, 4} else second for each in wanted}
        found += [(second, ranks) for ranks in [under_test.looked(values, float(second))] if ranks]
    assert [ranks for _, ranks in found] == [[2, 3], [4, 5]]
    assert found[1][0] <= 10 + 6


def test_a_store_that_hangs_loses_nobody() -> None:
    """Time in which we could not look ourselves does not count against others."""
    under_test = ring()
    under_test.looked({2: 1}, 0.0)
    assert under_test.looked({2: 1}, 1000.0) == []
    assert under_test.looked({2: 1}, 2000.0) == []


def test_values_mean_nothing() -> None:
    """A lease that goes back is a changed lease: no host's clock or count is trusted."""
    under_test = ring()
    for second in range(50):
        assert under_test.looked({2: -second}, float(second)) == []


def test_covers() -> None:
    """`covers` tells whether the node of every participant is known."""
    assert ring().covers(ALL)
    assert not ring().covers({8})


def test_ranks_of_no_node_are_lost_after_a_while() -> None:
    """A rank that ended before any monitor knew it is named when the time is up, others never."""
    under_test = Ring(1.0, 10.0, 15.0)
    under_test.update(NODES)
    found = [under_test.unknown({0, 8, 9}, 100.0 + second) for second in range(15)]
    assert not any(found)
    under_test.update({**NODES, 9: (9,)})
    assert under_test.unknown({0, 8, 9}, 115.0) == [8]


def test_nobody_is_lost_while_nobody_could_ask() -> None:
    """Time in which the list of nodes could not be read does not count."""
    under_test = Ring(1.0, 10.0, 15.0)
    assert under_test.unknown({8}, 0.0) == []
    assert under_test.unknown({8}, 1000.0) == []
