# SPDX-License-Identifier: Apache-2.0
"""Report slow GPUs during a Lightning training; optionally end the training because of them."""

from __future__ import annotations

import logging
import math
import statistics
import time
import warnings
from collections.abc import Mapping
from typing import Any

import torch

from ._framework import Callback, require

__all__ = ["StragglerDetectionCallback"]

_FIT = "fit"
_ASYNC_FINALIZE = "maybe_finalize_save_checkpoint"
_HEADINGS = {
    "relative": "GPU relative performance",
    "individual": "GPU individual performance",
}
_WARNINGS = {
    "straggler_gpus_relative": "Some GPUs have worse relative performance.",
    "straggler_gpus_individual": "Some GPUs performance dropped.",
}


class StragglerDetectionCallback(Callback):  # type: ignore[misc] # found at run time
    """Time the training step's GPU kernels, and report ranks that are slower than others.

    Rank 0 warns about stragglers, logs the best and worst ranks, and can log the scores as metrics
    `gpu_relative_perf/{min,median,max}` and `gpu_individual_perf/{min,median,max}`.

    Lightning calls the hooks with `trainer`, the running trainer, and `pl_module`, the module whose
    `log_dict` gets the scores; `stage`, `exception`, `args` and `kwargs` are the hook's further
    arguments.

    Args:
        report_time_interval: Seconds between two reports.
        calc_relative_gpu_perf: Compare each rank with the fastest one.
        calc_individual_gpu_perf: Compare each rank with its own best time.
        num_gpu_perf_scores_to_print: Number of the worst and of the best ranks to list; 0 lists
            none.
        gpu_relative_perf_threshold: A rank with a lower relative score (0 to 1) is a straggler;
            None is allowed only if that score is off.
        gpu_individual_perf_threshold: The same for the individual score.
        stop_if_detected: Save a last checkpoint and end all ranks with exit status 1 when there
            are stragglers.
        enable_ptl_logging: Log the scores as metrics.
        profiling_interval: Measure every n-th training step.
        logger_name: Name of the logger.
        num_gpu_perf_scores_to_log: Older name of `num_gpu_perf_scores_to_print`; warns.
        stop_after_n_reports: Number of reports in a row that must name stragglers before the
            training ends.

    Raises:
        ImportError: nvrx-straggler is not installed.
        ValueError: Neither score is enabled, or a number is out of range.

    Example:
        >>> from nvidia_resiliency_ext.ptl_resiliency import StragglerDetectionCallback
        >>> callback = StragglerDetectionCallback(
        ...     report_time_interval=300, calc_relative_gpu_perf=True,
        ...     calc_individual_gpu_perf=True, num_gpu_perf_scores_to_print=5,
        ...     gpu_relative_perf_threshold=0.7, gpu_individual_perf_threshold=0.7,
        ...     stop_if_detected=False,
        ... )
    """

    def __init__(  # noqa: PLR0913, PLR0917 - the signature is given
        self,
        report_time_interval: float,
        calc_relative_gpu_perf: bool,
        calc_individual_gpu_perf: bool,
        num_gpu_perf_scores_to_print: int | None = None,
        gpu_relative_perf_threshold: float | None = 0.7,
        gpu_individual_perf_threshold: float | None = 0.7,
        stop_if_detected: bool = False,
        enable_ptl_logging: bool = False,
        profiling_interval: int = 1,
        logger_name: str | None = "nemo_logger.StragglerDetectionCallback",
        *,
        num_gpu_perf_scores_to_log: int | None = None,
        stop_after_n_reports: int = 1,
    ) -> None:
        self._package = require("attribution.straggler", "straggler")
        super().__init__()
        if num_gpu_perf_scores_to_log is not None:
            warnings.warn(
                "num_gpu_perf_scores_to_log is now named num_gpu_perf_scores_to_print",
                stacklevel=2,
            )
            if num_gpu_perf_scores_to_print is None:
                num_gpu_perf_scores_to_print = num_gpu_perf_scores_to_log
        if num_gpu_perf_scores_to_print is None or num_gpu_perf_scores_to_print < 0:
            raise ValueError(
                "num_gpu_perf_scores_to_print must be 0 or more,"
                f" not {num_gpu_perf_scores_to_print!r}"
            )
        if not (calc_relative_gpu_perf or calc_individual_gpu_perf):
            raise ValueError(
                "set calc_relative_gpu_perf or calc_individual_gpu_perf: without either there is"
                " nothing to report"
            )
        # Rank 0 alone would find out in its first report, while the others wait for it.
        for kind, is_on, threshold in (
            ("relative", calc_relative_gpu_perf, gpu_relative_perf_threshold),
            ("individual", calc_individual_gpu_perf, gpu_individual_perf_threshold),
        ):
            if is_on and (threshold is None or not 0 <= threshold <= 1):
                raise ValueError(f"gpu_{kind}_perf_threshold={threshold}: must be 0 to 1")
        if stop_after_n_reports < 1:
            raise ValueError(f"stop_after_n_reports must be 1 or more, not {stop_after_n_reports}")
        self.report_time_interval = report_time_interval
        self.calc_relative_gpu_perf = calc_relative_gpu_perf
        self.calc_individual_gpu_perf = calc_individual_gpu_perf
        self.num_gpu_perf_scores_to_print = num_gpu_perf_scores_to_print
        self.gpu_relative_perf_threshold = gpu_relative_perf_threshold
        self.gpu_individual_perf_threshold = gpu_individual_perf_threshold
        self.stop_if_detected = stop_if_detected
        self.enable_ptl_logging = enable_ptl_logging
        self.profiling_interval = profiling_interval
        self.stop_after_n_reports = stop_after_n_reports
        self.logger = logging.getLogger(logger_name)
        self._reports_with_stragglers = 0
        self._is_active = False

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Start the detector and wrap the strategy's `training_step`."""
        if stage != _FIT or self._is_active:
            return
        wanted = {
            "relative_perf_scores": self.calc_relative_gpu_perf,
            "individual_perf_scores": self.calc_individual_gpu_perf,
        }
        detector = self._package.Detector
        detector.initialize(
            scores_to_compute=[name for name, is_wanted in wanted.items() if is_wanted],
            gather_on_rank0=True,
            profiling_interval=self.profiling_interval,
            report_time_interval=self.report_time_interval,
        )
        self._is_active, self._reports_with_stragglers = True, 0
        try:
            step = self._package.CallableId(trainer.strategy, "training_step")
            detector.wrap_callables(callable_ids=[step])
        except BaseException:
            self._end()
            raise

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Stop the detector; the strategy's methods are as before."""
        if stage == _FIT:
            self._end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Stop the detector: `teardown` does not run after an exception."""
        self._end()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any, **kwargs: Any) -> None:
        """Generate a report when one is due; all ranks take part.

        Raises:
            SystemExit: With status 1, on all ranks, when stragglers end the training.
        """
        detector = self._package.Detector
        began = time.monotonic()
        report = detector.generate_report_if_interval_elapsed()
        if not detector.is_interval_elapsed():
            return
        found = report is not None and self._handle(pl_module, report)
        if trainer.is_global_zero:
            self.logger.info(
                "Straggler report processing time: %.3f sec.", time.monotonic() - began
            )
        if not self.stop_if_detected:
            return
        self._reports_with_stragglers = self._reports_with_stragglers + 1 if found else 0
        is_over = self._reports_with_stragglers >= self.stop_after_n_reports
        if trainer.strategy.broadcast(is_over):
            self._stop(trainer)

    def _handle(self, pl_module: Any, report: Any) -> bool:
        """Log a report; return whether it names stragglers."""
        thresholds = {}
        if self.calc_relative_gpu_perf:
            thresholds["gpu_rel_threshold"] = self.gpu_relative_perf_threshold
        if self.calc_individual_gpu_perf:
            thresholds["gpu_indiv_threshold"] = self.gpu_individual_perf_threshold
        stragglers = report.identify_stragglers(**thresholds)
        found = False
        for key, text in _WARNINGS.items():
            if stragglers[key]:
                found = True
                self.logger.warning(
                    "STRAGGLER DETECTION WARNING: %s Affected ranks: %s", text, stragglers[key]
                )
        self._log_scores(pl_module, report, "relative", report.gpu_relative_perf_scores)
        self._log_scores(pl_module, report, "individual", report.gpu_individual_perf_scores)
        return found

    def _log_scores(
        self, pl_module: Any, report: Any, kind: str, scores: Mapping[int, float]
    ) -> None:
        if not scores:
            return
        if self.num_gpu_perf_scores_to_print:
            lines = score_lines(scores, report.rank_to_node, self.num_gpu_perf_scores_to_print)
            self.logger.info("%s", "\n".join([f"{_HEADINGS[kind]}:", *lines]))
        numbers = [score for score in scores.values() if not math.isnan(score)]
        if not (self.enable_ptl_logging and numbers):
            return
        metrics = {
            f"gpu_{kind}_perf/min": min(numbers),
            f"gpu_{kind}_perf/median": statistics.median(numbers),
            f"gpu_{kind}_perf/max": max(numbers),
        }
        try:
            pl_module.log_dict(metrics, logger=True, batch_size=1, rank_zero_only=True)
        except Exception:
            # The boundary to the loggers of the user: none of them may end the training.
            self.logger.exception("the scores were not logged as metrics")

    def _stop(self, trainer: Any) -> None:
        if trainer.is_global_zero:
            self.logger.error("Detected stragglers. Terminating training...")
        trainer.should_stop = True
        self._save_last(trainer)
        raise SystemExit(1)

    def _save_last(self, trainer: Any) -> None:
        """Save what the first checkpoint callback with a directory calls its last checkpoint."""
        from .local_checkpoint_callback import LocalCheckpointCallback

        for callback in trainer.checkpoint_callbacks:
            directory = getattr(callback, "dirpath", None)
            if directory is None or isinstance(callback, LocalCheckpointCallback):
                continue
            metrics = {
                **trainer.callback_metrics,
                "epoch": torch.tensor(trainer.current_epoch),
                "step": torch.tensor(trainer.global_step),
            }
            path = callback.format_checkpoint_name(metrics, callback.CHECKPOINT_NAME_LAST)
            trainer.save_checkpoint(path)
            finalize = getattr(trainer.strategy.checkpoint_io, _ASYNC_FINALIZE, None)
            if finalize is not None:
                finalize(blocking=True)
            return

    def _end(self) -> None:
        if self._is_active:
            self._is_active = False
            self._package.Detector.shutdown()


def score_lines(scores: Mapping[int, float], nodes: Mapping[int, str], limit: int) -> list[str]:
    """Return the lines that name the worst and the best ranks; NaN comes last and is never best.

    Args:
        scores: Score of each rank.
        nodes: Name of each rank's node.
        limit: How many worst and how many best ranks; all ranks in one list if there are at most
            twice as many.

    Example:
        >>> score_lines({0: 1.0, 1: 0.5}, {0: "a", 1: "b"}, limit=1)
        ['  Rank=1 Node=b Score=0.50', '  Rank=0 Node=a Score=1.00']
    """
    ranks = sorted(scores, key=lambda rank: (math.isnan(scores[rank]), scores[rank], rank))

    def line(rank: int) -> str:
        return f"  Rank={rank} Node={nodes.get(rank, '?')} Score={scores[rank]:.2f}"

    if len(ranks) <= 2 * limit:
        return [line(rank) for rank in ranks]
    known = [rank for rank in ranks if not math.isnan(scores[rank])]
    worst, best = known[:limit], known[::-1][:limit]
    return [
        f" Worst performing {len(worst)}/{len(ranks)} ranks:",
        *map(line, worst),
        f" Best performing {len(best)}/{len(ranks)} ranks:",
        *map(line, best),
    ]
