# SPDX-License-Identifier: Apache-2.0
"""Tell all ranks who holds which shards, and choose the iteration to load."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from nvidia_resiliency_ext.checkpointing.async_ckpt._agreement import ControlGroup

_PAIRS = 32
_WORDS = 2 + 2 * _PAIRS


@dataclass(frozen=True)
class Held:
    """The shards that one rank holds.

    Attributes:
        clique: Label that is equal on ranks that can hand shards to each other.
        shards: Pairs of iteration and owner.
    """

    clique: int
    shards: frozenset[tuple[int, int]]


def latest_iteration(held: Sequence[Held]) -> int:
    """Return the largest iteration of which every rank can be given its own shard; -1: none.

    Args:
        held: What each rank holds, by rank.

    Example:
        >>> alone = [Held(0, frozenset({(5, 0), (4, 0)})), Held(1, frozenset({(4, 1)}))]
        >>> latest_iteration(alone)
        4
        >>> pair = [Held(0, frozenset({(5, 0), (5, 1)})), Held(0, frozenset({(4, 1)}))]
        >>> latest_iteration(pair)
        5
    """
    by_clique: dict[int, set[tuple[int, int]]] = {}
    for rank in held:
        by_clique.setdefault(rank.clique, set()).update(rank.shards)
    candidates = {iteration for rank in held for iteration, _ in rank.shards}
    for iteration in sorted(candidates, reverse=True):
        served = ((iteration, r) in by_clique[one.clique] for r, one in enumerate(held))
        if all(served):
            return iteration
    return -1


def gather_held(group: ControlGroup, clique: int, shards: Iterable[tuple[int, int]]) -> list[Held]:
    """Return the shards that each rank holds; of a rank that holds very many, the newest."""
    newest = sorted(set(shards), reverse=True)[:_PAIRS]
    words = [clique, len(newest), *(word for pair in newest for word in pair)]
    rows = group.gather_numbers(words + [0] * (_WORDS - len(words)))
    return [
        Held(row[0], frozenset((row[2 + 2 * i], row[3 + 2 * i]) for i in range(row[1])))
        for row in rows
    ]
