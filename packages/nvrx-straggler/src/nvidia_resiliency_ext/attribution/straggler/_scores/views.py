# SPDX-License-Identifier: Apache-2.0
"""Read-only mappings over the array of all ranks' rows; nothing is built until it is asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    Rows = npt.NDArray[np.floating]

V = TypeVar("V")

SLOWEST_KERNELS = 3
"""Kernels per rank that travel with the report, for explanations."""
DETAIL_COLUMNS = 5 + 3 * SLOWEST_KERNELS
"""Columns of a row after the scores."""
STATUS_TEXTS = ("ok", "unavailable", "off", "paused: torch.profiler", "paused", "failed")
"""How kernel timing stands on a rank; its number travels."""


class ByRank(Mapping[int, V]):
    """A value for each rank; `.items()` and `.values()` run over ranks in order.

    Args:
        array: One row per rank.
        first_rank: Rank of the first row.
    """

    __slots__ = ("array", "first_rank")

    def __init__(self, array: Any, first_rank: int = 0) -> None:
        self.array = array
        self.first_rank = first_rank

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.first_rank, self.first_rank + len(self.array)))

    def __len__(self) -> int:
        return len(self.array)

    def __repr__(self) -> str:
        return repr(dict(self))

    def __getitem__(self, rank: int) -> V:
        value: V = self._row(rank)
        return value

    def _row(self, rank: int) -> Any:
        index = rank - self.first_rank
        if not 0 <= index < len(self.array):
            raise KeyError(rank)
        return self.array[index]


class RankScores(ByRank[float]):
    """Scores by rank, from an array of one dimension."""

    __slots__ = ()

    def __getitem__(self, rank: int) -> float:
        return float(self._row(rank))

    def below(self, threshold: float) -> list[int]:
        """Return the ranks whose score is less than the threshold; NaN never is."""
        ranks: list[int] = (np.flatnonzero(self.array < threshold) + self.first_rank).tolist()
        return ranks


class SectionScores(Mapping[str, Mapping[int, float]]):
    """Scores by section and rank.

    Args:
        names: One name per column.
        scores: Shape `[ranks, sections]`.
        first_rank: Rank of the first row.
    """

    __slots__ = ("_column_of", "array", "first_rank", "names")

    def __init__(self, names: Sequence[str], scores: Rows, first_rank: int = 0) -> None:
        self.names = tuple(names)
        self.array = scores
        self.first_rank = first_rank
        self._column_of = {name: column for column, name in enumerate(self.names)}

    def __getitem__(self, name: str) -> RankScores:
        return RankScores(self.array[:, self._column_of[name]], self.first_rank)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def __repr__(self) -> str:
        return repr(dict(self))


@dataclass(frozen=True, slots=True)
class SlowKernel:
    """A kernel that costs a rank time.

    Attributes:
        name: The kernel.
        score: Reference time divided by this rank's; 0.5 takes twice as long.
        share: Part of the rank's compute time that is spent in it, 0 to 1.
    """

    name: str
    score: float
    share: float


@dataclass(frozen=True, slots=True)
class RankDetail:
    """A rank's figures in a report beside its scores.

    Attributes:
        compute_us: GPU time in kernels that are compared, in this window.
        communication_us: GPU time in communication kernels, which also wait for other ranks.
        cuda_profiling_status: How kernel timing stands: one of `ok`, `unavailable`, `off`,
            `paused: torch.profiler`, `paused`, `failed`.
        dropped_records: Kernel records that CUPTI dropped.
        evicted_kernels: Kernels that were left out because there were too many.
        slowest: Kernels that cost the most time against the reference, worst first.
    """

    compute_us: float
    communication_us: float
    cuda_profiling_status: str
    dropped_records: int
    evicted_kernels: int
    slowest: tuple[SlowKernel, ...]


class RankDetails(ByRank[RankDetail]):
    """Details by rank.

    Args:
        rows: Shape `[ranks, DETAIL_COLUMNS]`.
        kernel_names: Names by kernel number.
        first_rank: Rank of the first row.
    """

    __slots__ = ("kernel_names",)

    def __init__(self, rows: Rows, kernel_names: Sequence[str], first_rank: int = 0) -> None:
        super().__init__(rows, first_rank)
        self.kernel_names = tuple(kernel_names)

    def __getitem__(self, rank: int) -> RankDetail:
        row = self._row(rank).tolist()
        slowest = []
        for start in range(5, DETAIL_COLUMNS, 3):
            kernel, score, share = row[start : start + 3]
            if 0 <= kernel < len(self.kernel_names):
                slowest.append(SlowKernel(self.kernel_names[int(kernel)], score, share))
        status = int(row[2]) if 0 <= row[2] < len(STATUS_TEXTS) else STATUS_TEXTS.index("failed")
        return RankDetail(
            row[0], row[1], STATUS_TEXTS[status], int(row[3]), int(row[4]), tuple(slowest)
        )
