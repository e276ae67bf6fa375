# SPDX-License-Identifier: Apache-2.0
"""What can be changed while a job runs, as a value and as text that rank 0 sends to all ranks."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from nvidia_resiliency_ext.attribution.straggler._exchange.collectives import SETTINGS_BYTES
from nvidia_resiliency_ext.attribution.straggler._scores.report import DEFAULT_THRESHOLDS
from nvidia_resiliency_ext.attribution.straggler.interval_tracker import iterations_in
from nvidia_resiliency_ext.shared_utils.errors import ConfigError
from nvidia_resiliency_ext.shared_utils.rank_sets import format_ranks, parse_ranks

ALL_RANKS = "all"
MAX_PROFILING_INTERVAL = 1_000_000_000


@dataclass(frozen=True)
class Settings:
    """Settings of a detector, the same on all ranks.

    Attributes:
        version: Counts changes; rank 0 alone makes new versions.
        enabled: Sections are measured.
        profiling_interval: Entry n of a section is measured if n is a multiple of it.
        report_time_interval: Seconds between reports.
        ranks: Ranks that measure, such as `0-3,8`, or `all`.
        gpu_rel_threshold: Relative GPU score below which a rank is a straggler.
        section_rel_threshold: Likewise for sections.
        gpu_indiv_threshold: Individual GPU score below which a rank is a straggler.
        section_indiv_threshold: Likewise for sections.

    Raises:
        ConfigError: A value is out of range; the message names it.
    """

    version: int = 0
    enabled: bool = True
    profiling_interval: int = 1
    report_time_interval: float = 60.0
    ranks: str = ALL_RANKS
    gpu_rel_threshold: float = 0.75
    section_rel_threshold: float = 0.75
    gpu_indiv_threshold: float = 0.75
    section_indiv_threshold: float = 0.75
    _ranks: frozenset[int] | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for item in _FIELDS:
            _require_type(item.name, getattr(self, item.name), str(item.type))
        if not 1 <= self.profiling_interval <= MAX_PROFILING_INTERVAL:
            raise ConfigError(
                f"profiling_interval={self.profiling_interval}: must be 1 to"
                f" {MAX_PROFILING_INTERVAL} entries"
            )
        if not (math.isfinite(self.report_time_interval) and self.report_time_interval >= 0):
            raise ConfigError(
                f"report_time_interval={self.report_time_interval}: must be seconds, 0 or more"
            )
        for name in DEFAULT_THRESHOLDS:
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name}={getattr(self, name)}: must lie between 0 and 1")
        if self.ranks != ALL_RANKS:
            try:
                ranks = parse_ranks(self.ranks)
            except ValueError as error:
                raise ConfigError(f"ranks={self.ranks[:80]!r}: {error}") from error
            if not ranks:
                raise ConfigError("ranks='': name at least one; to measure on none, disable")
            object.__setattr__(self, "_ranks", frozenset(ranks))
            object.__setattr__(self, "ranks", format_ranks(ranks))
        if len(self.encode()) > SETTINGS_BYTES:
            raise ConfigError(f"ranks={self.ranks[:80]!r}...: too long, name fewer ranges")

    @property
    def thresholds(self) -> dict[str, float]:
        """The thresholds by argument name of `Report.identify_stragglers`."""
        return {name: getattr(self, name) for name in DEFAULT_THRESHOLDS}

    def measures(self, rank: int) -> bool:
        """Return whether this rank measures."""
        return self.enabled and (self._ranks is None or rank in self._ranks)

    def iterations_between_reports(self, step_time: float) -> int | None:
        """Return the report interval for a step time in seconds, None for one that is unknown."""
        if not math.isfinite(step_time):
            return None
        wanted = iterations_in(self.report_time_interval, step_time)
        return int(max(wanted, self.profiling_interval))

    def changed(self, changes: Mapping[str, object], world_size: int) -> Settings:
        """Return the next version with these values.

        Args:
            changes: Values by name.
            world_size: Number of ranks of the job.

        Raises:
            ConfigError: A name is not known, a value out of range, or a rank not there.
        """
        for name in changes:
            if name not in CHANGEABLE:
                raise ConfigError(
                    f"{name!r} cannot be changed in a running job; known: {', '.join(CHANGEABLE)}"
                )
        new = replace(self, version=self.version + 1, **changes)  # type: ignore[arg-type]
        if "ranks" in changes and any(rank >= world_size for rank in new._ranks or ()):  # noqa: SLF001 - own class
            have = "rank 0" if world_size == 1 else f"ranks 0-{world_size - 1}"
            raise ConfigError(f"ranks={new.ranks[:80]!r}: this job has {have}")
        return new

    def encode(self) -> bytes:
        """Return the settings as JSON."""
        return json.dumps(self.to_dict()).encode()

    @classmethod
    def decode(cls, data: bytes) -> Settings:
        """Return the settings of a JSON text.

        Raises:
            ConfigError: It is no such text.
        """
        try:
            values = json.loads(data)
        except ValueError as error:
            raise ConfigError(f"settings from rank 0 are no JSON: {error}") from error
        if not isinstance(values, dict) or set(values) != {item.name for item in _FIELDS}:
            raise ConfigError(f"settings from rank 0 lack or add fields: {data[:200]!r}")
        return cls(**values)

    def to_dict(self) -> dict[str, object]:
        """Return the values by name."""
        return {item.name: getattr(self, item.name) for item in _FIELDS}


_FIELDS = tuple(item for item in fields(Settings) if item.init)
CHANGEABLE = tuple(item.name for item in _FIELDS if item.name != "version")
"""Names of settings that can be changed in a running job."""


def _require_type(name: str, value: object, kind: str) -> None:
    kinds: dict[str, Any] = {"bool": bool, "int": int, "float": (int, float), "str": str}
    # True and False are no numbers.
    if not isinstance(value, kinds[kind]) or isinstance(value, bool) != (kind == "bool"):
        raise ConfigError(f"{name}={value!r}: must be of type {kind}")
