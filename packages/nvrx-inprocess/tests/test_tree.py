# SPDX-License-Identifier: Apache-2.0
"""Tree: who is active under which number after losses."""

import random
import warnings

import pytest
from slow_tree import SlowTree

from nvidia_resiliency_ext.inprocess._ranks.layout import Layer, LayerFlag, Layout
from nvidia_resiliency_ext.inprocess._ranks.tree import TreePlan
from nvidia_resiliency_ext.inprocess.rank_assignment import (
    InternalError,
    RankAssignmentCtx,
    RankDiscarded,
    Tree,
)
from nvidia_resiliency_ext.inprocess.state import Mode, State

RESERVE, BACKFILL = LayerFlag.RESERVE, LayerFlag.BACKFILL
BOTH = RESERVE | BACKFILL


class StubStore:
    """A store with the four methods only, which knows what all ranks would say."""

    def __init__(self, size, layers):
        self.states = {rank: State(rank=rank, world_size=size) for rank in range(size)}
        self.keys = {
            rank: [
                layer.key_or_fn(state) if callable(layer.key_or_fn) else layer.key_or_fn
                for layer in layers
            ]
            for rank, state in self.states.items()
        }

    def send_state(self, state, rank):
        self.states[rank] = state

    def get_states(self, ranks):
        return [self.states[rank] for rank in ranks]

    def send_key(self, key, rank):
        self.keys[rank] = key

    def get_keys(self, ranks):
        return [self.keys[rank] for rank in ranks]


