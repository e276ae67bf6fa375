# SPDX-License-Identifier: Apache-2.0
"""Which ranks are in groups that do not hold together: pure counting, alike on every rank."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence


def failing(
    runs: Iterable[tuple[Sequence[str], range]], condition: Callable[[int], bool]
) -> set[int]:
    """Return the ranks of all groups whose size does not fulfil the condition.

    Args:
        runs: Keys, and ranks that have them; keys may come several times.
        condition: Is asked once per size.
    """
    members: dict[tuple[str, ...], list[range]] = {}
    for key, ranks in runs:
        members.setdefault(tuple(key), []).append(ranks)
    sizes = {key: sum(map(len, ranks)) for key, ranks in members.items()}
    holds = {size: bool(condition(size)) for size in sorted(set(sizes.values()))}
    broken = (ranks for key, ranks in members.items() if not holds[sizes[key]])
    return set(chain.from_iterable(chain.from_iterable(broken)))
