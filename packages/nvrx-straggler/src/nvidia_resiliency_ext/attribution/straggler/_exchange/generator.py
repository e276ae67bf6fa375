# SPDX-License-Identifier: Apache-2.0
"""From what the ranks measured to a report: the one place that joins scoring and exchange."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from nvidia_resiliency_ext.attribution.straggler import dist_utils
from nvidia_resiliency_ext.attribution.straggler._scores import views
from nvidia_resiliency_ext.attribution.straggler._scores.report import DEFAULT_THRESHOLDS, Report
from nvidia_resiliency_ext.attribution.straggler._scores.scoring import (
    ABSTAINS,
    MISSING,
    BestTimes,
    ScoringOptions,
    Summaries,
    Window,
    gpu_score,
    ratios,
    read_window,
    reference_of_ranks,
    slowest_kernels,
)
from nvidia_resiliency_ext.attribution.straggler.name_mapper import MAX_NAMES, NameMapper, Proposal
from nvidia_resiliency_ext.shared_utils.errors import ConfigError

from . import collectives

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch.distributed import ProcessGroup

    from nvidia_resiliency_ext.attribution.straggler._scores.scoring import Array

RELATIVE = "relative_perf_scores"
INDIVIDUAL = "individual_perf_scores"
SCORES = (RELATIVE, INDIVIDUAL)

logger = logging.getLogger("nvrx")


@dataclass(frozen=True)
class RankData:
    """Data of one rank for a report.

    Attributes:
        sections: Summary of each section of the window, ms.
        kernels: Summary of each kernel of the window, us.
        cuda_status: How kernel timing stands; its beginning is one of `STATUS_TEXTS`.
        abstains_sections: This rank does not measure sections at present.
        has_failed: The data could not be collected.
        dropped_records: Kernel records that CUPTI dropped in this window.
        settings_version: Version of the settings that this rank works with; on rank 0, of those
            that it offers.
        settings: Rank 0's settings as bytes.
        step_time: Median step time of this rank, s; infinity when unknown.
        thresholds: Scores below which a rank is a straggler, by argument name.
    """

    sections: Summaries
    kernels: Summaries
    cuda_status: str = "ok"
    abstains_sections: bool = False
    has_failed: bool = False
    dropped_records: int = 0
    settings_version: int = 0
    settings: bytes = b""
    step_time: float = math.inf
    thresholds: Mapping[str, float] = field(default_factory=lambda: dict(DEFAULT_THRESHOLDS))


@dataclass(frozen=True)
class Outcome:
    """Result of a report exchange for one rank.

    Attributes:
        report: The report, None where this rank gets none.
        settings: Settings that all ranks apply now, None when nothing changed.
        step_time: The least step time of all ranks, s; infinity when unknown, or when a rank has
            not waited for this outcome.
    """

    report: Report | None
    settings: bytes | None = None
    step_time: float = math.inf


class _Scored:
    """Scores of one rank, all NaN at first; they stay so where there is nothing to compare."""

    def __init__(self, window: Window) -> None:
        self.gpu_relative = self.gpu_individual = math.nan
        self.section_relative = np.full(len(window.section_names), np.nan)
        self.section_individual = np.full(len(window.section_names), np.nan)
        self.kernel_ratios = np.full(len(window.kernel_names), np.nan)
        self.common_kernels = 0


class ReportGenerator:
    """Builds reports; all ranks of the group call `generate_report` at the same point.

    Example:
        >>> from nvidia_resiliency_ext.attribution.straggler import Statistic
        >>> generator = ReportGenerator(["relative_perf_scores"], gather_on_rank0=False)
        >>> summary = {Statistic.MED: 2.0, Statistic.AVG: 2.0, Statistic.NUM: 5}
        >>> report = generator.generate_report({"step": summary}, {})
        >>> dict(report.section_relative_perf_scores["step"])
        {0: 1.0}

    Args:
        scores_to_compute: `"relative_perf_scores"`, `"individual_perf_scores"`, both, or `"all"`.
        gather_on_rank0: Collect the scores of all ranks in one report on rank 0.
        pg: The ranks; default: all.
        node_name: The name of this rank's node.
        options: How medians become scores.

    Raises:
        ValueError: A score is not known.

    Attributes:
        name_mapper: Numbers of names; filled only when ranks exchange anything.
        rank: This rank in the group, as of the last report.
        world_size: Ranks of the group, as of the last report.
    """

    def __init__(
        self,
        scores_to_compute: Sequence[str] | str,
        gather_on_rank0: bool = True,
        pg: ProcessGroup | None = None,
        node_name: str = "<notset>",
        options: ScoringOptions | None = None,
    ) -> None:
        self.scores_to_compute = parse_scores(scores_to_compute)
        self.is_computing_rel_scores = RELATIVE in self.scores_to_compute
        self.is_computing_indiv_scores = INDIVIDUAL in self.scores_to_compute
        self.gather_on_rank0 = gather_on_rank0
        self.node_name = node_name
        self.options = options or ScoringOptions()
        self.name_mapper = NameMapper(pg)
        self.rank = 0
        self.world_size = 1
        self._best_kernels = BestTimes(self.options.max_kernels, self.options.best_decay)
        self._best_sections = BestTimes(self.options.max_kernels, self.options.best_decay)
        self._kernel_decisions: dict[str, bool] = {}
        self._nodes: views.ByRank[str] | None = None
        self._announced: tuple[int, int, str] | None = None
        self._windows_below = np.zeros(0, dtype=np.int64)
        self.group = pg

    @property
    def group(self) -> ProcessGroup | None:
        """The process group in which reports are exchanged."""
        return self.name_mapper.group

    @group.setter
    def group(self, group: ProcessGroup | None) -> None:
        self.name_mapper.group = group
        self.rank = dist_utils.get_rank(group)
        self.world_size = dist_utils.get_world_size(group)

    @property
    def exchanges(self) -> bool:
        """Return whether a report is a collective."""
        return self.is_computing_rel_scores or self.gather_on_rank0

    def generate_report(
        self, section_summaries: Summaries, kernel_summaries: Summaries
    ) -> Report | None:
        """Return the report of a window: on rank 0 if gathered, else on every rank.

        A collective, unless only individual scores are computed and nothing is gathered.

        Args:
            section_summaries: Summary of each section, in ms.
            kernel_summaries: Summary of each kernel, in us.
        """
        return self.exchange(RankData(section_summaries, kernel_summaries)).report

    def exchange(self, data: RankData, vote: Callable[[], bool] = lambda: True) -> Outcome:
        """Run one report exchange with all ranks and return this rank's outcome.

        Args:
            data: What this rank has measured since the exchange before.
            vote: Called once all ranks have joined. Tells whether this rank has waited; unless
                all have, the outcome has no step time.
        """
        started = time.perf_counter()
        self.group = self.group  # ranks may have changed
        window, kernels, has_failed = self._read(data)
        agreement: collectives.Agreement | None = None
        reference = np.empty(0)
        if self.exchanges:
            agreement, reference = self._agree(data, window)
        try:
            scored = self._score(window, reference)
        except Exception:  # peers wait in the collective that follows
            logger.exception("straggler report: this rank has no scores")
            scored, has_failed = _Scored(window), True
        settings = None
        step_time = data.step_time if agreement is None else agreement.step_time
        if agreement is not None and not agreement.same_settings:
            settings = collectives.broadcast_settings(data.settings, self.group)
        status = "failed" if has_failed else data.cuda_status
        row = self._row(scored, window, status, data.dropped_records)
        if self.gather_on_rank0:
            rows, have_waited = collectives.gather_rows(row, vote(), self.group)
            if agreement is not None and agreement.needs_nodes:
                names = collectives.gather_nodes(self.node_name, agreement.longest_node, self.group)
                self._announced = self._place()
                self._nodes = None if names is None else views.ByRank(names)
        else:
            rows, have_waited = row.reshape(1, -1), vote()
            if self.exchanges:
                have_waited = dist_utils.is_all_true(have_waited, self.group)
            elif self.world_size > 1:
                have_waited = False  # other ranks do not know this step time
        step_time = step_time if have_waited else math.inf
        if rows is None:
            return Outcome(None, settings, step_time)
        report = self._report(rows, data, window, kernels, scored)
        elapsed_ms = (time.perf_counter() - started) * 1e3
        report = replace(report, generate_report_elapsed_time=elapsed_ms)
        return Outcome(report, settings, step_time)

    def _read(self, data: RankData) -> tuple[Window, Summaries, bool]:
        """Return the window; a rank that cannot build one has no data, and its peers go on."""
        try:
            window, kernels = read_window(
                data.sections, data.kernels, self.options, self._kernel_decisions
            )
        except Exception:  # peers wait in the collective that follows
            logger.exception("straggler report: this rank has no data, its summaries are broken")
            return Window(abstains_kernels=True, abstains_sections=True), {}, True
        window.abstains_kernels = data.has_failed or data.cuda_status != "ok"
        window.abstains_sections = data.has_failed or data.abstains_sections
        return window, kernels, data.has_failed

    def _place(self) -> tuple[int, int, str]:
        """Return world size, rank and node, which rank 0 must learn when they change."""
        return self.world_size, self.rank, self.node_name

    def _agree(self, data: RankData, window: Window) -> tuple[collectives.Agreement, Array]:
        """Return the agreement of all ranks and the reference of every entry of the tables."""
        mapper = self.name_mapper
        proposal = mapper.propose(window.kernel_names, window.section_names)
        medians = self._medians(window, proposal)
        state = collectives.RankState(
            tables=mapper.digest,
            proposed=proposal.digest,
            settings_version=data.settings_version,
            step_time=data.step_time,
            needs_nodes=self.gather_on_rank0 and self._announced != self._place(),
            node=self.node_name,
        )
        agreement, head = collectives.agree(state, medians, self.group)
        if agreement.same_proposal:
            mapper.accept(proposal)
        else:
            self._exchange_names(window, keep=agreement.same_tables)
            medians = self._medians(window, Proposal((), (), mapper.digest))
            _, head = collectives.agree(state, medians, self.group)
        if not self.is_computing_rel_scores:
            return agreement, np.empty(0)
        if self.options.is_minimum_of_all:
            least = collectives.reduce_medians(head, medians, self.group)
            return agreement, np.where(np.isfinite(least) & (least > 0), least, np.nan)
        peers = self.options.peers_of(self.rank, self.world_size)
        all_medians = collectives.gather_medians(medians, self.group)
        return agreement, reference_of_ranks(all_medians[peers], self.options)

    def _exchange_names(self, window: Window, *, keep: bool) -> None:
        """Number the names that are new on any rank; without agreement, all names anew."""
        mapper = self.name_mapper
        kernels, sections = list(window.kernel_names), list(window.section_names)
        if not keep:
            logger.info("straggler report: ranks number names differently, exchanging all of them")
            kernels = [*mapper.kernel_name_to_id, *kernels]
            sections = [*mapper.section_name_to_id, *sections]
        if not keep or mapper.kernel_counter + mapper.section_counter > MAX_NAMES:
            mapper.clear()
        mapper.gather_and_assign_ids(kernels, sections)

    def _medians(self, window: Window, proposal: Proposal) -> Array:
        """Return this rank's medians by number: kernels, then sections; 0 entries if unused."""
        if not self.is_computing_rel_scores:
            return np.empty(0)
        mapper = self.name_mapper
        missing = MISSING if self.options.reference_scope == "all" else ABSTAINS
        kernels = _by_number(
            {} if proposal.begins_anew else mapper.kernel_name_to_id,
            proposal.kernels,
            () if window.abstains_kernels else window.kernel_names,
            np.empty(0) if window.abstains_kernels else window.kernel_medians,
            ABSTAINS if window.abstains_kernels else missing,
        )
        sections = _by_number(
            {} if proposal.begins_anew else mapper.section_name_to_id,
            proposal.sections,
            window.section_names,
            window.section_medians,
            ABSTAINS if window.abstains_sections else missing,
        )
        return np.concatenate([kernels, sections])

    def _score(self, window: Window, reference: Array) -> _Scored:
        scored = _Scored(window)
        if self.is_computing_indiv_scores:
            best = self._best_kernels.update(
                window.kernel_names, window.kernel_medians, window.kernel_weights
            )
            scored.kernel_ratios = ratios(best, window.kernel_medians)
            scored.gpu_individual = gpu_score(scored.kernel_ratios, window.kernel_weights)
            best = self._best_sections.update(
                window.section_names, window.section_medians, window.section_medians
            )
            scored.section_individual = ratios(best, window.section_medians)
        if self.is_computing_rel_scores:
            mapper = self.name_mapper
            count = mapper.kernel_counter
            scored.common_kernels = int(np.isfinite(reference[:count]).sum())
            own = _pick(reference[:count], mapper.kernel_name_to_id, window.kernel_names)
            scored.kernel_ratios = ratios(own, window.kernel_medians)
            scored.gpu_relative = gpu_score(scored.kernel_ratios, window.kernel_weights)
            own = _pick(reference[count:], mapper.section_name_to_id, window.section_names)
            scored.section_relative = ratios(own, window.section_medians)
        return scored

    def _row(
        self, scored: _Scored, window: Window, status: str, dropped: int
    ) -> npt.NDArray[np.float32]:
        """Return the row to send: scores, details; sections by number if ranks exchange those."""
        if self.gather_on_rank0:
            numbers = self.name_mapper.section_name_to_id
            count = self.name_mapper.section_counter
            columns = np.array([numbers[name] for name in window.section_names], dtype=np.intp)
        else:
            count = len(window.section_names)
            columns = np.arange(count)
        kind = np.float32 if self.gather_on_rank0 and self.world_size > 1 else np.float64
        row = np.full(2 + 2 * count + views.DETAIL_COLUMNS, np.nan, dtype=kind)
        row[:2] = scored.gpu_relative, scored.gpu_individual
        row[2 + columns] = scored.section_relative
        row[2 + count + columns] = scored.section_individual
        details = row[2 + 2 * count :]
        details[:5] = (
            window.compute_us,
            window.communication_us,
            _status_number(status),
            dropped,
            window.evicted,
        )
        details[5:] = -1.0
        numbers = self.name_mapper.kernel_name_to_id
        worst = slowest_kernels(scored.kernel_ratios, window.kernel_weights, views.SLOWEST_KERNELS)
        for place, kernel in enumerate(worst.tolist()):
            number = numbers[window.kernel_names[kernel]] if self.exchanges else kernel
            share = window.kernel_weights[kernel] / window.compute_us
            details[5 + 3 * place : 8 + 3 * place] = number, scored.kernel_ratios[kernel], share
        return row

    def _report(
        self,
        rows: npt.NDArray[np.floating],
        data: RankData,
        window: Window,
        kernels: Summaries,
        scored: _Scored,
    ) -> Report:
        first = 0 if self.gather_on_rank0 else self.rank
        count = (rows.shape[1] - 2 - views.DETAIL_COLUMNS) // 2
        mapper = self.name_mapper
        sections = (
            tuple(mapper.section_name_to_id) if self.gather_on_rank0 else window.section_names
        )
        kernel_names = tuple(mapper.kernel_name_to_id) if self.exchanges else window.kernel_names
        relative, individual = self.is_computing_rel_scores, self.is_computing_indiv_scores
        gpu_relative = views.RankScores(rows[:, 0], first) if relative else {}
        section_relative = views.SectionScores(sections, rows[:, 2 : 2 + count], first)
        section_individual = views.SectionScores(
            sections, rows[:, 2 + count : 2 + 2 * count], first
        )
        nodes = self._nodes if self.gather_on_rank0 else None
        return Report(
            gpu_relative_perf_scores=gpu_relative,
            section_relative_perf_scores=section_relative if relative else {},
            gpu_individual_perf_scores=views.RankScores(rows[:, 1], first) if individual else {},
            section_individual_perf_scores=section_individual if individual else {},
            rank_to_node=nodes or {self.rank: self.node_name},
            local_section_summaries=data.sections,
            local_kernel_summaries=kernels,
            generate_report_elapsed_time=0.0,
            gather_on_rank0=self.gather_on_rank0,
            rank=self.rank,
            cuda_profiling_status=data.cuda_status,
            details=views.RankDetails(rows[:, 2 + 2 * count :], kernel_names, first),
            thresholds=data.thresholds,
            nan_reasons=self._nan_reasons(rows, data, len(kernel_names), scored, len(sections)),
            consecutive_windows_below=self._count_windows(rows[:, 0], data.thresholds, first),
        )

    def _nan_reasons(
        self,
        rows: npt.NDArray[np.floating],
        data: RankData,
        known_kernels: int,
        scored: _Scored,
        known_sections: int,
    ) -> dict[str, str]:
        """Return for `gpu` and `sections` why scores of this report are NaN or missing."""
        reasons = {}
        column = 0 if self.is_computing_rel_scores else 1
        if np.isnan(rows[:, column]).any():
            if not known_kernels:
                next_step = (
                    "wrap the training step or enter a detection_section with profile_cuda=True"
                    if data.cuda_status == "ok"
                    else "sections are compared all the same"
                )
                reasons["gpu"] = (
                    f"no kernel was captured on any rank (kernel timing here: {data.cuda_status});"
                    f" {next_step}"
                )
            elif self.is_computing_rel_scores and not scored.common_kernels:
                reasons["gpu"] = (
                    f"none of {known_kernels} kernels was measured on all ranks; compare ranks"
                    " that run the same program (peer_groups, or reference_scope='present')"
                )
            else:
                reasons["gpu"] = "some ranks measured none of the kernels that can be compared"
        if not known_sections:
            reasons["sections"] = (
                "no section was measured: nothing was wrapped and no detection_section entered"
            )
        return reasons

    def _count_windows(
        self, scores: npt.NDArray[np.floating], thresholds: Mapping[str, float], first: int
    ) -> views.RankScores:
        if len(self._windows_below) != len(scores):
            self._windows_below = np.zeros(len(scores), dtype=np.int64)
        below = scores < thresholds["gpu_rel_threshold"]
        self._windows_below = np.where(below, self._windows_below + 1, 0)
        return views.RankScores(self._windows_below.astype(np.float64), first)