def by(count):
    return lambda state: str(state.rank // count)


def two(flag_of_root, count, **inner):
    return [Layer(flag=flag_of_root), Layer(key_or_fn=by(count), **inner)]


def shown(tree):
    """Return active ranks by initial rank: '-' for the lost, 'r' for reserves."""
    words = []
    for initial in sorted(tree.init_rank_map):
        state = tree.init_rank_map[initial].state
        if state.mode is Mode.TERMINATED:
            words.append("-")
        else:
            words.append("r" if state.active_rank is None else str(state.active_rank))
    return " ".join(words)


def changed(**fields):
    """Return a layer whose fields were set after it was made."""
    layer = Layer()
    for name, value in fields.items():
        setattr(layer, name, value)
    return layer


def assign(layers, size, *losses, world_size_filter=None, caller=None):
    """Return what each assignment gives, as seen by one surviving rank."""
    caller = size - 1 if caller is None else caller
    tree = Tree(layers, world_size_filter)
    store, state, found = StubStore(size, layers), State(rank=caller, world_size=size), []
    for lost in losses:
        state = tree(RankAssignmentCtx(state, store, set(lost))).state
        found.append(shown(tree))
    return found


@pytest.mark.parametrize(
    ("layers", "size", "losses", "expected"),
    [
        (two(BACKFILL, 4, flag=BACKFILL), 8, [{1}], ["0 - 2 3 4 5 6 1"]),
        (two(None, 4, flag=BACKFILL), 8, [{1}], ["0 - 2 1 3 4 5 6"]),
        (two(None, 4), 8, [{1}], ["0 - 1 2 3 4 5 6"]),
        (two(BACKFILL, 2, flag=BACKFILL), 8, [{2, 3}], ["0 1 - - 4 5 2 3"]),
        (
            two(RESERVE, 4, max_ranks=3, flag=RESERVE),
            8,
            [{1}, {3}, {1}],
            ["0 - 2 1 3 4 5 r", "0 - 2 1 - 4 5 3", "0 - - 1 - 3 4 2"],
        ),
        (two(None, 4, min_ranks=3), 8, [{0, 2}], ["- - - - 0 1 2 3"]),
        (
            two(BOTH, 4, min_ranks=2, max_ranks=3, flag=BOTH),
            12,
            [{0, 1, 2}],
            ["- - - - 3 4 5 1 6 7 2 0"],
        ),
    ],
)  # fmt: skip
def test_table(layers, size, losses, expected):
    """The documented examples come out as documented, also when the losses come one call later."""
    assert assign(layers, size, *losses) == expected
    assert assign(layers, size, set(), *losses)[1:] == expected


def test_backfill_moves_the_largest_even_if_a_larger_number_is_lost_too():
    """Of 8 without {1, 7} the two largest that live take 1 and 7; then all move up."""
    layers = [Layer(flag=BACKFILL), Layer(key_or_fn=by(4), flag=BACKFILL)]
    assert assign(layers, 8, {1, 7}, caller=0) == ["0 - 2 3 4 1 5 -"]


def test_backfill_beyond_the_ranks_there_are():
    """More losses than survivors: the survivors take the smallest numbers, the rest are gaps."""
    layers = [Layer(flag=BACKFILL), Layer(key_or_fn=by(4), flag=BACKFILL)]
    assert assign(layers, 8, {0, 2, 3, 4, 5, 6}) == ["- 0 - - - - - 1"]


def test_reserves_go_to_the_lowest_lost_ranks_first():
    """Losses are served by rank, not by active rank, where earlier losses have mixed the two."""
    found = assign([Layer(max_ranks=5, flag=RESERVE)], 8, {0}, {0, 6}, caller=3)
    assert found == ["- 1 2 3 4 r r 0", "- - 2 3 4 0 1 -"]


def test_backfill_keeps_numbers_in_order():
    """Movers take the lost numbers in order, where earlier losses have mixed ranks and numbers."""
    assert assign([Layer(flag=BACKFILL)], 6, {0}, {0, 4}, caller=2) == [
        "- 1 2 3 4 0",
        "- - 2 0 1 -",
    ]


def test_climb_stops_at_a_layer_without_reserve():
    """Reserves of other branches are out of reach if the branch itself has no RESERVE."""
    layers = [Layer(max_ranks=6, flag=RESERVE), Layer(key_or_fn=by(4))]
    assert assign(layers, 8, {1}) == ["0 - 1 2 3 4 r r"]


def test_filter_makes_reserves_and_the_last_of_them_come_back_first():
    """What the filter takes out stands ready; of the ranks taken out together the last is first."""
    found = assign(
        [Layer(flag=RESERVE)], 9, set(), {1}, {1}, {0}, world_size_filter=lambda n: n // 4 * 4
    )
    assert found == [
        "0 1 2 3 4 5 6 7 r",
        "0 - 2 3 4 5 6 7 1",
        "0 - - 2 3 r r r 1",
        "- - - 2 3 r r 0 1",
    ]


@pytest.mark.parametrize("wanted", [9, -1])
def test_filter_must_not_ask_for_more(wanted):
    """A filter that wants more active ranks than there are, or less than none, is an error."""
    with pytest.raises(AssertionError, match=f"0 to 8, not {wanted}"):
        assign([Layer()], 8, set(), world_size_filter=lambda _: wanted)


def test_whole_node_is_replaced_gpu_by_gpu():
    """A spare node takes over a lost one in ascending order; of several the last is first."""
    layers = [Layer(max_ranks=8, flag=RESERVE), Layer(min_ranks=4, key_or_fn=by(4), flag=RESERVE)]
    assert assign(layers, 12, {1}) == ["- - - - 4 5 6 7 0 1 2 3"]
    assert assign(layers, 16, {1, 5}) == ["- - - - - - - - 4 5 6 7 0 1 2 3"]


def test_positions_count_when_the_spare_node_has_lost_ranks():
    """GPU i takes GPU i's number; what the spare node has no GPU for is a loss."""
    layers = [Layer(max_ranks=8, flag=RESERVE), Layer(min_ranks=2, key_or_fn=by(4), flag=RESERVE)]
    assert assign(layers, 12, {9}, {0, 1, 2, 3}, caller=7) == [
        "0 1 2 3 4 5 6 7 r - r r",
        "- - - - 3 4 5 6 0 - 1 2",
    ]


def test_node_that_works_already_gives_single_reserves():
    """Reserves beside active ranks are taken one by one, the last first."""
    layers = [Layer(max_ranks=8, flag=RESERVE), Layer(min_ranks=2, key_or_fn=by(4), flag=RESERVE)]
    assert assign(layers, 12, {1}, {0, 1}, caller=7) == [
        "0 - 2 3 4 5 6 7 r r r 1",
        "- - - - 4 5 6 7 3 2 0 1",
    ]


def test_whole_rack_is_replaced_node_by_node():
    """A spare rack takes over a lost one: nodes and GPUs in ascending order."""
    layers = [
        Layer(max_ranks=8, flag=RESERVE),
        Layer(min_ranks=4, key_or_fn=by(4), flag=RESERVE),
        Layer(min_ranks=2, key_or_fn=by(2), flag=RESERVE),
    ]
    assert assign(layers, 12, {0, 2}) == ["- - - - 4 5 6 7 0 1 2 3"]


def random_case(rng):
    """Return layers, the same for the slow model, and keys of all ranks; ranks in any order."""
    depth, size = rng.randint(1, 4), rng.randint(1, 28)
    widths = [size, *sorted((rng.randint(1, size) for _ in range(depth - 1)), reverse=True)]
    layers = []
    for width in widths:
        maximum = rng.choice([None, None, rng.randint(1, max(1, width))])
        least = rng.choice([0, 1, 1, rng.randint(1, max(1, width // 2))])
        least = least if maximum is None else min(least, maximum)
        flag = rng.choice([None, RESERVE, BACKFILL, BOTH, BOTH, RESERVE])
        layers.append(Layer(least, maximum, "", flag))
    ranks = list(range(size))
    if rng.random() < 0.4:
        rng.shuffle(ranks)
    keys = [["all", *(str(rank // width) for width in widths[1:])] for rank in ranks]
    return layers, keys


def slow_layers(layers):
    return [(e.min_ranks, e.max_ranks, e.has(RESERVE), e.has(BACKFILL)) for e in layers]


def random_filter(rng):
    divisor, limit = rng.randint(1, 4), rng.randint(0, 20)
    return rng.choice(
        [None, None, lambda n: n // divisor * divisor, lambda n: min(n, max(1, limit))]
    )


def random_losses(rng, plan):
    """Return single ranks, or all of one branch, or both."""
    lost = {rank for rank in range(plan.world_size) if rng.random() < 0.08}
    if rng.random() < 0.5:
        branch = rng.choice(rng.choice(plan.layout.levels))
        lost |= {r for r, p in enumerate(plan.order) if branch.start <= p < branch.stop}
    return lost


def facts(plan):
    """Return rank, active rank and whether it lives, by rank at the call."""
    return {
        rank: (
            plan.rank_of(position),
            plan.numbers[position] if plan.numbers[position] >= 0 else None,
        )
        for position, rank in enumerate(plan.layout.ranks)
    }


@pytest.mark.parametrize("block", range(10))
def test_equals_the_plain_rules(block):
    """Through chains of random losses the result is the plain rules', and its numbers are whole."""
    for seed in range(block * 60, block * 60 + 60):
        rng = random.Random(seed)
        layers, keys = random_case(rng)
        each = ((tuple(k), (rank,)) for rank, k in enumerate(keys))
        plan = TreePlan(layers, Layout(len(layers), each))
        slow = SlowTree(slow_layers(layers), keys)
        check_maxima(plan, layers, f"{seed=}")
        chosen = random_filter(rng)
        for step in range(6):
            lost = random_losses(rng, plan) if step or rng.random() < 0.3 else set()
            before = frozenset(lost)
            plan.lose(lost, chosen)
            slow.lose(lost, chosen)
            where = f"{seed=} {step=} {layers=} {keys=} {lost=}"
            assert lost == before, where
            assert facts(plan) == {e.rank_at_call: (e.rank, e.number) for e in slow.leaves}, where
            ranks = [plan.rank_of(p) for p in range(len(keys)) if plan.alive[p]]
            assert ranks == list(range(plan.world_size)), where
            active = sorted(n for n in plan.numbers if n >= 0)
            assert active == list(range(plan.active_world_size)), where
            assert all(plan.numbers[p] == n for n, p in enumerate(plan.active_positions)), where
            check_limits(plan, layers, where)


def check_limits(plan, layers, where):
    for level, layer in zip(plan.layout.levels, layers, strict=True):
        for branch in level:
            positions = range(branch.start, branch.stop)
            living = sum(plan.alive[position] for position in positions)
            assert branch.living == living, where
            assert branch.active == sum(plan.numbers[position] >= 0 for position in positions), (
                where
            )
            assert living == 0 or living >= layer.min_ranks, where


def check_maxima(plan, layers, where):
    for level, layer in zip(plan.layout.levels, layers, strict=True):
        maximum = len(plan.numbers) if layer.max_ranks is None else layer.max_ranks
        assert all(branch.active <= maximum for branch in level), where


@pytest.mark.parametrize("seed", range(60))
def test_lost_nodes_keep_their_rails(seed):
    """Whatever spare node replaces a lost one, GPU i works on under the number of GPU i."""
    rng = random.Random(seed)
    gpus, used, spare = rng.choice([2, 4, 8]), rng.randint(2, 5), rng.randint(1, 4)
    layers = [
        Layer(max_ranks=gpus * used, flag=RESERVE),
        Layer(min_ranks=gpus, key_or_fn=by(gpus), flag=RESERVE),
    ]
    size = gpus * (used + spare)
    keys = [["", str(rank // gpus)] for rank in range(size)]
    runs = ((tuple(each), (rank,)) for rank, each in enumerate(keys))
    plan = TreePlan(layers, Layout(2, runs))
    plan.lose(set())
    for _ in range(spare):
        plan.lose({rng.randrange(plan.world_size)})
        if plan.active_world_size < gpus * used:
            break
        assert all(
            position % gpus == n % gpus for n, position in enumerate(plan.active_positions)
        ), seed
        nodes = {position // gpus for position in plan.active_positions}
        assert len(nodes) == used, seed


@pytest.mark.parametrize("seed", range(25))
def test_all_ranks_compute_the_same(seed):
    """Each survivor's own tree gives the same map, and each rank its own entry of it."""
    rng = random.Random(seed)
    layers, keys = random_case(rng)
    size = len(keys)
    trees, states = [Tree(layers) for _ in range(size)], {}
    for rank in range(size):
        states[rank] = State(rank=rank, world_size=size)
    lost: set[int] = set()
    for _ in range(4):
        maps = set()
        for rank, state in list(states.items()):
            store = StubStore(size, layers)
            store.keys = dict(enumerate(keys))
            store.send_key = lambda *_: None
            given = set(lost)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)
                try:
                    ctx = trees[rank](RankAssignmentCtx(state, store, given))
                except RankDiscarded:
                    ctx = None
            assert given == lost
            maps.add(shown(trees[rank]))
            if ctx is None:
                del states[rank]
                continue
            assert ctx.terminated_ranks == set()
            mine = trees[rank].init_rank_map[rank].state
            assert mine == ctx.state
            assert trees[rank].rank_map[mine.rank].state == mine
            states[rank] = ctx.state
        assert len(maps) == 1
        if not states:
            break
        assert sorted(state.rank for state in states.values()) == list(range(len(states)))
        lost = {rank for rank in range(len(states)) if rng.random() < 0.15}


def test_lost_rank_is_discarded():
    """A terminated rank, and every rank of a branch that is given up, raises RankDiscarded."""
    layers = [Layer(), Layer(min_ranks=2, key_or_fn=by(2))]
    for caller in (0, 1):
        with pytest.raises(RankDiscarded, match=f"initial rank {caller}"):
            assign(layers, 4, set(), {1}, caller=caller)
    with pytest.raises(RankDiscarded):
        assign([Layer(min_ranks=9)], 8, set())


def test_state_follows_the_caller():
    """Iteration and exception stay the caller's own, and the result is a new state."""
    layers = [Layer(flag=BACKFILL)]
    tree, store = Tree(layers), StubStore(4, layers)
    state = tree(RankAssignmentCtx(State(rank=2, world_size=4), store, set())).state
    state.iteration, state.fn_exception = 3, ValueError("mine")
    after = tree(RankAssignmentCtx(state, store, {0})).state
    assert (after.iteration, after.fn_exception) == (3, state.fn_exception)
    assert (after.rank, after.world_size, after.active_rank, after.active_world_size) == (
        1,
        3,
        2,
        3,
    )
    assert (after.initial_rank, after.initial_world_size) == (2, 4)
    assert (state.rank, state.world_size) == (2, 4)


def test_order_of_ranks_that_differs_from_the_tree_is_warned_about():
    """Ranks dealt out round robin get active ranks in depth-first order, with one warning."""
    layers = [Layer(), Layer(key_or_fn=lambda state: str(state.rank % 2))]
    with pytest.warns(UserWarning, match="depth-first order") as seen:
        found = assign(layers, 8, set(), {1})
    assert found == ["0 4 1 5 2 6 3 7", "0 3 - 4 1 5 2 6"]
    assert len(seen) == 1


def test_root_key_must_be_common():
    """Different keys on layer 0 are an error that names them."""
    with pytest.raises(RuntimeError, match="'0', '1'"):
        assign([Layer(key_or_fn=by(4))], 8, set())


def test_new_call_of_the_function_builds_a_new_tree():
    """A state that no assignment has touched begins anew, with the same store or another one."""
    layers = [Layer(flag=BACKFILL)]
    tree, store = Tree(layers), StubStore(4, layers)
    for used in (store, store, StubStore(4, layers)):
        state = tree(RankAssignmentCtx(State(rank=3, world_size=4), used, set())).state
        assert shown(tree) == "0 1 2 3"
        tree(RankAssignmentCtx(state, used, {1}))
        assert shown(tree) == "0 - 2 1"
    tree(RankAssignmentCtx(State(rank=3, world_size=4), StubStore(4, layers), {0}))
    assert shown(tree) == "- 1 2 0"


def test_tree_is_public_to_look_at():
    """The nodes tell keys, layers, parents and counts; before the first call there is no tree."""
    layers = [Layer(), Layer(max_ranks=1, key_or_fn=by(2))]
    tree = Tree(layers)
    with pytest.raises(InternalError, match="first call"):
        _ = tree.tree
    tree(RankAssignmentCtx(State(rank=0, world_size=4), StubStore(4, layers), {3}))
    root = tree.tree
    first, second = root.children
    assert (first.name, second.name, root.parent, first.parent) == ("0", "1", None, root)
    assert (root.layer, first.layer) == tuple(layers)
    assert (first.living_count, first.active_count, second.living_count) == (2, 1, 1)
    assert [leaf.state.initial_rank for leaf in root.iter_leaves()] == [0, 1, 2, 3]
    assert first.children[1] == tree.rank_map[1] == tree.init_rank_map[1]
    assert first.children[1].parent == first
    assert (len(tree.rank_map), list(tree.rank_map), 3 in tree.rank_map) == (3, [0, 1, 2], False)
    assert tree.init_rank_map[3].state.rank is None


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: Tree([]), ValueError, "at least one layer"),
        (lambda: Tree([changed(max_ranks=0)]), ValueError, "min_ranks must be at most"),
        (lambda: Tree([changed(flag="reserve")]), TypeError, "flag must be a LayerFlag"),
        (lambda: Tree([Layer(), "x"]), TypeError, "'x'"),
        (lambda: Tree([Layer()], 3), TypeError, "world_size_filter"),
        (lambda: Layer(min_ranks=3, max_ranks=2), ValueError, "3 > 2"),
        (lambda: Layer(min_ranks=-1), ValueError, "min_ranks"),
        (lambda: Layer(max_ranks="8"), TypeError, "max_ranks"),
        (lambda: Layer(flag=1), TypeError, "LayerFlag"),
        (lambda: Layer(key_or_fn=7), TypeError, "key_or_fn"),
    ],
)
def test_layers_are_checked_at_construction(make, error, match):
    """A tree that cannot work is refused where it is written down."""
    with pytest.raises(error, match=match):
        make()


def test_number_of_keys_must_fit():
    """A rank that tells another number of keys than there are layers is an error."""
    layers = [Layer(), Layer()]
    store = StubStore(2, layers)
    store.keys[1] = ["", "", ""]
    with pytest.raises(ValueError, match="2 layers need 2 keys, not 3"):
        Tree(layers)(RankAssignmentCtx(State(rank=0, world_size=2), store, set()))


def test_a_layer_may_be_changed_before_a_tree_is_made_of_it():
    """What was set counts as if it had been given."""
    given = Layer(max_ranks=3, flag=LayerFlag.RESERVE)
    assert changed(max_ranks=3, flag=LayerFlag.RESERVE) == given
    assert assign([changed(max_ranks=3, flag=LayerFlag.RESERVE)], 4, {1}) == assign([given], 4, {1})
