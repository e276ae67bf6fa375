# SPDX-License-Identifier: Apache-2.0
"""Renumbering and activation, and the checks of arguments."""

import logging
import random

import pytest

from nvidia_resiliency_ext.inprocess._ranks.layout import failing, fill, shift
from nvidia_resiliency_ext.inprocess.compose import Compose
from nvidia_resiliency_ext.inprocess.exception import InternalError, RestartError
from nvidia_resiliency_ext.inprocess.rank_assignment import (
    ActivateAllRanks,
    ActiveWorldSizeDivisibleBy,
    FillGaps,
    FilterCountGroupedByKey,
    FilterGroupedByKey,
    MaxActiveWorldSize,
    RankAssignment,
    RankAssignmentCtx,
    RankDiscarded,
    RankFilter,
    ShiftRanks,
)
from nvidia_resiliency_ext.inprocess.state import Mode, State


def context(rank, world_size, terminated=(), **fields):
    return RankAssignmentCtx(State(rank, world_size, **fields), None, set(terminated))


def mapping(assignment, world_size, terminated):
    """Return new ranks by old ones, from the survivors' own calls."""
    found = {}
    for rank in range(world_size):
        try:
            found[rank] = assignment(context(rank, world_size, terminated)).state.rank
        except RankDiscarded:
            assert rank in terminated
    return found


@pytest.mark.parametrize(
    ("assignment", "terminated", "expected"),
    [
        (ShiftRanks(), {1, 4, 5}, {0: 0, 2: 1, 3: 2, 6: 3, 7: 4}),
        (FillGaps(), {1, 4, 5}, {0: 0, 2: 2, 3: 3, 6: 1, 7: 4}),
        (FillGaps(), {1, 2, 7}, {0: 0, 3: 3, 4: 4, 5: 1, 6: 2}),
        (FillGaps(), {5, 6, 7}, {0: 0, 1: 1, 2: 2, 3: 3, 4: 4}),
        (ShiftRanks(), set(range(8)), {}),
    ],
)
def test_documented_examples(assignment, terminated, expected):
    """Of 8 ranks the survivors get the documented numbers."""
    assert mapping(assignment, 8, terminated) == expected


@pytest.mark.parametrize("seed", range(300))
def test_numbers_are_whole(seed):
    """Whatever is lost, the result is exactly 0..n-1; shift keeps order, fill who can stay."""
    rng = random.Random(seed)
    world_size = rng.randint(1, 60)
    terminated = {rank for rank in range(world_size) if rng.random() < rng.choice([0.05, 0.3, 0.9])}
    alive = [rank for rank in range(world_size) if rank not in terminated]
    # Ranks that do not exist change nothing.
    named = terminated | {world_size + 3, -1}
    for function in (shift, fill):
        results = {rank: function(rank, world_size, named) for rank in range(world_size)}
        assert {rank for rank, (new, _) in results.items() if new is None} == terminated
        assert {size for _, size in results.values()} == {len(alive)}
        new = [results[rank][0] for rank in alive]
        assert sorted(new) == list(range(len(alive)))
        if function is shift:
            assert new == sorted(new)
        else:
            stay = [rank for rank in alive if rank < len(alive)]
            assert [results[rank][0] for rank in stay] == stay
            moved = [results[rank][0] for rank in alive if rank >= len(alive)]
            assert moved == sorted(moved)


@pytest.mark.parametrize("assignment", [ShiftRanks(), FillGaps()])
def test_renumbering_leaves_the_given_alone(assignment):
    """State and set that were given stay as they are; in the context they are new."""
    state, terminated = State(6, 8, iteration=4, fn_exception=ValueError()), {1, 4, 5}
    ctx = assignment(RankAssignmentCtx(state, None, terminated))
    assert (state.rank, state.world_size, terminated) == (6, 8, {1, 4, 5})
    assert (ctx.state.world_size, ctx.terminated_ranks) == (5, set())
    assert (ctx.state.initial_rank, ctx.state.initial_world_size) == (6, 8)
    assert (ctx.state.iteration, ctx.state.fn_exception) == (4, state.fn_exception)


@pytest.mark.parametrize("assignment", [ShiftRanks(), FillGaps()])
def test_terminated_rank_is_discarded(assignment):
    """A terminated rank raises, with its number, what a user catches as an error of a restart."""
    with pytest.raises(RankDiscarded, match="rank 4"):
        assignment(context(4, 8, {4}))
    assert issubclass(RankDiscarded, RestartError)


def test_renumbering_opens_who_is_active():
    """After a renumbering nobody is active or reserve, so an activation of before cannot linger."""
    state = State(6, 8, active_rank=6, active_world_size=8, mode=Mode.ACTIVE)
    after = ShiftRanks()(RankAssignmentCtx(state, None, {1})).state
    assert (after.mode, after.active_rank, after.active_world_size) == (
        Mode.INITIALIZED,
        None,
        None,
    )


def test_moved_rank_is_logged(caplog):
    """A rank that got another number says so once; one that kept it says nothing."""
    with caplog.at_level(logging.INFO, logger="nvrx"):
        ShiftRanks()(context(0, 8, {1}))
        ShiftRanks()(context(6, 8, {1}))
    assert [record.getMessage() for record in caplog.records] == ["rank 6 of 8 is now 5 of 7"]


