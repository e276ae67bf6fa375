# SPDX-License-Identifier: Apache-2.0
"""Who trains in a round and with which rank: the rules, and what holds for any nodes."""

import dataclasses
import itertools
import pickle
import random
from collections import Counter, defaultdict

import pytest

from nvidia_resiliency_ext.fault_tolerance._rendezvous.keys import NodeIdentity
from nvidia_resiliency_ext.fault_tolerance._rendezvous.placement import (
    NotEnough,
    Placement,
    PlacementError,
    PlacementRules,
    check_texts,
    place,
    summary,
)
from nvidia_resiliency_ext.fault_tolerance._rendezvous.records import Arrival

SEEDS = range(20)
DRAWS = 15


def node(name, infra_rank=-1, **fields):
    return Arrival(node=f"{name}_100_0", addr=name, infra_rank=infra_rank, **fields)


def rules(min_nodes, max_nodes=None, **fields):
    return PlacementRules(min_nodes, max_nodes or min_nodes, **fields)


def names(candidates):
    return [candidate.addr for candidate in candidates]


def closed(result):
    assert isinstance(result, Placement), result
    return result


def next_round(placement, stay, come=()):
    """Return the arrivals of a next round: those of the last one that stay, and new nodes."""
    ranks = {candidate.node: rank for rank, candidate in enumerate(placement.active)}
    before = [*placement.active, *placement.spare, *placement.excluded]
    return [
        dataclasses.replace(candidate, previous_rank=ranks.get(candidate.node))
        for candidate in before
        if stay(candidate)
    ] + list(come)


def random_job(draw, *, has_infra_ranks):
    """Return candidates and rules; now and then too few of them."""
    segment = draw.choice([None, None, 1, 2, 3, 4])
    min_nodes = (segment or 1) * draw.randint(1, 6)
    elastic = draw.random() < 0.3
    group_size = draw.choice([None, None, 1, 2, 3])
    count = max(0, min_nodes + draw.randint(-2, 12))
    infra_ranks = draw.sample(range(4 * count + 1), count)
    candidates = [
        Arrival(
            node=f"n{draw.randint(1, 30)}_x_{index}_{draw.randint(0, 2)}",
            addr=f"10.0.0.{index}",
            infra_rank=infra_ranks[index] if has_infra_ranks else -1,
            domain=f"domain{draw.randint(0, 2)}",
            group=draw.choice([None, *"abcd"]) if group_size else None,
        )
        for index in range(count)
    ]
    wanted = PlacementRules(
        min_nodes=min_nodes,
        max_nodes=min_nodes + draw.randint(0, 6),
        segment=segment,
        group_size=group_size,
        elastic=elastic,
    )
    unhealthy = frozenset(draw.sample("abcd", draw.randint(0, 1)) if group_size else ())
    return candidates, wanted, unhealthy


