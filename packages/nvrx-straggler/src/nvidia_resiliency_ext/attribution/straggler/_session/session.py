# SPDX-License-Identifier: Apache-2.0
"""One life of the detector, from `initialize` to `shutdown`: it joins the parts and owns them."""

from __future__ import annotations

import datetime as dt
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist

from nvidia_resiliency_ext.attribution.straggler import dist_utils
from nvidia_resiliency_ext.attribution.straggler._exchange.generator import (
    Outcome,
    RankData,
    ReportGenerator,
    parse_scores,
)
from nvidia_resiliency_ext.attribution.straggler._exchange.worker import (
    ExchangeSkippedError,
    ExchangeWorker,
)
from nvidia_resiliency_ext.attribution.straggler._measure.kernel_capture import (
    MODES,
    open_capture,
    synchronize,
)
from nvidia_resiliency_ext.attribution.straggler._measure.sections import SectionRegistry
from nvidia_resiliency_ext.attribution.straggler._measure.wrapping import Wrapping
from nvidia_resiliency_ext.attribution.straggler._scores.report import Report
from nvidia_resiliency_ext.attribution.straggler._scores.scoring import ScoringOptions
from nvidia_resiliency_ext.attribution.straggler.interval_tracker import ReportIntervalTracker
from nvidia_resiliency_ext.attribution.straggler.statistics import SummaryTable
from nvidia_resiliency_ext.shared_utils.events import EventLog
from nvidia_resiliency_ext.shared_utils.rank_sets import format_ranks

from . import environment
from .settings import Settings

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from .control import ControlServer

__all__ = ["Session", "SessionOptions"]

_GROUP_TIMEOUT = dt.timedelta(minutes=30)
_MOST_RANKS_IN_EVENT = 64

logger = logging.getLogger("nvrx")

T = TypeVar("T")


@dataclass(frozen=True)
class SessionOptions:
    """What `Detector.initialize` was given; see there."""

    scores_to_compute: tuple[str, ...]
    gather_on_rank0: bool
    node_name: str
    settings: Settings
    process_group: ProcessGroup | None = None
    cuda_profiling: str = "auto"
    scoring: ScoringOptions = field(default_factory=ScoringOptions)
    exchange_timeout: float = 60.0
    control: bool = True

    def __post_init__(self) -> None:
        parse_scores(self.scores_to_compute)
        if self.cuda_profiling not in MODES:
            raise ValueError(
                f"cuda_profiling={self.cuda_profiling!r}: give one of {', '.join(MODES)}"
            )
        if not self.exchange_timeout > 0:
            raise ValueError(f"exchange_timeout={self.exchange_timeout}: must be more than 0 s")