@pytest.mark.parametrize(
    ("assignment", "rank", "before", "expected"),
    [
        (ActivateAllRanks(), 7, None, (Mode.ACTIVE, 7, 8)),
        (ActivateAllRanks(), 7, 4, (Mode.ACTIVE, 7, 8)),
        (MaxActiveWorldSize(), 7, None, (Mode.ACTIVE, 7, 8)),
        (MaxActiveWorldSize(5), 4, None, (Mode.ACTIVE, 4, 5)),
        (MaxActiveWorldSize(5), 5, None, (Mode.INACTIVE, None, 5)),
        (MaxActiveWorldSize(5), 3, 3, (Mode.INACTIVE, None, 3)),
        (MaxActiveWorldSize(50), 7, 64, (Mode.ACTIVE, 7, 8)),
        (ActiveWorldSizeDivisibleBy(), 7, None, (Mode.ACTIVE, 7, 8)),
        (ActiveWorldSizeDivisibleBy(3), 5, None, (Mode.ACTIVE, 5, 6)),
        (ActiveWorldSizeDivisibleBy(3), 6, None, (Mode.INACTIVE, None, 6)),
        (ActiveWorldSizeDivisibleBy(3), 3, 5, (Mode.INACTIVE, None, 3)),
        (ActiveWorldSizeDivisibleBy(9), 0, None, (Mode.INACTIVE, None, 0)),
    ],
)
def test_activation(assignment, rank, before, expected):
    """The first ranks are active under their own number, the others are reserves."""
    ctx = context(rank, 8, active_world_size=before)
    given = ctx.state
    after = assignment(ctx).state
    assert (after.mode, after.active_rank, after.active_world_size) == expected
    assert given.mode is Mode.INITIALIZED


def test_composed():
    """Renumber, cap and round: of 12 without {0, 5}, at most 9, a multiple of 4: 8 are active."""
    chain = Compose(ActiveWorldSizeDivisibleBy(4), MaxActiveWorldSize(9), ShiftRanks())
    assert isinstance(chain, RankAssignment)
    after = {rank: chain(context(rank, 12, {0, 5})).state for rank in (1, 6, 9, 10, 11)}
    assert {rank: state.rank for rank, state in after.items()} == {1: 0, 6: 4, 9: 7, 10: 8, 11: 9}
    assert [state.active_rank for state in after.values()] == [0, 4, 7, None, None]
    assert {state.active_world_size for state in after.values()} == {8}


def test_restart_without_loss_keeps_the_active_world_size():
    """The same chain called again on its own result gives the same: limits do not add up."""
    chain = Compose(MaxActiveWorldSize(6), ActiveWorldSizeDivisibleBy(4), ShiftRanks())
    state = State(0, 8)
    for _ in range(3):
        state = chain(RankAssignmentCtx(state, None, set())).state
        assert state.active_world_size == 6


@pytest.mark.parametrize("seed", range(100))
def test_groups_that_fail(seed):
    """Exactly the ranks are named whose group, counted one by one, has a size that fails."""
    rng = random.Random(seed)
    keys = [rng.choice("abcdef") for _ in range(rng.randint(1, 30))]
    wanted = rng.randint(1, 6)
    runs = (((key,), range(rank, rank + 1)) for rank, key in enumerate(keys))
    expected = {rank for rank, key in enumerate(keys) if keys.count(key) % wanted}
    assert failing(runs, lambda count: count % wanted == 0) == expected


def test_condition_is_asked_once_per_size():
    """A condition, which may log, is not called for each group of a large job."""
    asked = []
    runs = [(("a",), range(4)), (("b",), range(4, 8)), (("c",), range(8, 9))]
    assert failing(runs, lambda count: asked.append(count) or count == 4) == {8}
    assert asked == [1, 4]


def test_filter_of_one_rank_needs_no_store():
    """A rank that is alone counts itself; a rank that is terminated takes no part."""
    alone = FilterCountGroupedByKey("all", lambda count: count == 1)
    assert alone(context(0, 1)).terminated_ranks == set()
    assert FilterCountGroupedByKey("all", lambda count: count > 1)(
        context(0, 1)
    ).terminated_ranks == {0}
    assert alone(context(1, 3, {1})).terminated_ranks == {1}


def test_older_name():
    """`FilterGroupedByKey` is the same class."""
    assert FilterGroupedByKey is FilterCountGroupedByKey
    assert issubclass(FilterCountGroupedByKey, RankFilter)


def test_state_without_rank_is_an_error():
    """A state that names no rank is refused with a clear error."""
    with pytest.raises(InternalError, match="has no rank"):
        ShiftRanks()(context(None, 8))


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: MaxActiveWorldSize(0), "max_active_world_size must be at least 1"),
        (lambda: MaxActiveWorldSize("4"), "max_active_world_size must be an integer"),
        (lambda: ActiveWorldSizeDivisibleBy(0), "divisor must be at least 1"),
        (lambda: FilterCountGroupedByKey(3, bool), "key_or_fn must be"),
        (lambda: FilterCountGroupedByKey("x", 2), "condition must be callable"),
        (lambda: FilterCountGroupedByKey("x", bool, 60), "timeout must be a timedelta"),
        (RankAssignment, "abstract"),
    ],
)
def test_arguments_are_checked(make, match):
    """What cannot work is refused at construction, with the argument's name."""
    with pytest.raises((TypeError, ValueError), match=match):
        make()