def parse_scores(scores_to_compute: Sequence[str] | str) -> tuple[str, ...]:
    """Return the names of scores; `"all"` and the name of one score are accepted.

    Raises:
        ConfigError: A name is not known.
    """
    given: Any = scores_to_compute  # of whatever type
    is_list = isinstance(given, Iterable) and not isinstance(given, str)
    wanted: tuple[Any, ...] = tuple(given) if is_list else (given,)
    if wanted == ("all",):
        return SCORES
    for name in wanted:
        if name not in SCORES:
            raise ConfigError(
                f"scores_to_compute: {name!r} is no score; known are {', '.join(SCORES)} and 'all'"
            )
    return wanted


def _by_number(
    known: Mapping[str, int],
    proposed: Sequence[str],
    names: Sequence[str],
    medians: Array,
    default: float,
) -> Array:
    """Return medians at the numbers of their names, `default` elsewhere.

    Args:
        known: Numbers from 0.
        proposed: Names that would get the next numbers.
        names: Names of the window; those without a number are left out.
        medians: Their medians, NaN where unusable.
        default: The value of every other number.
    """
    target = np.full(len(known) + len(proposed), default)
    numbers = known
    if proposed:
        ids = range(len(known), len(target))
        numbers = {**known, **dict(zip(proposed, ids, strict=True))}
    places = np.array([numbers.get(name, -1) for name in names], dtype=np.intp)
    usable = np.isfinite(medians) & (places >= 0)
    target[places[usable]] = medians[usable]
    return target


def _pick(reference: Array, numbers: Mapping[str, int], names: Sequence[str]) -> Array:
    places = np.array([numbers.get(name, -1) for name in names], dtype=np.intp)
    picked: Array = np.append(reference, np.nan)[places]
    return picked


def _status_number(status: str) -> int:
    for number, text in enumerate(views.STATUS_TEXTS):
        if status == text or (number and status.startswith(text)):
            return number
    return views.STATUS_TEXTS.index("unavailable")