class Session:
    """Sections, kernel timing, reports and settings of one process.

    Attributes:
        registry: Switches and sections, read at every entry.
        capture: Kernel timing, None where there is none.
        generator: Builds reports.
        tracker: Knows when a report is due.
        wrapping: Wrapped callables.
        settings: Settings in force.
        pending: Rank 0's settings that take effect with the next report.
        last_report: The newest report of this rank, None before the first.
    """

    def __init__(self, options: SessionOptions) -> None:
        self._options = options
        self.settings = self.pending = options.settings
        self.capture, self._capture_status = open_capture(options.cuda_profiling)
        self.registry = SectionRegistry(self.settings.profiling_interval, self.capture)
        self.generator = ReportGenerator(
            options.scores_to_compute,
            gather_on_rank0=options.gather_on_rank0,
            pg=options.process_group,
            node_name=options.node_name,
            options=options.scoring,
        )
        self.tracker = ReportIntervalTracker(
            time_interval=self.settings.report_time_interval,
            profiling_interval=self.settings.profiling_interval,
            reduce_max=self._reduce_max,
        )
        self.wrapping = Wrapping()
        self.last_report: Report | None = None
        self._is_paused_here = False
        self._worker = ExchangeWorker(options.exchange_timeout)
        self._own_group: ProcessGroup | None = None
        self._world: object = None
        self._events = EventLog.join(src="straggler")
        self._control: ControlServer | None = None
        self._has_tried_control = False
        self._update_switches()

    @property
    def cuda_status(self) -> str:
        """How kernel timing stands on this rank."""
        if self.registry.is_paused:
            return "paused"
        return self._capture_status if self.capture is None else self.capture.status

    def pause(self, is_paused: bool) -> None:
        """Switch measuring off or on, on this rank only."""
        self._is_paused_here = is_paused
        self._update_switches()

    def request(self, changes: dict[str, object]) -> Settings:
        """Change settings on all ranks at the next report; only rank 0's request has an effect.

        Raises:
            ConfigError: A name or value is wrong.
        """
        self.pending = self.pending.changed(changes)
        return self.pending

    def count_iteration(self) -> bool:
        """Count an iteration and tell whether a report is due, equally on all ranks."""
        self._open_control()
        self.tracker.iter_increase()
        return self.tracker.is_interval_elapsed()

    def report(self) -> Report | None:
        """Run one report with all ranks; None where this rank gets none, or it was skipped."""
        self._open_control()
        data = self._collect()
        if not self.generator.exchanges:
            outcome = self.generator.exchange(data)
        else:
            try:
                outcome = self._in_group(lambda: self.generator.exchange(data))
            except ExchangeSkippedError as error:
                logger.warning("straggler report skipped: %s", error)
                return None
            except RuntimeError:
                logger.exception(
                    "straggler reports end here: a collective failed, as when a rank is gone;"
                    " call Detector.shutdown and Detector.initialize on all ranks to go on"
                )
                return None
        self._apply(outcome, data)
        if outcome.report is not None:
            self.last_report = outcome.report
            self._record(outcome.report)
        return outcome.report

    def close(self) -> None:
        """Restore callables, release CUPTI, end threads."""
        self.registry.is_paused = True
        self.wrapping.restore()
        if self._control is not None:
            self._control.close()
        self._worker.close()
        if self.capture is not None:
            self.capture.close()
            # A process has one profiler: it must not wait for the garbage collector.
            self.capture = self.registry.capture = None
        self._events.close()
        group, self._own_group = self._own_group, None
        if group is not None and dist.is_initialized() and dist.group.WORLD is self._world:
            dist.destroy_process_group(group)

    def _collect(self) -> RankData:
        """Return the window of this rank; one that cannot be read counts as no data."""
        is_rank0 = dist_utils.get_rank(self._options.process_group) == 0
        offered = self.pending if is_rank0 else self.settings
        sections = kernels = SummaryTable((), [])
        dropped, has_failed = 0, False
        status = self.cuda_status
        try:
            sections = self.registry.drain()
            if self.capture is not None:
                synchronize()
                kernels, dropped = self.capture.collect()
        except Exception:  # peers wait in the collective that follows
            logger.exception("straggler report: this rank has no data")
            has_failed = True
        return RankData(
            sections=sections,
            kernels=kernels,
            cuda_status=status,
            abstains_sections=self.registry.is_paused,
            has_failed=has_failed,
            dropped_records=dropped,
            settings_version=offered.version,
            settings=offered.encode(),
            wanted_interval=self.tracker.wanted_interval(),
            thresholds=self.settings.thresholds,
        )

    def _apply(self, outcome: Outcome, data: RankData) -> None:
        """Take over what all ranks have agreed on."""
        is_rank0 = self.generator.rank == 0
        # Alone, or without a collective, there is nobody to agree with.
        changes = data.settings if is_rank0 else outcome.settings
        if changes is not None:
            self.settings = Settings.decode(changes)
            if self.pending.version <= self.settings.version:
                self.pending = self.settings
            self.registry.interval = self.settings.profiling_interval
            self.tracker.time_interval = self.settings.report_time_interval
            self.tracker.profiling_interval = self.settings.profiling_interval
            self._update_switches()
        self.tracker.correct(outcome.iter_interval)

    def _update_switches(self) -> None:
        rank = dist_utils.get_rank(self._options.process_group)
        self.registry.is_paused = self._is_paused_here or not self.settings.measures(rank)

    def _record(self, report: Report) -> None:
        """Write one event for each kind of GPU or section straggler of a report."""
        if not self._events.enabled:
            return
        from nvidia_resiliency_ext.shared_utils.events import Straggler

        found = report.identify_stragglers(**report.thresholds)
        kinds = {
            "gpu_relative": (found["straggler_gpus_relative"], report.gpu_relative_perf_scores),
            "gpu_individual": (
                found["straggler_gpus_individual"],
                report.gpu_individual_perf_scores,
            ),
        }
        for name, ids in found["straggler_sections_relative"].items():
            kinds[f"section_relative: {name}"] = ids, report.section_relative_perf_scores[name]
        for reason, (ids, scores) in kinds.items():
            ranks = sorted(item.rank for item in ids)
            if ranks:
                shown = {str(rank): round(scores[rank], 4) for rank in ranks[:_MOST_RANKS_IN_EVENT]}
                event = Straggler(ranks=format_ranks(ranks), scores=shown, reason=reason)
                only = ranks[0] if len(ranks) == 1 else None
                self._events.record(event, cycle=environment.launch_cycle(), rank=only)

    def _in_group(self, run: Callable[[], T]) -> T:
        """Run a collective of reports: in the worker thread, if there are peers to wait for."""
        group = self._group()
        self.generator.group = group
        alone = dist_utils.get_world_size(group) == 1
        if alone or dist_utils.get_device_for_backend(group).type != "cpu":
            return run()
        return self._worker.call(run)

    def _group(self) -> ProcessGroup | None:
        """Return the ranks' group for reports, made by the first collective on all ranks.

        It is one of its own, so that reports neither wait for nor disturb the training's
        collectives.
        """
        given = self._options.process_group
        if given is not None or dist_utils.get_world_size() == 1:
            return given
        world = dist.group.WORLD
        if self._world is not world or self._own_group is None:
            self._world = world
            self._own_group = dist.new_group(backend="gloo", timeout=_GROUP_TIMEOUT)
        return self._own_group

    def _reduce_max(self, value: float) -> float:
        def reduce() -> float:
            group = self.generator.group
            device = dist_utils.get_device_for_backend(group)
            tensor = torch.tensor([value], dtype=torch.float64, device=device)
            dist_utils.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group)
            return float(tensor.item())

        try:
            return self._in_group(reduce)
        except ExchangeSkippedError as error:
            logger.warning("straggler: the report interval is this rank's own estimate: %s", error)
            return value

    def _open_control(self) -> None:
        """Offer `nvrx-straggler` a socket, on rank 0, once the rank is known."""
        if self._has_tried_control:
            return
        self._has_tried_control = True
        rank = dist_utils.get_rank(self._options.process_group)
        reaches_all = self.generator.exchanges or dist_utils.get_world_size() == 1
        if not self._options.control or rank != 0 or not reaches_all:
            return
        from .control import ControlServer

        try:
            self._control = ControlServer(self)
        except OSError as error:
            logger.warning("straggler: nvrx-straggler cannot steer this job: %s", error)