def as_the_rules_say(candidates, wanted, unhealthy):
    """Return the nodes that train, by the rules for a first round, in the plainest way."""
    members = Counter(candidate.group for candidate in candidates)
    usable = [
        candidate
        for candidate in candidates
        if candidate.group not in unhealthy
        and (1 if candidate.group is None else members[candidate.group]) >= (wanted.group_size or 1)
    ]
    if all(candidate.infra_rank >= 0 for candidate in usable):
        usable.sort(key=lambda candidate: candidate.infra_rank)
    else:
        usable.sort(key=lambda candidate: NodeIdentity.parse(candidate.node))
    world = wanted.max_nodes if wanted.elastic else wanted.min_nodes
    size = wanted.segment or 1
    domains = defaultdict(list)
    for candidate in usable:
        domains[candidate.domain if wanted.segment else ""].append(candidate)
    active = []
    for nodes in domains.values():
        active += nodes[: len(nodes) // size * size]
    active = active[: world // size * size]
    return active if len(active) >= wanted.min_nodes else None


# The rules ---------------------------------------------------------------------------------------


def test_infra_ranks_give_the_order():
    """Ranks follow infrastructure ranks; the first `min_nodes` train, the rest stand by."""
    nodes = [node("d", 40), node("a", 31), node("c", 7), node("b", 12)]
    placement = closed(place(nodes, rules(2, 4)))
    assert names(placement.active) == ["c", "b"]
    assert names(placement.spare) == ["a", "d"]
    assert placement.excluded == ()


def test_infra_ranks_count_more_than_earlier_ranks():
    """Where all infrastructure ranks are known, earlier ranks are ignored."""
    nodes = [node("a", 5, previous_rank=0), node("b", 3, previous_rank=1), node("c", 4)]
    assert names(closed(place(nodes, rules(2, 3))).active) == ["b", "c"]


def test_one_unknown_infra_rank_orders_all_by_identity():
    """A single node without infrastructure rank makes the identity decide for all."""
    nodes = [node("c", 0), node("a", 2), node("b", -1)]
    assert names(closed(place(nodes, rules(3))).active) == ["a", "b", "c"]


def test_infra_ranks_may_be_switched_off():
    """With `use_infra_rank` off identities decide, and equal infrastructure ranks are no error."""
    nodes = [node("b", 0), node("a", 0)]
    assert names(closed(place(nodes, rules(2, use_infra_rank=False))).active) == ["a", "b"]


def test_identities_are_ordered_by_address_then_numbers():
    """`a_9_0` comes before `a_10_0`, and an address may contain underscores."""
    texts = ["a_b_1_0", "a_10_1", "a_10_0", "a_9_3", "b_1_0"]
    nodes = [Arrival(node=text, addr=text) for text in texts]
    placement = closed(place(nodes, rules(5)))
    assert [one.node for one in placement.active] == [
        "a_9_3",
        "a_10_0",
        "a_10_1",
        "a_b_1_0",
        "b_1_0",
    ]


def test_without_infra_ranks_survivors_keep_their_ranks():
    """A spare takes the rank of the node that is gone; everybody else keeps theirs."""
    first = closed(place([node(name) for name in "bcdez"], rules(4, 5)))
    assert names(first.active) == ["b", "c", "d", "e"]
    second = closed(place(next_round(first, lambda one: one.addr != "c"), rules(4, 5)))
    assert names(second.active) == ["b", "z", "d", "e"]


def test_a_later_node_with_a_smaller_identity_moves_nobody():
    """Who trained goes on training, although a new node would come first by identity."""
    first = closed(place([node("m"), node("n")], rules(2, 4)))
    second = closed(place(next_round(first, lambda _: True, [node("a")]), rules(2, 4)))
    assert names(second.active) == ["m", "n"]
    assert names(second.spare) == ["a"]


def test_two_claims_to_one_earlier_rank():
    """Of two nodes that say they had one rank the first by identity gets it."""
    nodes = [node("b", previous_rank=1), node("c", previous_rank=1), node("a")]
    assert names(closed(place(nodes, rules(3))).active) == ["a", "b", "c"]


@pytest.mark.parametrize("rank", [-5, 2, 10**9])
def test_an_earlier_rank_that_is_none(rank):
    """An earlier rank outside the group is no claim to a place, whatever was sent."""
    nodes = [node("b", previous_rank=rank), node("a", previous_rank=1)]
    assert names(closed(place(nodes, rules(2))).active) == ["b", "a"]


def test_segments_are_taken_whole_from_domains():
    """Domains come by their smallest infrastructure rank, each gives only whole segments."""
    nodes = [
        node("a0", 0, domain="A"),
        node("b1", 1, domain="B"),
        node("a2", 2, domain="A"),
        node("b3", 3, domain="B"),
        node("a4", 4, domain="A"),
        node("c5", 5, domain="C"),
    ]
    placement = closed(place(nodes, rules(4, 6, segment=2)))
    assert names(placement.active) == ["a0", "a2", "b1", "b3"]
    assert names(placement.spare) == ["a4", "c5"]


def test_a_domain_that_lost_a_segment_gives_up_the_emptier_one():
    """Survivors keep ranks as whole segments; the segment that can't be filled moves elsewhere."""
    nodes = [node(f"a{i}", domain="A") for i in range(4)]
    nodes += [node(f"b{i}", domain="B") for i in range(2)]
    wanted = rules(4, 6, segment=2)
    first = closed(place(nodes, wanted))
    assert names(first.active) == ["a0", "a1", "a2", "a3"]
    second = closed(place(next_round(first, lambda one: one.addr != "a0"), wanted))
    assert names(second.active) == ["b0", "b1", "a2", "a3"]
    assert names(second.spare) == ["a1"]


def test_a_node_whose_segment_is_gone_fills_a_hole_before_a_spare():
    """Who trained goes on training at another rank rather than a spare that never did."""
    nodes = [
        node("a0", domain="A"),
        node("a1", domain="A", previous_rank=1),
        node("a3", domain="A", previous_rank=3),
        node("b0", domain="B"),
        node("b1", domain="B"),
    ]
    placement = closed(place(nodes, rules(4, 5, segment=2)))
    assert names(placement.active) == ["a3", "a1", "b0", "b1"]


def test_elastic_takes_all_up_to_the_limit():
    """With `elastic` everybody up to `max_nodes` trains, and the fewest are `min_nodes`."""
    wanted = rules(2, 3, elastic=True)
    for count, active in [(2, 2), (3, 3), (5, 3)]:
        placement = closed(place([node(f"n{i}", i) for i in range(count)], wanted))
        assert len(placement.active) == active
        assert len(placement.spare) == count - active
    assert isinstance(place([node("n0", 0)], wanted), NotEnough)


def test_a_shrinking_elastic_group_is_renumbered_without_gaps():
    """Ranks that are still valid stay; the others fill the gaps in node order."""
    wanted = rules(2, 4, elastic=True)
    first = closed(place([node(name) for name in "abcd"], wanted))
    second = closed(place(next_round(first, lambda one: one.addr in "bd"), wanted))
    assert names(second.active) == ["d", "b"]


def test_groups_that_are_unhealthy_or_incomplete_are_excluded():
    """Their nodes get no rank, are numbered last, and the summary says why."""
    nodes = [
        node("n1", 1, group="0"),
        node("n2", 2, group="0"),
        node("n3", 3, group="1"),
        node("n4", 4, group="2"),
        node("n5", 5, group="2"),
        node("n6", 6),
        node("n7", 7, group="3"),
        node("n8", 8, group="3"),
    ]
    placement = closed(place(nodes, rules(2, 8, group_size=2), frozenset({"0"})))
    assert names(placement.active) == ["n4", "n5"]
    assert names(placement.spare) == ["n7", "n8"]
    assert names(placement.excluded) == ["n1", "n2", "n3", "n6"]
    assert summary(placement) == (
        "2 active: n[4-5]; 2 spare: n[7-8]; 4 excluded: n[1-3,6] (group 0 is unhealthy,"
        " group 1 has 1 of 2 nodes, 1 node has no NVRX_REPLACEMENT_GROUP_ID)"
    )


def test_survivors_of_a_replaced_task_are_no_error():
    """An excluded node may share its infrastructure rank and address with the one after it."""
    nodes = [
        node("n9", 1, group="0"),
        Arrival("n2_1_0", "n2", infra_rank=2, group="1"),
        Arrival("n2_2_0", "n2", infra_rank=2, group="2"),
        node("n3", 3, group="2"),
    ]
    placement = closed(place(nodes, rules(2, 4, group_size=2)))
    assert [one.node for one in placement.active] == ["n2_2_0", "n3_100_0"]
    assert names(placement.excluded) == ["n9", "n2"]


def test_summary_of_a_round_without_spares():
    """Long lists are short, whatever kind of addresses they are."""
    nodes = [node(f"node{i:03}.cluster.local", i) for i in range(1, 5)]
    placement = closed(place(nodes, rules(4)))
    assert summary(placement) == "4 active: node[001-004].cluster.local; 0 spare; 0 excluded"


# What is not enough ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nodes", "wanted", "unhealthy", "reason"),
    [
        ([], rules(2), (), "arrived: 0, needed: 2 nodes"),
        ([node("a", 1)], rules(2), (), "arrived: 1, needed: 2 nodes"),
        ([node("a", 1, domain="A")], rules(2, segment=2), (), "arrived: 1, needed: 2 nodes"),
        (
            [node("a", 1, group="x"), node("b", 2, group="y"), node("c", 3, group="y")],
            rules(2, 3),
            ("y",),
            "arrived: 3, usable: 1 (group y is unhealthy), needed: 2 nodes",
        ),
        (
            [node("a", 1, group="x"), node("b", 2), node("c", 3)],
            rules(2, 3, group_size=2),
            (),
            (
                "arrived: 3, usable: 0 (group x has 1 of 2 nodes,"
                " 2 nodes have no NVRX_REPLACEMENT_GROUP_ID), needed: 2 nodes"
            ),
        ),
        (
            [node(f"n{i}", i, domain="AB"[i % 2]) for i in range(6)],
            rules(4, 6, segment=4),
            (),
            (
                "arrived: 6, needed: 4 nodes, but they fill 0 of 1 segments of 4"
                " (nodes per NVLink domain: A: 3, B: 3)"
            ),
        ),
    ],
)
def test_reason_why_a_round_cannot_close(nodes, wanted, unhealthy, reason):
    """Whoever waits is told what for."""
    assert place(nodes, wanted, unhealthy) == NotEnough(reason)


# What is an error --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nodes", "wanted", "message", "named"),
    [
        (
            [node("a", 1), node("b", 3), node("c", 3)],
            rules(2, 3),
            "infrastructure rank 3 is claimed by b_100_0, c_100_0: give each node its own",
            ("b_100_0", "c_100_0"),
        ),
        (
            [Arrival("a_1_0", "a", infra_rank=1), Arrival("a_2_0", "a", infra_rank=2)],
            rules(2),
            "several launchers run on a: a_1_0, a_2_0: start one per node",
            ("a_1_0", "a_2_0"),
        ),
        (
            [node("a"), node("a"), node("b")],
            rules(2, one_launcher_per_addr=False),
            "the identity a_100_0 arrived more than once: every launcher needs",
            ("a_100_0", "a_100_0"),
        ),
        (
            [node("a", 1, domain="A"), node("b", 2), node("c", 3, domain="")],
            rules(1, 3, segment=1),
            "b_100_0, c_100_0 named none: give all nodes the same --ft-segment",
            ("b_100_0", "c_100_0"),
        ),
    ],
)
def test_nodes_that_can_never_be_placed(nodes, wanted, message, named):
    """The error names the nodes and the remedy, in its text and as data."""
    for order in itertools.permutations(nodes):
        with pytest.raises(PlacementError) as caught:
            place(order, wanted)
        assert message in str(caught.value)
        assert caught.value.nodes == named


