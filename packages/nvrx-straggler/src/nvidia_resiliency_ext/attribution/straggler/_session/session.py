# SPDX-License-Identifier: Apache-2.0
"""One life of the detector, from `initialize` to `shutdown`: it joins the parts and owns them."""

from __future__ import annotations

import datetime as dt
import logging
import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist

from nvidia_resiliency_ext.attribution.straggler import dist_utils
from nvidia_resiliency_ext.attribution.straggler._errors import MalformedNamesError
from nvidia_resiliency_ext.attribution.straggler._exchange.generator import (
    Outcome,
    RankData,
    ReportGenerator,
    parse_scores,
)
from nvidia_resiliency_ext.attribution.straggler._exchange.worker import (
    Exchange,
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
from nvidia_resiliency_ext.attribution.straggler.interval_tracker import (
    NEVER,
    ReportIntervalTracker,
)
from nvidia_resiliency_ext.attribution.straggler.statistics import SummaryTable
from nvidia_resiliency_ext.shared_utils.credentials import TokenFile
from nvidia_resiliency_ext.shared_utils.errors import ConfigError
from nvidia_resiliency_ext.shared_utils.events import EventLog
from nvidia_resiliency_ext.shared_utils.rank_sets import format_ranks

from .control import Change, ControlServer, Refused, Status, StatusRequest
from .settings import Settings
from .store_control import TOKEN_FILE_VARIABLE, StoreControlServer

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


__all__ = ["Session", "SessionOptions"]

_GROUP_TIMEOUT = dt.timedelta(minutes=30)
_MOST_RANKS_IN_EVENT = 64
_WORST_RANKS_IN_STATUS = 8

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


@dataclass(frozen=True)
class _Correction:
    """A scheduled report whose result corrects the report interval.

    Attributes:
        exchange: The report.
        offered: Settings that this rank offered with it.
    """

    exchange: Exchange[Outcome]
    offered: Settings


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
            reduce_max=self._agree_on_interval,
        )
        self.wrapping = Wrapping()
        self.last_report: Report | None = None
        self._is_paused_here = False
        self._worker = ExchangeWorker()
        self._correction: _Correction | None = None
        self._own_group: ProcessGroup | None = None
        self._world: object = None
        self._events = EventLog.join(src="straggler")
        self._control: ControlServer | None = None
        self._store_control: StoreControlServer | None = None
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
            RuntimeError: This is not rank 0 of the ranks that report together.
        """
        rank = dist_utils.get_rank(self._options.process_group)
        if rank != 0:
            raise RuntimeError(
                f"settings are changed on rank 0 of the detector's process group, this is rank"
                f" {rank}"
            )
        world_size = dist_utils.get_world_size(self._options.process_group)
        self.pending = self.pending.changed(changes, world_size)
        return self.pending

    def count_iteration(self) -> bool:
        """Count an iteration and tell whether a report is due, equally on all ranks."""
        self._open_control()
        self.tracker.iter_increase()
        if self.tracker.current_iter == self.tracker.settling_iter:
            self._settle_interval()
        return self.tracker.is_interval_elapsed()

    def scheduled_report(self) -> Report | None:
        """Run the report that is due in this iteration; it also corrects the report interval."""
        self.tracker.expect_correction()
        self._correction = None
        return self._run_report(is_scheduled=True)

    def report(self) -> Report | None:
        """Run one report with all ranks; None where this rank gets none, or it was skipped."""
        return self._run_report(is_scheduled=False)

    def _run_report(self, *, is_scheduled: bool) -> Report | None:
        self._open_control()
        data, offered = self._collect()
        is_behind = self._worker.is_behind
        exchange = self._submit(lambda: self.generator.exchange(data))
        if is_scheduled:
            self._correction = _Correction(exchange, offered)
        if is_behind:
            logger.warning("straggler report skipped: an earlier one still waits for other ranks")
            return None
        try:
            outcome = exchange.result(self._options.exchange_timeout)
        except ExchangeSkippedError as error:
            logger.warning("straggler report skipped: %s", error)
            return None
        except (RuntimeError, MalformedNamesError):
            logger.exception(
                "straggler reports end here: a collective failed, as when a rank is gone;"
                " call Detector.shutdown and Detector.initialize on all ranks to go on"
            )
            return None
        self._apply(outcome, offered)
        if outcome.report is not None:
            self.last_report = outcome.report
            self._record(outcome.report)
        return outcome.report

    def close(self) -> None:
        """Restore callables, release CUPTI, end threads; what fails does not stop the rest."""
        self.registry.is_paused = True
        with ExitStack() as parts:  # closed in reverse order
            parts.callback(self._destroy_group)
            parts.callback(self._events.close)
            if self.capture is not None:
                # A process has one profiler: it must not wait for the garbage collector.
                parts.callback(self.capture.close)
                self.capture = self.registry.capture = None
            parts.callback(self._worker.close)
            if self._control is not None:
                parts.callback(self._control.close)
            if self._store_control is not None:
                parts.callback(self._store_control.close)
            parts.callback(self.wrapping.restore)

    def _destroy_group(self) -> None:
        group, self._own_group = self._own_group, None
        if group is not None and dist.is_initialized() and dist.group.WORLD is self._world:
            dist.destroy_process_group(group)

    def _collect(self) -> tuple[RankData, Settings]:
        """Return the window of this rank and the settings that it offers.

        A window that cannot be read counts as no data.
        """
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
        data = RankData(
            sections=sections,
            kernels=kernels,
            cuda_status=status,
            abstains_sections=self.registry.is_paused,
            has_failed=has_failed,
            dropped_records=dropped,
            settings_version=offered.version,
            settings=offered.encode(),
            step_time=self.tracker.take_step_time(),
            thresholds=self.settings.thresholds,
        )
        return data, offered

    def _apply(self, outcome: Outcome, offered: Settings) -> None:
        """Take over the settings that all ranks have agreed on."""
        agreed = self._agreed_settings(outcome, offered)
        if agreed == self.settings:
            return
        self.settings = agreed
        if self.pending.version <= agreed.version:
            self.pending = agreed
        self.registry.interval = agreed.profiling_interval
        self.tracker.time_interval = agreed.report_time_interval
        self.tracker.profiling_interval = agreed.profiling_interval
        self._update_switches()

    def _agreed_settings(self, outcome: Outcome, offered: Settings) -> Settings:
        """Return the settings after an exchange, equal on all ranks."""
        # Alone, or without a collective, there is nobody to agree with.
        if outcome.settings is None or self.generator.rank == 0:
            return offered
        return Settings.decode(outcome.settings)

    def _settle_interval(self) -> None:
        """Apply the interval of the last scheduled report; wait for that report if need be.

        A rank that has skipped the report must not go on with another interval than its peers, so
        this wait ends with the report or with the timeout of the process group, on all ranks.
        """
        correction, self._correction = self._correction, None
        interval = None
        if correction is not None:
            try:
                outcome = correction.exchange.result(_GROUP_TIMEOUT.total_seconds())
            except (ExchangeSkippedError, RuntimeError, MalformedNamesError) as error:
                logger.debug("straggler: the report interval stays as it is: %s", error)
            else:
                self._apply(outcome, correction.offered)
                agreed = self._agreed_settings(outcome, correction.offered)
                interval = agreed.iterations_between_reports(outcome.step_time)
        self.tracker.settle(interval)

    def _update_switches(self) -> None:
        rank = dist_utils.get_rank(self._options.process_group)
        self.registry.is_paused = self._is_paused_here or not self.settings.measures(rank)

    def _record(self, report: Report) -> None:
        """Write one event for each kind of GPU or section straggler, with ranks of the job."""
        if not self._events.enabled:
            return
        from nvidia_resiliency_ext.shared_utils.events import Straggler

        group = self._options.process_group
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
                names = {rank: dist_utils.get_global_rank(group, rank) for rank in ranks}
                shown = ranks[:_MOST_RANKS_IN_EVENT]
                rounded = {str(names[rank]): round(scores[rank], 4) for rank in shown}
                event = Straggler(ranks=format_ranks(names.values()), scores=rounded, reason=reason)
                only = names[ranks[0]] if len(ranks) == 1 else None
                self._events.record(event, cycle=_launch_cycle(), rank=only)

    def _submit(self, run: Callable[[], T]) -> Exchange[T]:
        """Start a collective of reports: in the worker thread, if there are peers to wait for."""
        if not self.generator.exchanges:
            exchange = Exchange(run)
            exchange.run()
            return exchange
        group = self._group()
        self.generator.group = group
        alone = dist_utils.get_world_size(group) == 1
        if alone or dist_utils.get_device_for_backend(group).type != "cpu":
            exchange = Exchange(run)
            exchange.run()
            return exchange
        return self._worker.submit(run)

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

    def _agree_on_interval(self, wanted: float) -> float:
        """Return the greatest interval that any rank wants; a collective.

        It cannot be skipped: a rank that went on with its own estimate would have other reports
        due than its peers.
        """

        def reduce() -> float:
            group = self.generator.group
            device = dist_utils.get_device_for_backend(group)
            tensor = torch.tensor([wanted], dtype=torch.float64, device=device)
            dist_utils.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group)
            return float(tensor.item())

        exchange = self._submit(reduce)
        try:
            try:
                return exchange.result(self._options.exchange_timeout)
            except ExchangeSkippedError as error:
                logger.warning("straggler: waiting for the first report interval: %s", error)
                return exchange.result(_GROUP_TIMEOUT.total_seconds())
        except (ExchangeSkippedError, RuntimeError):
            logger.exception("straggler: there will be no reports, ranks found no interval")
            return float(NEVER)

    def _open_control(self) -> None:
        """Offer `nvrx-straggler` a socket, on rank 0, once the rank is known."""
        if self._has_tried_control:
            return
        self._has_tried_control = True
        rank = dist_utils.get_rank(self._options.process_group)
        size = dist_utils.get_world_size(self._options.process_group)
        reaches_all = self.generator.exchanges or size == 1
        if not self._options.control or rank != 0 or not reaches_all:
            return
        try:
            self._control = ControlServer(self._answer)
        except OSError as error:
            logger.warning("straggler: nvrx-straggler cannot steer this job here: %s", error)
        self._open_store_control()

    def _open_store_control(self) -> None:
        """Take requests through the job's store, too, if there is a token to know them by."""
        token_file = os.environ.get(TOKEN_FILE_VARIABLE)
        host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", "")
        if not token_file or not host or not port.isdecimal() or int(port) >= 1 << 16:
            return
        try:
            token = TokenFile(token_file, TOKEN_FILE_VARIABLE)
        except ConfigError as error:
            logger.warning("straggler: no control through the job's store: %s", error)
            return
        self._store_control = StoreControlServer(host, int(port), token, self._answer)
        logger.info("straggler: nvrx-straggler --store %s:%s steers this job", host, port)

    def _answer(self, request: object) -> Status | Refused:
        """Answer a request of `nvrx-straggler`; the boundary of the thread that serves it."""
        try:
            if isinstance(request, Change):
                logger.info("straggler settings to come: %s", self.request(request.values))
            elif not isinstance(request, StatusRequest):
                return Refused(f"{type(request).__name__} is no request")
            return self._status()
        except (ConfigError, TypeError) as error:
            return Refused(str(error))
        except Exception as error:
            logger.exception("straggler control: a request has failed")
            return Refused(f"the job could not answer: {type(error).__name__}: {error}")

    def _status(self) -> Status:
        report = self.last_report
        return Status(
            job=os.environ.get("SLURM_JOB_ID") or os.environ.get("TORCHELASTIC_RUN_ID") or "",
            pid=os.getpid(),
            world_size=self.generator.world_size,
            settings=self.settings.to_dict(),
            pending=self.pending.to_dict(),
            cuda_profiling=self.cuda_status,
            summary="" if report is None else report.table(_WORST_RANKS_IN_STATUS),
        )


def _launch_cycle() -> int | None:
    """Return how often the launcher has started this job again, None without a launcher."""
    text = os.environ.get("NVRX_CYCLE") or os.environ.get("TORCHELASTIC_RESTART_COUNT") or ""
    return int(text) if text.isascii() and text.isdigit() else None
