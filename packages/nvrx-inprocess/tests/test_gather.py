# SPDX-License-Identifier: Apache-2.0
"""Keys shared through real stores: complete, the same for all, in few operations, bounded."""

import gc
import json
import random
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from nvidia_resiliency_ext.inprocess._ranks import gather
from nvidia_resiliency_ext.inprocess._store.endpoint import ForeignValueError
from nvidia_resiliency_ext.inprocess.compose import Compose
from nvidia_resiliency_ext.inprocess.exception import InternalError, RestartError
from nvidia_resiliency_ext.inprocess.exception import TimeoutError as RestartTimeoutError
from nvidia_resiliency_ext.inprocess.rank_assignment import (
    FilterCountGroupedByKey,
    Layer,
    LayerFlag,
    RankAssignmentCtx,
    RankDiscarded,
    ShiftRanks,
    Tree,
)
from nvidia_resiliency_ext.inprocess.state import State

_WAIT = timedelta(seconds=20)


class CountingStore:
    """A store with torch's operations, which counts them and the bytes in both directions."""

    def __init__(self, store):
        self.store = store
        self.operations = self.size = 0

    def _count(self, *texts):
        self.operations += 1
        self.size += sum(map(len, texts))

    def append(self, key, value):
        self._count(key, value)
        self.store.append(key, value)

    def add(self, key, amount):
        self._count(key)
        return self.store.add(key, amount)

    def set(self, key, value):
        self._count(key, value)
        self.store.set(key, value)

    def get(self, key):
        value = self.store.get(key)
        self._count(key, value)
        return value

    def wait(self, keys, timeout):
        self._count(*keys)
        self.store.wait(keys, timeout)

    def delete_key(self, key):
        self._count(key)
        return self.store.delete_key(key)


def on_ranks(function, ranks):
    """Return what the function returns on each rank; all run at once."""
    ranks = list(ranks)
    with ThreadPoolExecutor(len(ranks)) as pool:
        futures = {rank: pool.submit(function, rank) for rank in ranks}
        return {rank: future.result(timeout=90) for rank, future in futures.items()}


@pytest.fixture(params=["hash", "file", "tcp"])
def stores(request, tmp_path):
    """A function that opens one rank's store, of each kind."""
    if request.param == "file":
        yield lambda: dist.FileStore(str(tmp_path / "store"), -1)
        return
    if request.param == "hash":
        common = dist.HashStore()
        yield lambda: dist.PrefixStore("", common)
        return
    host = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    yield lambda: dist.TCPStore("127.0.0.1", host.port, None, wait_for_workers=False)