def test_an_error_survives_pickling():
    """The error keeps text and nodes when it crosses a process boundary."""
    error = pickle.loads(pickle.dumps(PlacementError("what", ("a_1_0",))))
    assert (str(error), error.nodes) == ("what", ("a_1_0",))


def test_an_error_about_many_nodes_is_short():
    """Of many faults the first few are told, and how many more there are."""
    nodes = [node(f"n{i:04}", i // 2) for i in range(4096)]
    with pytest.raises(PlacementError, match="and 2040 more") as caught:
        place(nodes, rules(2048, 4096))
    assert len(str(caught.value)) < 1000
    assert len(caught.value.nodes) == 4096


def test_several_launchers_on_a_node_where_that_is_allowed():
    """Without `one_launcher_per_addr` one address may train twice."""
    nodes = [Arrival("a_10_0", "a"), Arrival("a_9_0", "a")]
    placement = closed(place(nodes, rules(2, one_launcher_per_addr=False)))
    assert [one.node for one in placement.active] == ["a_9_0", "a_10_0"]


@pytest.mark.parametrize(
    "fields",
    [
        {"node": "a"},
        {"node": "a_1"},
        {"node": "a_1_x"},
        {"node": "_1_0"},
        {"node": "a_1_0\n"},
        {"node": "a\n_1_0"},
        {"node": "a_-1_0"},
        {"node": "a\x1b_1_0"},
        {"node": f"{'a' * 300}_1_0"},
        {"node": "a_1_" + "9" * 5000},
        {"addr": "a\nb"},
        {"addr": "a" * 300},
        {"domain": "\x1b[31m"},
        {"group": "a" * 300},
    ],
)
def test_foreign_texts(fields):
    """What would spoil the order or a log is refused."""
    with pytest.raises(ValueError, match=r"no identity|too long or not printable"):
        check_texts(Arrival(**{"node": "a_1_0", "addr": "a", **fields}))


def test_an_identity_is_its_text():
    """Reading an identity's text gives the identity again."""
    identity = NodeIdentity("host_with.parts", 42, 7)
    assert NodeIdentity.parse(str(identity)) == identity


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ((0, 0), "min_nodes must be at least 1, not 0: see --nnodes"),
        ((3, 2), r"max_nodes \(2\) is below min_nodes \(3\): give --nnodes as"),
        ((4, 4, 0), "segment must be at least 1, not 0; leave it out"),
        ((4, 4, 3), r"segment \(3\) does not divide min_nodes \(4\)"),
        ((4, 4, 8), r"segment \(8\) does not divide min_nodes \(4\)"),
        ((4, 4, None, -1), "replacement_group_size must be at least 1, not -1"),
    ],
)
def test_rules_that_cannot_be_fulfilled(wanted, message):
    """Impossible values are refused by name, with the remedy."""
    with pytest.raises(ValueError, match=message):
        PlacementRules(*wanted)


