# SPDX-License-Identifier: Apache-2.0
"""What the user says about one layer of the tree; knows nothing of ranks."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nvidia_resiliency_ext.inprocess._checks import check_integer

if TYPE_CHECKING:
    from nvidia_resiliency_ext.inprocess.state import State


class LayerFlag(enum.Flag):
    """Who takes over the number of a lost active rank.

    Attributes:
        RESERVE: An inactive rank below the same branch of this layer.
        BACKFILL: The active rank with the largest number below the same branch of this layer.
    """

    RESERVE = enum.auto()
    BACKFILL = enum.auto()


@dataclass
class Layer:
    """One layer of the tree; ranks with the same key, below the same branch, are a branch.

    It may be changed until a `Tree` is made of it, which checks it again.

    Args:
        min_ranks: A branch with fewer living ranks is given up as a whole.
        max_ranks: At most so many ranks of a branch are active in the first iteration; `None` for
            no limit. The others are reserves.
        key_or_fn: The key, or what is called with the rank's `State` to get it.
        flag: Who replaces lost active ranks.

    Raises:
        ValueError: A limit is negative, or `min_ranks` is above `max_ranks`.
        TypeError: An argument has another type.
    """

    min_ranks: int = 1
    max_ranks: int | None = None
    key_or_fn: str | Callable[[State], str] = ""
    flag: LayerFlag | None = None

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Refuse values that make no layer.

        Raises: as the class.
        """
        check_integer("min_ranks", self.min_ranks, least=0)
        if self.max_ranks is not None:
            check_integer("max_ranks", self.max_ranks, least=0)
            if self.min_ranks > self.max_ranks:
                raise ValueError(
                    f"min_ranks must be at most max_ranks: {self.min_ranks} > {self.max_ranks}"
                )
        if not isinstance(self.key_or_fn, str) and not callable(self.key_or_fn):
            raise TypeError(f"key_or_fn must be a str or callable, not {self.key_or_fn!r}")
        if self.flag is not None and not isinstance(self.flag, LayerFlag):
            raise TypeError(f"flag must be a LayerFlag or None, not {self.flag!r}")

    def has(self, flag: LayerFlag) -> bool:
        """Tell whether the flag is set."""
        return self.flag is not None and flag in self.flag