def test_filter_removes_incomplete_groups(stores):
    """The documented example: groups of 2, of 8 without {1, 4, 5, 6} only 2 and 3 remain."""
    pairs = FilterCountGroupedByKey(lambda state: state.rank // 2, lambda count: count == 2, _WAIT)
    terminated = {1, 4, 5, 6}

    def one(rank):
        ctx = RankAssignmentCtx(State(rank, 8), stores(), terminated)
        return pairs(ctx).terminated_ranks

    found = on_ranks(one, [0, 2, 3, 7])
    assert all(each == {0, 1, 4, 5, 6, 7} for each in found.values())
    assert terminated == {1, 4, 5, 6}


def test_two_filters_over_several_iterations():
    """Two instances in one chain count apart, each iteration anew, on all ranks alike."""
    common = dist.HashStore()
    losses = [set(), {3}, set(), {0}, set()]
    # A restart begins when all have come through the last one's assignment, as in a call.
    through = [threading.Barrier(entering) for entering in (12, 12, 10, 8, 6)]

    def one(rank):
        by_four = FilterCountGroupedByKey(lambda s: s.initial_rank // 4, lambda n: n >= 3, _WAIT)
        by_two = FilterCountGroupedByKey(lambda s: s.initial_rank // 2, lambda n: n == 2, _WAIT)
        chain = Compose(ShiftRanks(), by_two, by_four)
        state, store, seen, keys = State(rank, 12), dist.PrefixStore("", common), [], []
        for iteration, lost in enumerate(losses):
            try:
                state = chain(RankAssignmentCtx(state, store, set(lost))).state
            except RankDiscarded:
                break
            finally:
                through[iteration].wait(30)
            seen.append((state.rank, state.world_size))
            keys.append(common.num_keys())
            if iteration:
                state.advance()
        return seen, keys

    found = on_ranks(one, range(12))
    steps = [list(range(12))]
    for lost in losses[1:]:
        left = [rank for index, rank in enumerate(steps[-1]) if index not in lost]
        fours = [rank for rank in left if sum(other // 4 == rank // 4 for other in left) >= 3]
        # The second filter does not count whom the first one has taken out.
        twos = [rank for rank in fours if sum(other // 2 == rank // 2 for other in fours) == 2]
        steps.append(twos)
    assert [len(step) for step in steps] == [12, 10, 8, 6, 4]
    for rank, (seen, keys) in found.items():
        expected = [(step.index(rank), len(step)) for step in steps if rank in step]
        assert seen == expected, rank
        assert max(keys) <= 20


def test_many_iterations_leave_a_bounded_store():
    """What former restarts have written is deleted, so the store does not grow with them."""
    common = dist.HashStore()

    def one(rank):
        groups = FilterCountGroupedByKey("all", lambda count: count == 3, _WAIT)
        state, store = State(rank, 3), dist.PrefixStore("", common)
        for _ in range(300):
            state = Compose(ShiftRanks(), groups, groups)(
                RankAssignmentCtx(state, store, set())
            ).state
            state.advance()
        return common.num_keys()

    assert max(on_ranks(one, range(3)).values()) <= 4 * 3 + 1


def test_names_of_the_same_iteration_stay():
    """Only a later iteration deletes, for a rank that was filtered out may still be reading."""
    common = dist.HashStore()

    def one(rank):
        store = dist.PrefixStore("", common)
        for _ in range(3):
            gather.gather(store, State(rank, 3, iteration=7), ["k"], range(2), _WAIT)

    on_ranks(one, range(2))
    store = dist.PrefixStore("", common)
    assert all(store.check([f"rank_assignment/7/{n}/record"]) for n in range(3))


def test_few_operations_and_bytes():
    """A rank needs 4 operations, the last one 6, and reads each key list once for many ranks."""
    common, size = dist.HashStore(), 64

    def one(rank):
        store = CountingStore(dist.PrefixStore("", common))
        layers = [Layer(), Layer(key_or_fn=lambda s: f"node-{s.rank // 8:05}.cluster.example")]
        tree = Tree(layers)
        state = tree(RankAssignmentCtx(State(rank, size), store, set())).state
        first = store.operations
        tree(
            RankAssignmentCtx(state, store, {7})
            if rank != 7
            else RankAssignmentCtx(state, store, set())
        )
        return first, store.operations - first, store.size

    found = on_ranks(one, range(size))
    assert sorted(operations for operations, _, _ in found.values())[:-1] == [4] * (size - 1)
    assert max(operations for operations, _, _ in found.values()) == 6
    assert {again for _, again, _ in found.values()} == {0}
    assert sorted(each for _, _, each in found.values())[-2] < 1500


def test_tree_over_stores(stores):
    """A tree built through a real store is the same on all ranks, and restarts need no store."""
    layers = [
        Layer(max_ranks=4, flag=LayerFlag.RESERVE),
        Layer(min_ranks=2, key_or_fn=lambda s: s.rank // 2, flag=LayerFlag.RESERVE),
    ]

    def one(rank):
        tree, store = Tree(layers), stores()
        state = tree(RankAssignmentCtx(State(rank, 6), store, set())).state
        ctx = RankAssignmentCtx(state, None, {1})
        try:
            tree(ctx)
        except RankDiscarded:
            return None
        return [leaf.state.active_rank for leaf in tree.tree.iter_leaves()]

    found = on_ranks(one, range(6))
    assert (found.pop(0), found.pop(1)) == (None, None)
    assert all(each == [None, None, 2, 3, 0, 1] for each in found.values())


def test_missing_ranks_are_named():
    """Ranks that do not call in time are named, and the wait ends at the timeout."""
    groups = FilterCountGroupedByKey("x", bool, timedelta(milliseconds=50))
    store = dist.HashStore()
    with pytest.raises(RestartTimeoutError, match=r"ranks \{1, 3\} .* within 0.05 s"):
        groups(RankAssignmentCtx(State(0, 4), store, {2}))


def test_record_is_written_by_those_who_wait_if_the_last_rank_dies(monkeypatch):
    """If the rank that should have written the record is gone, another one writes it."""
    monkeypatch.setattr(gather, "_LOOK_EVERY_S", 0.02)
    store = dist.HashStore()
    store.append("rank_assignment/0/0/entries", gather.entry(1, ["b"]))
    runs = gather.gather(store, State(0, 3, iteration=0), ["a"], [0, 1], _WAIT)
    assert runs == [(("a",), [0]), (("b",), [1])]


def test_long_record_is_left_to_the_list(monkeypatch):
    """A record that a torch store would refuse is not written; the ranks read the list."""
    monkeypatch.setattr(gather, "_MAX_RECORD_BYTES", 10)
    common = dist.HashStore()

    def one(rank):
        caller, store = State(rank, 3, iteration=0), dist.PrefixStore("", common)
        return gather.gather(store, caller, ["k"], range(3), _WAIT)

    assert set(map(str, on_ranks(one, range(3)).values())) == {"[(('k',), [0, 1, 2])]"}


def test_one_store_object_may_serve_several_ranks():
    """Ranks that share a store object in one process keep their places."""
    store = dist.HashStore()
    groups = FilterCountGroupedByKey(lambda s: s.rank % 2, lambda n: n == 2, _WAIT)

    def one(rank):
        chain = Compose(groups, ShiftRanks(), groups)
        try:
            ctx = chain(RankAssignmentCtx(State(rank, 3), store, set()))
        except RankDiscarded:
            return None
        return ctx.state.world_size, ctx.terminated_ranks

    # First the group of 1 alone; then, renumbered, the two others, which are groups of one each.
    assert on_ranks(one, range(3)) == {0: (2, {0, 1}), 1: None, 2: (2, {0, 1})}


def test_nothing_keeps_the_store_alive():
    """After a call neither the tree nor the module holds the store."""
    store, tree = dist.HashStore(), Tree([Layer()])
    state = tree(RankAssignmentCtx(State(0, 1), store, set())).state
    gather._passes[store] = {}
    seen = weakref.ref(store)
    del store
    gc.collect()
    assert seen() is None
    assert tree(RankAssignmentCtx(state, None, set())).state.active_rank == 0


def test_tree_in_a_chain_is_refused():
    """A tree that is called after a renumbering cannot know its ranks, and says so."""
    state = State(1, 3, initial_rank=2, initial_world_size=4)
    with pytest.raises(InternalError, match="stands in no Compose"):
        Tree([Layer()])(RankAssignmentCtx(state, dist.HashStore(), set()))


def test_stand_in_is_no_store():
    """Only what has torch's operations is used as a store."""
    assert gather.can_gather(dist.HashStore())
    assert not gather.can_gather(object())
    assert not gather.can_gather(None)


@pytest.mark.parametrize("seed", range(50))
def test_record_says_what_the_list_says(seed):
    """Any keys, any ranks: what is read equals what was entered, entries twice or late included."""
    rng = random.Random(seed)
    ranks = sorted(rng.sample(range(200), rng.randint(1, 60)))
    told = {rank: [rng.choice(["a", 'q"\n', "é☃", "\\"]) for _ in range(2)] for rank in ranks}
    entries = [gather.entry(rank, keys) for rank, keys in told.items()]
    rng.shuffle(entries)
    text = "".join(entries + rng.choices(entries, k=3) + [gather.entry(500, ["late"])])
    record = gather.compose("k", gather.parse("k", text), ranks)
    found = {rank: list(keys) for keys, run in gather.read("k", record, ranks) for rank in run}
    assert found == told


@pytest.mark.parametrize(
    "text",
    [
        "", "x", "null", "[]", "{}", "7", '"ab"', '[[["a"],"0"]]', "[" * 100_000,
        '[[["a"],"0-2999999999"]]', '[[["a"],"0-2"]]', '[[["a"],"0-1"],[["b"],"0-1"]]',
        '[[["a"],"-1"]]', '[[[1],"0-1"]]', '[["a","0-1"]]', '[[["a"],"1-0"]]',
        '[[["a"],[0,1]]]', '[[["a"],"0.0,1"]]', '[["0-1"]]', '[[["a"],"0-1",0]]', '[{"a":"0-1"}]',
    ],
)  # fmt: skip
def test_foreign_record_is_reported(text):
    """A record that no rank wrote is an error that names key and value."""
    with pytest.raises(ForeignValueError, match="the store holds at 'where'") as caught:
        gather.read("where", text, [0, 1])
    assert isinstance(caught.value, RestartError), "what is caught around a call"


@pytest.mark.parametrize(
    "line", ["", "x", "0", "0 {}", "٣ []", "-1 []", "0 [] ", "0 [" + "9" * 5000 + "]", "0  []"]
)
def test_foreign_line_is_reported(line):
    """A line that no rank wrote is an error, not an entry."""
    with pytest.raises(ForeignValueError):
        gather.parse("where", f"{line}\n")


@pytest.mark.parametrize("seed", range(200))
def test_damaged_texts_give_an_error_or_a_result(seed):
    """Whatever bytes stand in the store, nothing but the one error comes out."""
    rng = random.Random(seed)
    text = list("".join(gather.entry(rank, ["ab", str(rank // 3)]) for rank in range(6)))
    for _ in range(rng.randint(1, 4)):
        text[rng.randrange(len(text))] = rng.choice('0129 []{}",\n\\x:-.')
    record = list(json.dumps([[["a"], "0-2"], [["b"], "3-5"]], separators=(",", ":")))
    for _ in range(rng.randint(1, 3)):
        record[rng.randrange(len(record))] = rng.choice('0129 []{}",\n\\x:-.e')
    try:
        found = gather.parse("k", "".join(text))
        if found.keys() >= set(range(6)):
            gather.read("k", gather.compose("k", found, range(6)), range(6))
    except ForeignValueError:
        pass
    try:
        runs = gather.read("k", "".join(record), range(6))
    except ForeignValueError:
        return
    assert sorted(rank for _, run in runs for rank in run) == list(range(6))


def test_foreign_bytes_are_reported():
    """Bytes that are no text are an error that names the key."""
    store = dist.HashStore()
    store.set("rank_assignment/0/0/entries", "\xff\xfe\n")
    with pytest.raises(ForeignValueError, match="rank_assignment/0/0/entries"):
        gather.gather(store, State(0, 3, iteration=0), ["a"], [0, 1], timedelta(seconds=0.05))


def test_keys_have_a_limit():
    """Keys beyond the limit are refused on the rank that has them, before anything is written."""
    store = dist.HashStore()
    with pytest.raises(ValueError, match="at most 4096"):
        gather.gather(store, State(0, 3, iteration=0), ["a" * 5000], [0, 1], _WAIT)
    assert store.num_keys() == 0
