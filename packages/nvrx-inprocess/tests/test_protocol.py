# SPDX-License-Identifier: Apache-2.0
"""The protocol of an iteration: lists, decisions, and whole jobs under faults."""

import contextlib
import os
import random
from collections.abc import Callable
from typing import Any

import pytest
from protocol_schedules import Schedule

from nvidia_resiliency_ext.inprocess._protocol import decision as decision_module
from nvidia_resiliency_ext.inprocess._protocol import iteration_store as iteration_store_module
from nvidia_resiliency_ext.inprocess._protocol.decision import (
    Arrival,
    Decision,
    NodeEntry,
    decide,
    decode_decision,
    encode_decision,
    format_arrival,
    format_node,
    format_records,
    have_all_reported,
    is_complete,
    is_whole,
    parse_arrivals,
    parse_nodes,
    parse_records,
)
from nvidia_resiliency_ext.inprocess._protocol.iteration_store import IterationStore
from nvidia_resiliency_ext.inprocess._store.endpoint import ForeignValueError
from nvidia_resiliency_ext.inprocess.attribution import Interruption, InterruptionRecord

pytestmark = pytest.mark.slow

# NVRX_TEST_SCHEDULES=10000 takes some minutes.
SCHEDULES = int(os.environ.get("NVRX_TEST_SCHEDULES", "400"))
PER_TEST = 200


def going(initial: int, rank: int, world_size: int) -> Arrival:
    return Arrival(initial, rank, world_size, is_out=False)


def left(initial: int) -> Arrival:
    return Arrival(initial, None, None, is_out=True)


def ended(initial: int) -> Arrival:
    return Arrival(initial, None, None, is_out=False)


def record(rank: int, kind: Interruption = Interruption.EXCEPTION) -> InterruptionRecord:
    return InterruptionRecord(rank, kind)


def test_lists_say_what_was_written() -> None:
    """What is written into a list is read from it again, in order, repetitions included."""
    arrivals = [going(3, 0, 2), left(4), ended(5), going(6, 1, 2), going(3, 0, 2)]
    assert parse_arrivals("".join(map(format_arrival, arrivals))) == arrivals
    records = [record(2), record(7, Interruption.TERMINATED), record(2)]
    text = format_records(records) + format_records(records[:1])
    assert text == "EXCEPTION:2;TERMINATED:7;EXCEPTION:2;"
    assert parse_records(text) == records
    assert parse_arrivals("") == []
    assert parse_records("") == []


def test_the_last_entry_of_a_node_counts() -> None:
    """A node that was announced again is known as it was announced last."""
    entries = [
        NodeEntry(4, {4: (40, 1), 5: (50, 1)}),
        NodeEntry(0, {0: (10, 1), 1: (20, 2)}),
        NodeEntry(4, {4: (41, 3), 5: (51, 0)}),
    ]
    assert parse_nodes("".join(map(format_node, entries))) == [entries[1], entries[2]]


@pytest.mark.parametrize(
    "text",
    [
        *("3", "3:1:2", "x:1:2;", "3:2:2;", "3:1;", "3:!;", "-1:0:2;", "3:1:2;;", "\u0663:1:2;"),
        *("3:1:2:4;", "9999999999:?;", "1.5:-;", ";", " 3:?;", "3:1:+2;"),
    ],
)
def test_foreign_arrivals_are_named(text: str) -> None:
    """Anything else in the list of arrivals is an error that names the key and the value."""
    with pytest.raises(ForeignValueError, match="the_key") as caught:
        parse_arrivals(text, "the_key")
    assert caught.value.key == "the_key"
    assert caught.value.value in text


@pytest.mark.parametrize(
    "text",
    [
        *("3", "EXCEPTION:3", "NO:3;", "EXCEPTION:x;", "EXCEPTION:;", ";", "__doc__:3;"),
        *("EXCEPTION:0-9999999;", "EXCEPTION:5-3;", "EXCEPTION:-1;", "EXCEPTION;"),
    ],
)
def test_foreign_records_are_named(text: str) -> None:
    """Anything else in the list of records is an error that names the key."""
    with pytest.raises(ForeignValueError, match="the_key"):
        parse_records(text, "the_key")


