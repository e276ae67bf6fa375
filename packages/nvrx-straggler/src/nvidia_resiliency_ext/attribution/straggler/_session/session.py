# SPDX-License-Identifier: Apache-2.0
"""One life of the detector, from `initialize` to `shutdown`: it joins the parts and owns them."""

from __future__ import annotations

import atexit
import logging
import math
import os
import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist

from nvidia_resiliency_ext.attribution.straggler import dist_utils
from nvidia_resiliency_ext.attribution.straggler._errors import (
    MalformedNamesError,
    NotInitializedError,
)
from nvidia_resiliency_ext.attribution.straggler._exchange.generator import (
    SCORES,
    Outcome,
    RankData,
    ReportGenerator,
)
from nvidia_resiliency_ext.attribution.straggler._exchange.peers import (
    Peers,
    name_members,
    reason_of,
)
from nvidia_resiliency_ext.attribution.straggler._exchange.worker import (
    Exchange,
    ExchangeSkippedError,
    ExchangeWorker,
    ReportsEndedError,
)
from nvidia_resiliency_ext.attribution.straggler._measure.kernel_capture import (
    MODES,
    open_capture,
    synchronize,
)
from nvidia_resiliency_ext.attribution.straggler._measure.sections import SectionRegistry
from nvidia_resiliency_ext.attribution.straggler._measure.wrapping import Wrapping
from nvidia_resiliency_ext.attribution.straggler._scores.report import Report
from nvidia_resiliency_ext.attribution.straggler._scores.scoring import ScoringOptions, is_number
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


_LONGEST_TIMEOUT_S = 86_400
_MOST_RANKS_IN_EVENT = 64
_WORST_RANKS_IN_STATUS = 8

logger = logging.getLogger("nvrx")

T = TypeVar("T")


