# SPDX-License-Identifier: Apache-2.0
"""Find members that called another operation than their peers at the same place of a group.

Compared are name, element type and element count. Sizes of all-to-all and of one-sided operations
may differ. A rank that left an operation out, or called one more, shows it in the same way from
there on: its sequence is shifted against the others'.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from nvidia_resiliency_ext.attribution._traces.dumps import Op
    from nvidia_resiliency_ext.attribution._traces.world import GroupState, World

__all__ = ["Mismatch", "find_mismatch"]

Signature = tuple[str, tuple[str, ...], int]

_ANY_SIZE = frozenset({"gather", "scatter", "coalesced"})
_ANY_SIZE_PARTS = ("all_to_all", "alltoall")
_BY_OUTPUT = ("reduce_scatter", "_reduce_scatter_base")


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Members that disagree at one place.

    Attributes:
        kind: `mismatch`, or `desync` when the sequence is shifted.
        group: The process group.
        seq: Sequence number of the place.
        ranks: Ranks that differ from most of their peers.
        expected: What most members called.
        found: Rank -> what it called.
        is_tie: No side has more ranks.
    """

    kind: Literal["mismatch", "desync"]
    group: GroupState
    seq: int
    ranks: tuple[int, ...]
    expected: str
    found: dict[int, str]
    is_tie: bool


def find_mismatch(world: World) -> Mismatch | None:
    """Return the earliest disagreement over an operation that has not ended everywhere."""
    best: tuple[int, int, GroupState] | None = None
    for group in world.groups:
        pending = {
            seq
            for by_seq in group.by_seq.values()
            for seq, ops in by_seq.items()
            if not all(op.is_done for op in ops)
        }
        for seq in sorted(pending):
            entries = [by_seq[seq] for by_seq in group.by_seq.values() if seq in by_seq]
            if len({_signatures(ops) for ops in entries}) > 1:
                created = min(op.created_ns for ops in entries for op in ops)
                if best is None or (created, seq) < best[:2]:
                    best = created, seq, group
                break
    return None if best is None else _evaluate(world, best[2], best[1])


def _evaluate(world: World, group: GroupState, seq: int) -> Mismatch:
    called = {
        rank: _signatures(by_seq[seq]) for rank, by_seq in group.by_seq.items() if seq in by_seq
    }
    votes = Counter(called.values())
    (expected, most), *others = votes.most_common()
    is_tie = bool(others) and others[0][1] == most
    if is_tie:
        # Groups of the same description run the same program: let them decide.
        for other in world.groups:
            if other is not group and other.desc == group.desc:
                votes.update(_signatures(b[seq]) for b in other.by_seq.values() if seq in b)
        tied = sorted(dict.fromkeys(called.values()), key=lambda signature: -votes[signature])
        expected = tied[0]
        is_tie = votes[tied[0]] == votes[tied[1]]
    guilty = tuple(sorted(rank for rank, signature in called.items() if signature != expected))
    if is_tie:
        guilty = tuple(sorted(called))
    typical = _typical(group, expected_ranks=[r for r, s in called.items() if s == expected])
    shifted = all(_is_shifted(group.by_seq[rank], typical, seq) for rank in guilty)
    return Mismatch(
        "desync" if shifted and not is_tie else "mismatch",
        group,
        seq,
        guilty,
        _describe(expected),
        {rank: _describe(called[rank]) for rank in guilty},
        is_tie,
    )


def _typical(group: GroupState, expected_ranks: list[int]) -> dict[int, tuple[Signature, ...]]:
    found: dict[int, tuple[Signature, ...]] = {}
    for rank in expected_ranks:
        for seq, ops in group.by_seq[rank].items():
            found.setdefault(seq, _signatures(ops))
    return found


def _is_shifted(
    own_ops: dict[int, list[Op]], typical: dict[int, tuple[Signature, ...]], seq: int
) -> bool:
    own = {at: _signatures(ops) for at, ops in own_ops.items() if at >= seq}
    later = [at for at in own if at > seq and at in typical]
    if later and all(own[at] == typical[at] for at in later):
        return False
    for shift in (1, -1):
        pairs = [(own[at], _at(typical, at + shift)) for at in own]
        known = [(mine, theirs) for mine, theirs in pairs if theirs is not None]
        if shift == -1:
            # One operation more: what follows it is what the others called at its place.
            known = [(own[at], typical[at - 1]) for at in own if at > seq and at - 1 in typical]
        if known and all(mine == theirs for mine, theirs in known):
            return True
    return False


def _at(typical: dict[int, tuple[Signature, ...]], seq: int) -> tuple[Signature, ...] | None:
    """Return the others' calls at `seq`, or those to expect there from the step before."""
    found = typical.get(seq)
    if found is not None or seq - 1 not in typical:
        return found
    for earlier in sorted(typical, reverse=True):
        if earlier < seq - 1 and typical[earlier] == typical[seq - 1]:
            return typical.get(earlier + 1)
    return None


def _signatures(ops: list[Op]) -> tuple[Signature, ...]:
    return tuple(_signature(op) for op in ops)


def _signature(op: Op) -> Signature:
    count = 0
    if op.name not in _ANY_SIZE and not any(part in op.name for part in _ANY_SIZE_PARTS):
        count = op.counts[1 if op.name in _BY_OUTPUT else 0]
    return op.name, op.dtypes[0], count


def _describe(signatures: tuple[Signature, ...]) -> str:
    return "; ".join(
        f"{name}({', '.join(dtypes)} x {count})" if count else name
        for name, dtypes, count in signatures[:4]
    )