def test_rules_that_can_be_fulfilled():
    """Spares, segments and groups that do not divide anything else are fine."""
    assert PlacementRules(4, 7, segment=2, group_size=3).max_nodes == 7
    assert PlacementRules(1, 1).max_nodes == 1


# What holds for any nodes ------------------------------------------------------------------------


@pytest.mark.parametrize("has_infra_ranks", [True, False])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_first_round_follows_the_rules(seed, has_infra_ranks):
    """Without earlier ranks the outcome is what the rules say word by word."""
    draw = random.Random(seed)
    for _ in range(DRAWS):
        candidates, wanted, unhealthy = random_job(draw, has_infra_ranks=has_infra_ranks)
        expected = as_the_rules_say(candidates, wanted, unhealthy)
        result = place(candidates, wanted, unhealthy)
        if expected is None:
            assert isinstance(result, NotEnough)
        else:
            assert list(closed(result).active) == expected


@pytest.mark.parametrize("has_infra_ranks", [True, False])
@pytest.mark.parametrize("seed", SEEDS)
def test_the_order_of_arrival_does_not_matter(seed, has_infra_ranks):
    """Shuffled arrivals give the same placement or the same reason, earlier ranks included."""
    draw = random.Random(seed)
    for _ in range(DRAWS):
        candidates, wanted, unhealthy = random_job(draw, has_infra_ranks=has_infra_ranks)
        candidates = [
            dataclasses.replace(one, previous_rank=draw.choice([None, draw.randint(-1, 9)]))
            for one in candidates
        ]
        first = place(candidates, wanted, unhealthy)
        for _ in range(3):
            draw.shuffle(candidates)
            assert place(iter(candidates), wanted, unhealthy) == first


