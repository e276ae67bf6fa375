# SPDX-License-Identifier: Apache-2.0
"""Values that cross the store: what is written can be read, and nothing else can."""

import dataclasses
import json
import random

import pytest

from nvidia_resiliency_ext.fault_tolerance._core.machine import Cause
from nvidia_resiliency_ext.fault_tolerance._rendezvous.records import (
    MAX_TEXT,
    MAX_VALUE_BYTES,
    Arrival,
    Entry,
    ForeignValueError,
    HangStage,
    Kind,
    NodeMessage,
    Phase,
    RankAssignment,
    WorkerState,
    decode,
    encode,
)
from nvidia_resiliency_ext.shared_utils.hang_culprit import RankState
from nvidia_resiliency_ext.shared_utils.rank_activity import Activity

CAUSE = Cause("exit", "a worker failed", rank=3, exit_code=1, detail={"step": 7, "loss": 0.5})
ARRIVAL = Arrival("10.0.0.1_7_0", "10.0.0.1", "node1", 4, "nvl", "g", 8, 29500, 2, 1.5e9)
ENTRY = Entry(
    5,
    Phase.CLOSED,
    2,
    "e",
    "host",
    CAUSE,
    "why",
    4,
    4,
    32,
    "10.0.0.1",
    29500,
    (0.5, 7.0),
    True,
    False,
    12,
    "clocks are off",
    hang=HangStage.ASKED,
)
PLACE = RankAssignment(2, 3, 24, -180.5)
MESSAGE = NodeMessage(
    Kind.RESUMED, "10.0.0.1_7_0", ARRIVAL, WorkerState.FAILED, CAUSE, "text", ENTRY, PLACE
)
RANKS = (
    RankState(0, Activity.WAITING),
    RankState(7, Activity.WORKING, "node1", "runs", "a.py:1 in f", True, True, (3, 1)),
)
HUNG = NodeMessage(Kind.HUNG, "10.0.0.1_7_0", cause=CAUSE, ranks=RANKS)
RECORDS = (ARRIVAL, MESSAGE, HUNG, ENTRY, PLACE)


@pytest.mark.parametrize("record", RECORDS, ids=("arrival", "message", "hung", "entry", "place"))
def test_a_record_comes_back_as_it_was(record: object) -> None:
    """Every field of a record survives the store, on one line of ASCII."""
    text = encode(record)
    assert text.isascii()
    assert "\n" not in text
    assert decode(type(record), text) == record


@pytest.mark.parametrize("record", RECORDS, ids=("arrival", "message", "hung", "entry", "place"))
def test_random_damage_is_refused_or_harmless(record: object) -> None:
    """Bytes changed, cut or put in at random give a record of the type or ForeignValueError."""
    rng = random.Random(1)
    whole = encode(record).encode()
    for _ in range(3000):
        damaged = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(damaged))
            damaged[at : at + rng.randint(0, 3)] = rng.randbytes(rng.randint(0, 3))
        try:
            assert isinstance(decode(type(record), bytes(damaged)), type(record))
        except ForeignValueError:
            continue


@pytest.mark.parametrize("kind", [Arrival, NodeMessage, Entry, RankAssignment])
def test_random_bytes_are_refused(kind: type) -> None:
    """Bytes that are no record raise ForeignValueError and nothing else."""
    rng = random.Random(2)
    for _ in range(2000):
        with pytest.raises(ForeignValueError):
            decode(kind, rng.randbytes(rng.randint(0, 200)))


STRANGE = [
    "", "null", "[]", "{}", "1", '"x"', "[" * 60000, '{"a":' * 10000, "{" * 60000,
    "9" * 5000, '{"seq":' + "9" * 5000 + "}", "x" * (MAX_VALUE_BYTES + 1), "\ud800", "NaN",
]  # fmt: skip


@pytest.mark.parametrize("text", STRANGE, ids=range(len(STRANGE)))
@pytest.mark.parametrize("kind", [Arrival, NodeMessage, Entry, RankAssignment])
def test_strange_documents_are_refused(kind: type, text: str) -> None:
    """Documents that are empty, deep, huge or of another shape raise ForeignValueError."""
    with pytest.raises(ForeignValueError):
        decode(kind, text)