def test_the_records_of_all_kinds_together_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kinds that name as many ranks as are allowed each are refused, not kept."""
    monkeypatch.setattr(decision_module, "_MOST_RANKS", 1000)
    text = "EXCEPTION:0-900;"
    assert len(parse_records(text)) == 901
    with pytest.raises(ForeignValueError, match="the_key"):
        parse_records(f"{text}TERMINATED:0-900;", "the_key")


@pytest.mark.parametrize(
    "text",
    [
        *("x", "{}", "[1]", "[1,[[1,2]]]", "[1,[[-1,1,1]]]", "[true,[[1,1,1]]]", "[1,[1,2,3]]"),
        *("[" * 5000, '[1,[["1",1,1]]]', "[1,[[1,1,1]],2]", "null"),
    ],
)
def test_foreign_nodes_are_named(text: str) -> None:
    """Anything else in the list of nodes is an error that names the key."""
    with pytest.raises(ForeignValueError, match="nodes"):
        parse_nodes(text + "\n")


def test_a_list_is_whole_when_every_participant_stands_in_it() -> None:
    """Forms and repetitions do not matter, and those who do not take part do not help."""
    participants = frozenset({0, 2, 5})
    assert not is_whole([going(0, 0, 3), going(0, 0, 3), going(2, 1, 3)], participants)
    assert not is_whole([going(0, 0, 3), left(2), ended(7)], participants)
    assert is_whole([left(2), going(0, 0, 3), ended(5), ended(5)], participants)


def test_completion_needs_every_number() -> None:
    """The same rank twice, or ranks of another numbering, complete nothing."""
    assert not is_complete([going(0, 0, 2), going(0, 0, 2)])
    assert not is_complete([going(0, 0, 2), going(1, 1, 3)])
    assert not is_complete([left(0)])
    assert is_complete([going(7, 1, 2), going(3, 0, 2), going(3, 0, 2)])


def test_who_can_report_no_more_is_not_waited_for() -> None:
    """All have reported when each has a record or has arrived."""
    participants = frozenset({0, 1, 2})
    assert have_all_reported([record(0), record(2)], [left(1)], participants)
    assert not have_all_reported([record(0), record(0)], [left(1)], participants)


def test_terminated_are_the_numbers_that_nobody_has() -> None:
    """Who left, who ended before it said its number, and who was discarded need no number."""
    # Initial rank 9 was discarded in this iteration and never had a number.
    arrivals = [going(4, 0, 5), left(5), going(6, 2, 5), ended(7), going(8, 4, 5), left(9)]
    decision = decide(arrivals, frozenset({4, 5, 6, 7, 8, 9}), [record(7), record(5), record(7)])
    assert decision.terminated == (1, 3)
    assert decision.going_on == {4, 6, 8}
    assert decision.numbers == {4: 0, 6: 2, 8: 4}
    assert decision.lost == (5, 7, 9)
    assert decision.records == (record(5), record(7))
    assert decision.world_size == 5


def test_who_ended_after_its_arrival_does_not_go_on() -> None:
    """Of a rank that stands in the list twice the one counts in which it does not go on."""
    for arrivals in ([going(0, 0, 2), ended(0)], [left(0), going(0, 0, 2)]):
        decision = decide([*arrivals, going(1, 1, 2)], frozenset({0, 1}), [])
        assert decision.going_on == {1}
        assert decision.terminated == (0,)


def test_ranks_that_contradict_each_other_do_not_both_go_on() -> None:
    """Of two ranks with one number, or with two sizes of the world, the smaller one goes on."""
    arrivals = [going(3, 1, 4), going(0, 1, 4), going(2, 0, 5), going(1, 2, 4)]
    decision = decide(arrivals, frozenset(range(4)), [])
    assert decision.going_on == {0, 1}
    assert decision.terminated == (0, 3)


def test_nobody_goes_on() -> None:
    """If all have left there is a decision, and it has nobody in it."""
    decision = decide([left(0), ended(1)], frozenset({0, 1}), [])
    assert decision.going_on == frozenset()
    assert decision.terminated == ()
    assert decode_decision(encode_decision(decision)) == decision


def random_decision(rng: random.Random, most: int = 300) -> Decision:
    world_size = rng.randint(1, most)
    numbers = rng.sample(range(world_size), world_size) if rng.random() < 0.3 else range(world_size)
    arrivals = [
        rng.choices([going(i, n, world_size), left(i), ended(i)], [20, 1, 1])[0]
        for i, n in enumerate(numbers)
    ]
    records = [record(rng.randrange(world_size), rng.choice(list(Interruption))) for _ in range(9)]
    return decide(arrivals, frozenset(range(world_size)), records)


def test_decisions_keep_their_meaning_as_text() -> None:
    """The text of a decision says exactly that decision again; 300 random ones."""
    rng = random.Random(1)
    for _ in range(300):
        decision = random_decision(rng)
        again = decode_decision(encode_decision(decision))
        assert again == decision
        assert again.going_on == decision.going_on
        assert parse_records(format_records(decision.records)) == [*decision.records]


def test_a_decision_about_many_is_short() -> None:
    """If two of 1024 ranks have ended the decision takes less than 200 bytes."""
    arrivals = [going(i, i, 1024) if i not in (3, 700) else ended(i) for i in range(1024)]
    decision = decide(arrivals, frozenset(range(1024)), [record(3), record(700)])
    assert len(encode_decision(decision)) < 200


def test_damaged_decisions_are_named() -> None:
    """A text that was changed anywhere is a decision or a ForeignValueError, nothing else."""
    rng = random.Random(2)
    refused = 0
    for _ in range(600):
        text = list(encode_decision(random_decision(rng, 40)))
        for _ in range(rng.randint(1, 3)):
            text[rng.randrange(len(text))] = rng.choice('0123456789[]{}",:-eE.x \u00e9')
        refused += 1
        with contextlib.suppress(ForeignValueError):
            decode_decision("".join(text), "some/decision")
            refused -= 1
    assert refused > 400


@pytest.mark.parametrize(
    "text",
    ["", "null", "[]", "3", "[" * 9999, '{"world_size":1}']
    + [
        f'{{"world_size":{w},"going":{g},"lost":{lost},"records":{r}}}'
        for w, g, lost, r in [
            ("1", "[[0,0,99999999999]]", '""', '""'),
            ("1", "[[0,0,2]]", '""', '""'),
            ("2", "[[0,1,1]]", '"0"', '""'),
            ("2", "[[0,2,1]]", '""', '""'),
            ("2", "[[0,0,1],[1,0,1]]", '""', '""'),
            ("2", "[[0,0,1],[0,1,1]]", '""', '""'),
            ("-1", "[]", '""', '""'),
            ("true", "[[0,0,1]]", '""', '""'),
            ("1e3", "[]", '""', '""'),
            ("1", "[[0,0,1]]", '""', '"NO:0;"'),
            ("1", "[[0,0,1]]", '""', "[]"),
            ("1", "[[0,0,1]]", "[]", '""'),
            ("1", "[[0,0,1]]", '"1-9999999"', '""'),
            ("99999999999", "[[0,0,1]]", '""', '""'),
        ]
    ],
)
def test_foreign_decisions_are_named(text: str) -> None:
    """No text makes the reader of a decision crash, hang or take memory without bound."""
    with pytest.raises(ForeignValueError, match="decision"):
        decode_decision(text)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, SCHEDULES, PER_TEST))
def test_every_schedule_keeps_the_rules(first: int) -> None:
    """One outcome, one decision, right numbers, and an end, whoever dies at whichever operation."""
    wrong = {seed: error for seed in range(first, first + PER_TEST) if (error := failure_of(seed))}
    assert not wrong


def failure_of(seed: int) -> str:
    try:
        Schedule(seed).run()
    except Exception as error:  # noqa: BLE001 - the report of a schedule
        return repr(error)[:300]
    return ""


def never(*_: Any, **__: Any) -> None:
    return None


def overwriting(self: Any, key: str, expected: str, wanted: str) -> str:
    self.set(key, wanted)
    return wanted


@pytest.mark.parametrize(
    ("owner", "name", "broken"),
    [
        (
            iteration_store_module,
            "is_whole",
            lambda arrivals, participants: len(arrivals) >= len(participants),
        ),
        (
            iteration_store_module,
            "is_complete",
            lambda entries: len(entries) >= entries[0].world_size,
        ),
        (IterationStore, "_settle_completion", never),
    ],
)
def test_the_schedules_notice_faults(
    owner: object, name: str, broken: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one rule of the protocol left out, some of the first 300 schedules go wrong."""
    monkeypatch.setattr(owner, name, broken)
    monkeypatch.setattr("protocol_schedules.MOST_STEPS", 1500)
    assert any(failure_of(seed) for seed in range(300))


def test_the_schedules_notice_a_value_that_is_set_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Were outcome and decision overwritten instead of set once, some schedules would go wrong."""
    settle = "nvidia_resiliency_ext.inprocess._store.access.StoreAccess.swap"
    real = iteration_store_module.StoreAccess.swap

    def swap(self: Any, key: str, expected: str, wanted: str) -> str:
        is_settled = key.endswith(("outcome", "decision")) and expected == ""
        return (overwriting if is_settled else real)(self, key, expected, wanted)

    monkeypatch.setattr(settle, swap)
    monkeypatch.setattr("protocol_schedules.MOST_STEPS", 1500)
    assert any(failure_of(seed) for seed in range(300))