@pytest.mark.parametrize("has_infra_ranks", [True, False])
@pytest.mark.parametrize("seed", SEEDS)
def test_everybody_has_one_place_over_many_rounds(seed, has_infra_ranks):
    """Over rounds with losses and new nodes: nobody is lost or twice there, the group is whole.

    Exactly `min_nodes` train (with `elastic` as many as there is room for), every segment is of one
    domain, survivors of an order without infrastructure ranks keep their rank or, with segments,
    lose it only to a segment that could not stay.
    """
    draw = random.Random(seed)
    for _ in range(DRAWS):
        follow_rounds(draw, has_infra_ranks=has_infra_ranks)


def follow_rounds(draw, *, has_infra_ranks):
    candidates, wanted, unhealthy = random_job(draw, has_infra_ranks=has_infra_ranks)
    for round_number in range(6):
        result = place(candidates, wanted, unhealthy)
        if isinstance(result, NotEnough):
            assert as_the_rules_say(candidates, wanted, unhealthy) is None
            return
        everybody = [*result.active, *result.spare, *result.excluded]
        assert Counter(everybody) == Counter(candidates)
        expected = as_the_rules_say(candidates, wanted, unhealthy)
        assert len(result.active) == len(expected)
        if not wanted.elastic:
            assert len(result.active) == wanted.min_nodes
        check_segments(result, wanted)
        check_groups(result, wanted, unhealthy)
        if not all(one.infra_rank >= 0 for one in (*result.active, *result.spare)):
            check_survivors(result, wanted)
        new_nodes = [
            Arrival(
                node=f"n{draw.randint(1, 30)}_x_{1000 * (round_number + 1) + index}_0",
                addr=f"10.{round_number + 1}.0.{index}",
                infra_rank=1000 * (round_number + 1) + index if has_infra_ranks else -1,
                domain=f"domain{draw.randint(0, 2)}",
                group=draw.choice([None, *"abcd"]) if wanted.group_size else None,
            )
            for index in range(draw.randint(0, 3))
        ]
        candidates = next_round(result, lambda _: draw.random() < 0.85, new_nodes)
        draw.shuffle(candidates)