WORKING = json.loads(encode(HUNG))["f"]["ranks"]["v"][1]
WRONG_VALUES = [
    *((Entry, "seq", value) for value in (-1, 1.0, "1", None, 1 << 62, [], {})),
    *((Entry, "phase", value) for value in ("OPEN", 1, None, [], {}, "x" * 60000)),
    *((Entry, "phase", {"$": "Phase", "v": value}) for value in ("closing", 1, None, {})),
    *((Entry, "restart_ages_s", value) for value in (1, "1", ["1"], [1.0], [None], {"a": 1})),
    *((Entry, "is_controlled", value) for value in (1, 0, "yes", None)),
    *((Entry, "cause", value) for value in (1, [], "x", {"kind": 1}, {"$": "Cause", "f": {}})),
    *((Entry, "master_port", value) for value in (-1, 65536, "80")),
    *((RankAssignment, "round", value) for value in (-1, None, "0")),
    *((RankAssignment, "group_rank", value) for value in (-1, None, "0", 0.5)),
    *((RankAssignment, "clock_off_s", value) for value in ("1", None, [])),
    *((RankAssignment, "clock_off_s", {"$": "float", "v": value}) for value in ("nan", "inf")),
    *((Arrival, "clock", value) for value in ("1", [])),
    *((Arrival, "nproc", value) for value in (0, -8, 1 << 40, "8")),
    *((Arrival, "node", value) for value in (1, None, "n" * (MAX_TEXT + 1), "\ud800")),
    *((NodeMessage, "kind", value) for value in ("gone", None, [])),
    *((NodeMessage, "arrival", value) for value in (1, [], {"node": "n"})),
    *(
        (NodeMessage, "ranks", {"$": "tuple", "v": [{**WORKING, "f": {**WORKING["f"], **fields}}]})
        for fields in (
            {"rank": -1},
            {"rank": 1.0},
            {"rank": "0"},
            {"progress": {"$": "tuple", "v": [-1, 0]}},
            {"progress": {"$": "tuple", "v": [1, -1]}},
            {"progress": {"$": "tuple", "v": [1]}},
        )
    ),
    *((NodeMessage, "entry", value) for value in (1, {"seq": 1}, {"$": "Entry", "f": {"seq": 1}})),
]


@pytest.mark.parametrize(("kind", "name", "value"), WRONG_VALUES, ids=range(len(WRONG_VALUES)))
def test_a_wrong_value_is_refused(kind: type, name: str, value: object) -> None:
    """A field of the wrong type, size or range makes the whole record foreign."""
    record = {Entry: ENTRY, RankAssignment: PLACE, Arrival: ARRIVAL, NodeMessage: MESSAGE}[kind]
    document = json.loads(encode(record))
    document["f"][name] = value
    with pytest.raises(ForeignValueError) as caught:
        decode(kind, json.dumps(document))
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "1" + "0" * 400])
def test_numbers_that_are_not_finite_are_refused(number: str) -> None:
    """Not even a number that JSON can carry and a float cannot is taken."""
    ages = encode(ENTRY).replace("[0.5,7.0]", f"[{number}]")
    detail = encode(ENTRY).replace("0.5}", f"{number}}}")
    for text in (ages, detail):
        assert number in text
        with pytest.raises(ForeignValueError):
            decode(Entry, text)


def test_another_record_is_refused() -> None:
    """A record that is whole, but stands where another kind is expected, is foreign."""
    with pytest.raises(ForeignValueError, match="not an Entry, but RankAssignment"):
        decode(Entry, encode(PLACE))


def test_an_unknown_field_is_refused() -> None:
    """A record with a field that this version does not know is foreign."""
    with pytest.raises(ForeignValueError, match=r"not a RankAssignment: .* no field 'colour'"):
        decode(RankAssignment, encode(PLACE).replace("round", "colour"))


@pytest.mark.parametrize("letter", ["x", "\u4e00", "\U0001f525", "\ud800", "\n", "\x00"])
def test_what_is_written_can_always_be_read(letter: str) -> None:
    """However long and odd a node's texts are, its own record is not refused as foreign."""
    long = letter * 100_000
    cause = Cause(long, long, host=long, detail={"a": long, "b": 1, "c": float("nan")})
    message = NodeMessage(
        Kind.STATE, "10.0.0.1_7_0", ARRIVAL, WorkerState.FAILED, cause, long, ENTRY
    )
    text = encode(message)
    assert len(text) < MAX_VALUE_BYTES
    back = decode(NodeMessage, text)
    assert back.kind is Kind.STATE
    assert back.cause is not None
    back.cause.what.encode()


def test_a_record_beyond_a_frame_is_cut_further() -> None:
    """Where whole texts do not even fit a frame of the wire, shorter ones are tried."""
    many = tuple(RankState(rank, Activity.WAITING, words="\U0001f525" * 4096) for rank in range(32))
    back = decode(NodeMessage, encode(dataclasses.replace(HUNG, ranks=many)))
    assert [state.rank for state in back.ranks] == list(range(32))


def test_a_foreign_text_stays_on_one_line_of_the_log() -> None:
    """What is refused is told of without its control characters."""
    with pytest.raises(ForeignValueError) as refused:
        decode(Entry, json.dumps("x\nERROR \x1b[31m" + "\U000e0001" * 400))
    assert str(refused.value).isprintable()
    assert len(str(refused.value)) < 500


def test_what_is_not_plain_is_left_out_of_details() -> None:
    """Details of a cause that JSON cannot carry do not keep the cause from being told."""
    detail = {"list": [1], "nan": float("nan"), "huge": 10**5000, "object": object(), "n": 1}
    entry = dataclasses.replace(ENTRY, cause=Cause("k", "w", detail=detail))
    back = decode(Entry, encode(entry))
    assert back.cause is not None
    assert back.cause.detail == {"n": 1}


def test_an_entry_that_says_the_same_again_follows_nothing() -> None:
    """A round that another host has taken up is told from a new one by phase and round."""
    again = dataclasses.replace(ENTRY, seq=6, by="other")
    assert not again.follows(ENTRY)
    assert dataclasses.replace(ENTRY, round=3).follows(ENTRY)
    assert dataclasses.replace(ENTRY, phase=Phase.OVER).follows(ENTRY)