@dataclass(frozen=True)
class SessionOptions:
    """Arguments of `Detector.initialize`; see there."""

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
        if not self.scores_to_compute:
            raise ConfigError(f"scores_to_compute=[]: give one of {', '.join(SCORES)}, or 'all'")
        for name in ("gather_on_rank0", "control"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name}={getattr(self, name)!r}: give True or False")
        if not isinstance(self.node_name, str):
            raise ConfigError(f"node_name={self.node_name!r}: must be text")
        if not isinstance(self.process_group, dist.ProcessGroup | None):
            raise ConfigError(
                f"process_group={self.process_group!r}: give a process group of which this rank is"
                " a member, or None for all ranks"
            )
        if self.cuda_profiling not in MODES:
            raise ConfigError(
                f"cuda_profiling={self.cuda_profiling!r}: give one of {', '.join(MODES)}"
            )
        timeout = self.exchange_timeout
        if not is_number(timeout) or not 0 < timeout <= _LONGEST_TIMEOUT_S:
            raise ConfigError(
                f"exchange_timeout={timeout!r}: must be more than 0 and at most"
                f" {_LONGEST_TIMEOUT_S} s"
            )

    @property
    def common(self) -> dict[str, str]:
        """Options that must be the same on all ranks, as text."""
        scoring = self.scoring
        return {
            "scores_to_compute": str(sorted(self.scores_to_compute)),
            "gather_on_rank0": str(self.gather_on_rank0),
            "profiling_interval": str(self.settings.profiling_interval),
            "report_time_interval": str(float(self.settings.report_time_interval)),
            "reference": str(scoring.quantile),
            "reference_scope": scoring.reference_scope,
            "peer_groups": str([sorted(group) for group in scoring.peer_groups or ()]),
        }


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
        # Now: a group that has been destroyed has no members.
        self._group_name = name_members(options.process_group)
        self._last_skip = ""
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
        self._pid = os.getpid()
        self._is_at_exit = False
        # Now, for a first report at exit: what is registered while a program ends is not called.
        atexit.register(self._end_at_exit)
        self._worker: ExchangeWorker | None = None
        self._world: object = None
        # A scheduled report, whose result corrects the interval, and what this rank has offered.
        self._correction: tuple[Exchange[Outcome], Settings] | None = None
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

    def report(self, *, is_scheduled: bool = False) -> Report | None:
        """Run one report with all ranks; None where this rank gets none, or it was skipped.

        Args:
            is_scheduled: It is due in this iteration, and also corrects the report interval.
        """
        if is_scheduled:
            self.tracker.expect_correction()
            self._correction = None
        self._open_control()
        data, offered = self._collect()
        exchange = self._submit(
            lambda exchange: self.generator.exchange(data, exchange.vote),
            is_collective=self.generator.exchanges,
        )
        if is_scheduled:
            self._correction = exchange, offered
        outcome = self._await(exchange)
        if outcome is None:
            return None
        self._apply(outcome, offered)
        if outcome.report is not None:
            self.last_report = outcome.report
            self._record(outcome.report)
        return outcome.report

    def _await(
        self,
        exchange: Exchange[T],
        *,
        can_withdraw: bool = False,
        skipped: str = "straggler report skipped",
    ) -> T | None:
        """Return the result of a collective, None without one; the log says why.

        Args:
            exchange: The collective.
            can_withdraw: Withdraw when the time is over, or wait on if other ranks rely on it.
            skipped: What it means to go on without the result.
        """
        try:
            try:
                result = exchange.result()
            except ExchangeSkippedError:
                if not can_withdraw or exchange.withdraw():
                    raise
                result = exchange.result(has_voted=True)
        except ExchangeSkippedError as error:
            # A rank that never comes is told of once, not at every report that waits for it.
            level = logging.DEBUG if str(error) == self._last_skip else logging.WARNING
            self._last_skip = str(error)
            logger.log(level, "%s: %s", skipped, error)
        except ReportsEndedError as error:  # what has ended them was said
            logger.debug("straggler report skipped: %s", error)
        except Exception as error:  # whatever fails, the training goes on
            is_known = isinstance(error, (RuntimeError, MalformedNamesError))
            logger.error(  # noqa: TRY400 - the text of a lost connection says it all
                "straggler reports end here: %s; call Detector.shutdown and Detector.initialize on"
                " all ranks to go on",
                reason_of(error),
                exc_info=None if is_known else error,
            )
        else:
            self._last_skip = ""
            return result
        return None

    def close(self) -> None:
        """Restore callables, release CUPTI, end threads; what fails does not stop the rest."""
        self.registry.is_paused = True
        atexit.unregister(self._end_at_exit)
        with ExitStack() as parts:  # closed in reverse order
            parts.callback(self._events.close)
            if self.capture is not None:
                # A process has one profiler: it must not wait for the garbage collector.
                parts.callback(self.capture.close)
                self.capture = self.registry.capture = None
            parts.callback(self._take_number)
            parts.callback(self._leave_world)
            if self._control is not None:
                parts.callback(self._control.close)
            if self._store_control is not None:
                parts.callback(self._store_control.close)
            parts.callback(self.wrapping.restore)

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

    def _apply(self, outcome: Outcome, offered: Settings) -> Settings:
        """Take over the settings after an exchange, equal on all ranks, and return them."""
        agreed = offered
        # Alone, or without a collective, there is nobody to agree with.
        if outcome.settings is not None and self.generator.rank != 0:
            agreed = Settings.decode(outcome.settings)
        # A report that is looked at late may be older than one whose settings are in force.
        if agreed.version > self.settings.version:
            self.settings = agreed
            if self.pending.version <= agreed.version:
                self.pending = agreed
            self.registry.interval = agreed.profiling_interval
            self.tracker.time_interval = agreed.report_time_interval
            self.tracker.profiling_interval = agreed.profiling_interval
            self._update_switches()
        return agreed

    def _settle_interval(self) -> None:
        """Apply the interval of the last scheduled report, or do without it on all ranks."""
        correction, self._correction = self._correction, None
        interval = None
        # Withdrawn here, it changes the interval on no rank; else all ranks have joined it.
        if correction is not None and not correction[0].withdraw():
            exchange, offered = correction
            outcome = self._await(exchange, can_withdraw=True)
            if outcome is not None:
                agreed = self._apply(outcome, offered)
                interval = agreed.iterations_between_reports(outcome.step_time)
            elif self._worker is not None:
                reason = "ranks no longer agree when a report is due"
                logger.error("straggler reports end here: %s", reason)
                self._worker.end(reason)
        self.tracker.settle(interval)

    def _update_switches(self) -> None:
        rank = dist_utils.get_rank(self._options.process_group)
        self.registry.is_paused = self._is_paused_here or not self.settings.measures(rank)

    def _record(self, report: Report) -> None:
        """Write one event for each kind of GPU or section straggler, with ranks of the job."""
        if not self._events.enabled:
            return
        from nvidia_resiliency_ext.shared_utils.events import Straggler

        found = report.identify_stragglers(**report.thresholds)
        relative, individual = report.gpu_relative_perf_scores, report.gpu_individual_perf_scores
        kinds = [
            ("gpu_relative", found["straggler_gpus_relative"], relative),
            ("gpu_individual", found["straggler_gpus_individual"], individual),
        ]
        for name, ids in found["straggler_sections_relative"].items():
            scores = report.section_relative_perf_scores[name]
            kinds.append((f"section_relative: {name}", ids, scores))
        for reason, ids, scores in kinds:
            if not ids:
                continue
            numbers = {
                item.rank: dist_utils.get_global_rank(self._options.process_group, item.rank)
                for item in sorted(ids, key=attrgetter("rank"))
            }
            shown = list(numbers)[:_MOST_RANKS_IN_EVENT]
            rounded = {str(numbers[rank]): round(scores[rank], 4) for rank in shown}
            event = Straggler(ranks=format_ranks(numbers.values()), scores=rounded, reason=reason)
            only = numbers[shown[0]] if len(ids) == 1 else None
            self._events.record(event, cycle=_launch_cycle(), rank=only)

    def _submit(self, run: Callable[[Exchange[T]], T], *, is_collective: bool) -> Exchange[T]:
        """Run a report, or start it in the worker thread, if there are peers to wait for."""
        given = self._options.process_group
        if not is_collective or dist_utils.get_world_size(given) == 1:
            self.generator.group = given
            exchange = Exchange(run, 0.0)
            exchange.run()
            return exchange
        if os.getpid() != self._pid:
            raise NotInitializedError(
                f"this process was forked from process {self._pid}, to which the detector belongs:"
                " report there, or call Detector.shutdown and Detector.initialize here"
            )
        is_first = self._worker is None
        worker = self._join_world()

        def run_with_peers(exchange: Exchange[T]) -> T:
            self.generator.group = worker.join_peers()
            return run(exchange)

        exchange = worker.submit(run_with_peers)
        if is_first:
            # Again, to be called before all threads are parked: then a report is refused at once.
            atexit.register(self._end_at_exit)
        return exchange

    def _join_world(self) -> ExchangeWorker:
        """Return the worker for collectives of the present ranks; a new world gets a new worker."""
        if self._worker is None or self._world is not dist.group.WORLD:
            self._leave_world()
            self._world = dist.group.WORLD
            options, name = self._options, self._group_name
            number, timeout_s = _number_in(self._world, name), options.exchange_timeout
            peers = Peers(options.process_group, name, number, options.common, timeout_s)
            self._worker = ExchangeWorker(peers, timeout_s)
        if self._is_at_exit:
            self._worker.park()
        return self._worker

    def _end_at_exit(self) -> None:
        self._is_at_exit = True
        if self._worker is not None:
            self._worker.park()

    def _leave_world(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None and worker.close():
            self.generator.group = self._options.process_group

    def _take_number(self) -> None:
        """Count this detector in a world in which it has not reported: other ranks may have."""
        if dist.is_available() and dist.is_initialized() and self._world is not dist.group.WORLD:
            _number_in(dist.group.WORLD, self._group_name)

    def _agree_on_interval(self, wanted: float) -> float:
        """Return the greatest interval that any rank wants; a collective.

        A rank that does not wait for it makes it infinity on all ranks: a rank that went on with
        its own estimate would have other reports due than its peers.
        """

        def reduce(exchange: Exchange[float]) -> float:
            group = self.generator.group
            device = dist_utils.get_device_for_backend(group)
            tensor = torch.tensor([wanted], dtype=torch.float64, device=device)
            dist_utils.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group)
            have_waited = dist_utils.is_all_true(exchange.vote(), group)
            return float(tensor.item()) if have_waited else math.inf

        exchange = self._submit(reduce, is_collective=True)
        later = (
            f"straggler report interval is agreed on {self.tracker.retry_iters} iterations later"
        )
        agreed = self._await(exchange, can_withdraw=True, skipped=later)
        if agreed is None:
            return math.inf if exchange.withdraw() else float(NEVER)
        return agreed

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
        except (OSError, RuntimeError) as error:
            logger.warning("straggler: nvrx-straggler cannot steer this job here: %s", error)
        self._open_store_control()

    def _open_store_control(self) -> None:
        """Take requests through the job's store, too, if there is a token to know them by."""
        token_file = os.environ.get(TOKEN_FILE_VARIABLE)
        host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", "")
        if not token_file or not host or not port.isdecimal() or int(port) >= 1 << 16:
            return
        first_rank = dist_utils.get_global_rank(self._options.process_group, 0)
        try:
            token = TokenFile(token_file, TOKEN_FILE_VARIABLE)
            self._store_control = StoreControlServer(
                host, int(port), token, self._answer, first_rank
            )
        except (ConfigError, RuntimeError) as error:  # there may be no thread to have
            logger.warning("straggler: no control through the job's store: %s", error)
            return
        which = f" --first-rank {first_rank}" if first_rank else ""
        place = f"{host}:{port}"
        logger.info("straggler: nvrx-straggler COMMAND --store %s%s steers this", place, which)

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
            job=_job_name(),
            pid=os.getpid(),
            world_size=self.generator.world_size,
            settings=self.settings.to_dict(),
            pending=self.pending.to_dict(),
            cuda_profiling=self.cuda_status,
            summary="" if report is None else report.table(_WORST_RANKS_IN_STATUS),
        )


def _job_name() -> str:
    """Return the scheduler's or launcher's name of this job, empty if it has none."""
    run_id = os.environ.get("TORCHELASTIC_RUN_ID", "")
    # torchrun calls a job without a name "none".
    return os.environ.get("SLURM_JOB_ID") or ("" if run_id == "none" else run_id)


def _launch_cycle() -> int | None:
    """Return how often the launcher has started this job again, None without a launcher."""
    text = os.environ.get("NVRX_CYCLE") or os.environ.get("TORCHELASTIC_RESTART_COUNT") or ""
    return int(text) if text.isascii() and text.isdigit() else None


def _number_in(world: object, name: str) -> int:
    """Return how many detectors a group of a world has had, the same on all its ranks."""
    counter = _detectors.setdefault(world, Counter())
    counter[name] += 1
    return counter[name] - 1


_detectors: weakref.WeakKeyDictionary[object, Counter[str]] = weakref.WeakKeyDictionary()