def check_segments(placement, wanted):
    size = wanted.segment or 1
    assert len(placement.active) % size == 0
    if wanted.segment:
        for first in range(0, len(placement.active), size):
            segment = placement.active[first : first + size]
            assert len({one.domain for one in segment}) == 1


def check_groups(placement, wanted, unhealthy):
    everybody = [*placement.active, *placement.spare, *placement.excluded]
    sizes = Counter(one.group for one in everybody)
    for one in (*placement.active, *placement.spare):
        assert one.group not in unhealthy
        assert (1 if one.group is None else sizes[one.group]) >= (wanted.group_size or 1)


def check_survivors(placement, wanted):
    """Check that survivors keep their ranks as far as rules allow it."""
    size = wanted.segment or 1
    world = len(placement.active)
    usable = [*placement.active, *placement.spare]
    capacity = Counter()
    for name, nodes in Counter(one.domain if wanted.segment else "" for one in usable).items():
        capacity[name] = nodes // size
    survivors = [one for one in usable if one.previous_rank is not None]
    home = {one.previous_rank // size: one.domain if wanted.segment else "" for one in survivors}
    claims = Counter(domain for block, domain in home.items() if (block + 1) * size <= world)
    for one in survivors:
        if (
            one.previous_rank < world
            and claims[home[one.previous_rank // size]] <= capacity[home[one.previous_rank // size]]
        ):
            assert placement.active[one.previous_rank] is one
    # Nobody who never trained sits where somebody who did could: same domain, a place by.
    for one in placement.spare:
        if one.previous_rank is not None:
            rivals = [a for a in placement.active if not wanted.segment or a.domain == one.domain]
            assert all(a.previous_rank is not None for a in rivals)


def test_keeping_as_many_ranks_as_possible():
    """With segments as many survivors keep their ranks as any choice of segments allows."""
    draw = random.Random(1)
    for _ in range(300):
        nodes = [node(f"n{i:02}", domain="AB"[i % 2]) for i in range(16)]
        wanted = rules(8, 16, segment=2)
        first = closed(place(nodes, wanted))
        lost = set(draw.sample(range(16), 6))
        arrivals = next_round(first, lambda one, lost=lost: int(one.addr[1:]) not in lost)
        result = place(arrivals, wanted)
        usable = Counter(one.domain for one in arrivals)
        if usable["A"] // 2 + usable["B"] // 2 < 4:
            assert isinstance(result, NotEnough)
            continue
        alive = Counter((one.previous_rank // 2, one.domain) for one in arrivals
                        if one.previous_rank is not None)  # fmt: skip
        best = 0
        for domain in "AB":
            counts = sorted((c for (_, d), c in alive.items() if d == domain), reverse=True)
            best += sum(counts[: usable[domain] // 2])
        kept = sum(one.previous_rank == rank for rank, one in enumerate(closed(result).active))
        assert kept >= best
