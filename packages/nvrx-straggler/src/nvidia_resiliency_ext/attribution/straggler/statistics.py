# SPDX-License-Identifier: Apache-2.0
"""Summaries of samples: `Statistic` names the figures, `SummaryTable` holds them for many names."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    Array = npt.NDArray[np.float64]

__all__ = ["Statistic", "SummaryTable", "summarize"]


class Statistic(enum.Enum):
    """A figure of a summary.

    Section summaries are in milliseconds of wall time, kernel summaries in microseconds of GPU
    time. `MED` of an even count is the mean of the two middle samples, `STD` is the population
    standard deviation, `NUM` the number of samples.

    Example:
        >>> str(Statistic.MED), repr(Statistic.MED)
        ('MED', 'Statistic.MED')
    """

    MIN = enum.auto()
    MAX = enum.auto()
    MED = enum.auto()
    AVG = enum.auto()
    STD = enum.auto()
    NUM = enum.auto()

    # Members are single objects; the hash of Enum is a Python function and ten times slower.
    __hash__ = object.__hash__

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return f"Statistic.{self.name}"


_ORDER = tuple(Statistic)
_FIGURES = itemgetter(*_ORDER)


class SummaryTable(Mapping[str, Mapping[Statistic, float]]):
    """Read-only mapping from a name to its summary, kept as one array.

    Example:
        >>> table = SummaryTable(["step"], [summarize([1.0, 2.0, 4.0])])
        >>> table["step"][Statistic.MED]
        2.0

    Args:
        names: One distinct name per row.
        rows: Figures in the order of `Statistic`, shape `[len(names), 6]`.
        totals: Time spent under each name, in the unit of the rows; default `NUM * AVG`, or
            `AVG` without a count. It may cover more calls than there are samples.

    Raises:
        ValueError: The shapes do not fit the names.
    """

    def __init__(
        self, names: Sequence[str], rows: npt.ArrayLike, totals: npt.ArrayLike | None = None
    ) -> None:
        self.names = tuple(names)
        self.values_by_row = np.asarray(rows, dtype=np.float64).reshape(-1, len(_ORDER))
        if totals is None:
            calls = np.nan_to_num(self.column(Statistic.NUM), nan=1.0)
            self.totals: Array = calls * self.column(Statistic.AVG)
        else:
            self.totals = np.asarray(totals, dtype=np.float64)
        if not len(self.names) == len(self.values_by_row) == len(self.totals):
            raise ValueError(
                f"{len(self.names)} names, {len(self.values_by_row)} rows and"
                f" {len(self.totals)} totals do not fit together"
            )
        self._row_of: dict[str, int] | None = None

    def column(self, statistic: Statistic) -> Array:
        """Return one statistic of all names, in the order of `names`.

        Args:
            statistic: Which one.
        """
        values: Array = self.values_by_row[:, statistic.value - 1]
        return values

    def select(self, rows: npt.NDArray[np.intp]) -> SummaryTable:
        """Return a table of the rows with these numbers, in the order given."""
        names = [self.names[row] for row in rows.tolist()]
        return SummaryTable(names, self.values_by_row[rows], self.totals[rows])

    def __getitem__(self, name: str) -> Mapping[Statistic, float]:
        if self._row_of is None:
            self._row_of = {known: row for row, known in enumerate(self.names)}
        values = self.values_by_row[self._row_of[name]].tolist()
        summary = dict(zip(_ORDER, values, strict=True))
        summary[Statistic.NUM] = int(values[-1])
        return summary

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def __repr__(self) -> str:
        return repr(dict(self))

    @classmethod
    def from_mapping(cls, summaries: Mapping[str, Mapping[Statistic, float]]) -> SummaryTable:
        """Return a table of any mapping of summaries; figures that are missing become NaN.

        Args:
            summaries: For each name its statistics.
        """
        if isinstance(summaries, cls):
            return summaries
        try:
            rows = list(map(_FIGURES, summaries.values()))
        except KeyError:
            nan = float("nan")
            rows = [tuple(s.get(kind, nan) for kind in _ORDER) for s in summaries.values()]
        return cls(tuple(summaries), rows)


def summarize(samples: Sequence[float]) -> list[float]:
    """Return the statistics of samples, in the order of `Statistic`.

    `STD` of a single sample is NaN.

    Args:
        samples: One sample or more.

    Raises:
        ValueError: There is no sample.
    """
    if not samples:
        raise ValueError("no samples to summarize")
    values = np.sort(np.asarray(samples, dtype=np.float64))
    count = len(values)
    median = (values[(count - 1) // 2] + values[count // 2]) / 2
    spread = float(values.std()) if count > 1 else float("nan")
    figures = [values[0], values[-1], median, values.mean(), spread, count]
    return [float(figure) for figure in figures]
