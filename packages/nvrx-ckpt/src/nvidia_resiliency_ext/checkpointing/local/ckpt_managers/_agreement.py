# SPDX-License-Identifier: Apache-2.0
"""Agree between all ranks by one compact exchange each, and choose the iteration to load."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from nvidia_resiliency_ext.checkpointing.async_ckpt._agreement import control_group

_PAIRS = 32
_WORDS = 2 + 2 * _PAIRS
_TEXT_LIMIT = 2000


@dataclass(frozen=True)
class Held:
    """What one rank holds.

    Attributes:
        clique: Label that is equal on ranks that can hand shards to each other.
        shards: Pairs of iteration and owner.
    """

    clique: int
    shards: frozenset[tuple[int, int]]


def latest_iteration(held: Sequence[Held], *, below: int | None = None) -> int:
    """Return the largest iteration of which every rank can be given its own shard; -1: none.

    Args:
        held: What each rank holds, by rank.
        below: Only iterations smaller than this.

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
        if below is not None and iteration >= below:
            continue
        served = ((iteration, r) in by_clique[one.clique] for r, one in enumerate(held))
        if all(served):
            return iteration
    return -1


class Agreement:
    """Exchanges between all ranks; in a program without process groups there is one rank."""

    def __init__(self) -> None:
        self._group = control_group()

    @property
    def rank(self) -> int:
        """Return this rank."""
        return self._group.rank

    @property
    def world_size(self) -> int:
        """Return the number of ranks."""
        return self._group.size

    def gather_held(self, clique: int, shards: Iterable[tuple[int, int]]) -> list[Held]:
        """Return what each rank holds; of a rank that holds very many, the newest."""
        newest = sorted(set(shards), reverse=True)[:_PAIRS]
        words = [clique, len(newest), *(word for pair in newest for word in pair)]
        rows = self._group.gather_numbers(words + [0] * (_WORDS - len(words)))
        return [
            Held(row[0], frozenset((row[2 + 2 * i], row[3 + 2 * i]) for i in range(row[1])))
            for row in rows
        ]

    def all_true(self, value: bool) -> bool:
        """Tell whether a value is true on all ranks."""
        return bool(self._group.minimum([int(value)])[0])

    def all_equal(self, value: int) -> bool:
        """Tell whether all ranks gave the same number; no rank goes on before all have called."""
        low, high = self._group.minimum([value, -value])
        return low == -high

    def gather_texts(self, text: str) -> Mapping[int, str]:
        """Return the texts that are not empty, by rank; for errors, not for every save."""
        texts = self._group.gather_texts(text[:_TEXT_LIMIT])
        return {rank: found for rank, found in enumerate(texts) if found}
