# SPDX-License-Identifier: Apache-2.0
"""`Detector`: times sections, callables and GPU kernels, and reports which ranks are slow."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ._errors import AlreadyInitializedError, NotInitializedError
from ._measure.sections import SKIPPED, CapturedEntry, CustomSection, SectionRegistry, TimedEntry
from ._measure.wrapping import CallableId
from ._scores.report import Report

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from torch.distributed import ProcessGroup

    from ._exchange.generator import ReportGenerator
    from ._session.session import Session
    from .cupti import CuptiManager
    from .interval_tracker import ReportIntervalTracker

__all__ = ["CallableId", "CustomSection", "Detector"]


class Detector:
    """Straggler detection of this process; all methods are class methods, there is no object.

    Example:
        >>> from nvidia_resiliency_ext.attribution.straggler import Detector
        >>> Detector.initialize(report_time_interval=60, cuda_profiling="off", control=False)
        >>> for _ in range(3):
        ...     with Detector.detection_section("step"):
        ...         pass
        >>> report = Detector.generate_report()
        >>> dict(report.section_relative_perf_scores["step"])
        {0: 1.0}
        >>> Detector.shutdown()

    Attributes:
        initialized: Whether `initialize` was called, and `shutdown` not yet.
        scores_to_compute: Names of the scores.
        gather_on_rank0: Whether rank 0 gets one report about all ranks.
        profiling_interval: Every n-th entry of a section is measured.
        report_time_interval: Seconds between reports.
        custom_sections: Sections by name.
        cupti_manager: Kernel timing, or None.
        reporter: Builds reports.
        report_interval_tracker: Knows when a report is due.
        original_callables: Callables that `wrap_callables` has replaced.
    """

    initialized: bool = False
    scores_to_compute: Sequence[str] = ()
    gather_on_rank0: bool = True
    profiling_interval: int = 1
    report_time_interval: float = 60.0
    custom_sections: Mapping[str, CustomSection] = {}
    cupti_manager: CuptiManager | None = None
    reporter: ReportGenerator | None = None
    report_interval_tracker: ReportIntervalTracker | None = None
    original_callables: Mapping[CallableId, Any] = {}

    _session: Session | None = None
    _registry: SectionRegistry | None = None
    _is_due = False

    def __init__(self) -> None:
        """Refuse: there is one detector per process.

        Raises:
            RuntimeError: Always.
        """
        raise RuntimeError("Detector is not instantiated; call its class methods")

    @classmethod
    def initialize(  # noqa: PLR0913 - given
        cls,
        scores_to_compute: Sequence[str] | str = "all",
        gather_on_rank0: bool = True,
        profiling_interval: int = 1,
        report_time_interval: float = 60,
        node_name: str | None = None,
        *,
        process_group: ProcessGroup | None = None,
        cuda_profiling: str = "auto",
        kernel_filter: Any = None,
        reference: str | float = "best",
        reference_scope: str = "all",
        peer_groups: Sequence[Sequence[int]] | None = None,
        min_samples: int = 1,
        best_decay: float = 0.0,
        exchange_timeout: float = 60.0,
        control: bool = True,
    ) -> None:
        """Start measuring. Not a collective; may be called before `init_process_group`.

        Args:
            scores_to_compute: `relative_perf_scores` (against other ranks),
                `individual_perf_scores` (against this rank's past), a list of them, or `all`.
            gather_on_rank0: Rank 0 gets one report about all ranks, others get None. Default True.
            profiling_interval: Measure entry n of a section if n is a multiple of this. Default 1.
            report_time_interval: Seconds between reports of `generate_report_if_interval_elapsed`.
                Default 60.
            node_name: Name of this node in reports; default: the host name.
            process_group: Ranks that report together; default: all ranks. Reports use this group if
                it takes CPU tensors, else a gloo group of the detector's own.
            cuda_profiling: `auto` times GPU kernels if possible, `require` raises an error if it is
                not possible, `off` does not time them. Default `auto`.
            kernel_filter: Function of a kernel's name that returns whether to compare the kernel;
                default: all except communication kernels.
            reference: Compare with the `best` rank, the `median`, or a quantile from 0 (best) to 1.
                Default `best`.
            reference_scope: `all`: compare only kernels and sections that all ranks have;
                `present`: compare each among the ranks that have it. Default `all`.
            peer_groups: Sets of ranks that are compared only among themselves. Default: all are
                compared.
            min_samples: Kernels and sections with fewer samples in a window are not compared.
                Default 1.
            best_decay: Fraction by which the individual best time is raised before each report.
                Default 0.
            exchange_timeout: Seconds after which a report that waits for other ranks is skipped, at
                most a day. The missing ranks are then looked up, for at most 3 s. Default 60.
            control: Let `nvrx-straggler` control the job through a socket of rank 0. Default True.

        Raises:
            AlreadyInitializedError: Already initialised (an `AssertionError` and a `RuntimeError`).
            ConfigError: An argument is wrong; the message names it (a `ValueError`).
            CuptiUnavailableError: Kernels cannot be timed, and `cuda_profiling="require"`.
        """
        if cls.initialized:
            raise AlreadyInitializedError(
                "Detector.initialize was called twice; call Detector.shutdown first"
            )
        # Loaded here: a program that only imports the package does not pay for them.
        from ._exchange.generator import parse_scores
        from ._scores.scoring import ScoringOptions
        from ._session.session import Session, SessionOptions
        from ._session.settings import Settings

        scores = parse_scores(scores_to_compute)
        options = SessionOptions(
            scores_to_compute=scores,
            gather_on_rank0=gather_on_rank0,
            node_name=_host_name() if node_name is None else node_name,
            settings=Settings(
                profiling_interval=profiling_interval, report_time_interval=report_time_interval
            ),
            process_group=process_group,
            cuda_profiling=cuda_profiling,
            scoring=ScoringOptions(
                reference=reference,
                reference_scope=reference_scope,
                peer_groups=peer_groups,
                min_samples=min_samples,
                best_decay=best_decay,
                kernel_filter=kernel_filter,
            ),
            exchange_timeout=exchange_timeout,
            control=control,
        )
        session = Session(options)
        cls.scores_to_compute = scores
        cls.gather_on_rank0 = gather_on_rank0
        cls.profiling_interval = profiling_interval
        cls.report_time_interval = report_time_interval
        cls.custom_sections = session.registry.sections
        cls.cupti_manager = session.capture.manager if session.capture else None
        cls.reporter = session.generator
        cls.report_interval_tracker = session.tracker
        cls.original_callables = session.wrapping.originals
        cls._session, cls._registry = session, session.registry
        cls._is_due = False
        cls.initialized = True

    @classmethod
    def shutdown(cls) -> None:
        """Stop measuring and restore wrapped callables; does nothing if not initialised."""
        session, cls._session, cls._registry = cls._session, None, None
        cls.initialized = False
        cls._is_due = False
        cls.cupti_manager = cls.reporter = cls.report_interval_tracker = None
        cls.custom_sections = {}
        cls.original_callables = {}
        if session is not None:
            session.close()

    @classmethod
    def detection_section(
        cls, name: str | None = None, profile_cuda: bool = True
    ) -> AbstractContextManager[None]:
        """Return a context manager that times its body, and the kernels launched in it.

        Args:
            name: The section; default: the source line of the call, `file:line`.
            profile_cuda: Also time GPU kernels, if possible. Default True.

        Raises:
            NotInitializedError: `initialize` was not called (a `RuntimeError`).
        """
        registry = cls._registry
        if registry is None:
            raise _not_initialized("detection_section")
        if registry.is_paused:
            return SKIPPED
        if name is None:
            section = registry.at_frame(sys._getframe(1))  # noqa: SLF001 - the caller's place
        else:
            found = registry.sections.get(name)
            if found is None:
                found = registry.named_at_frame(name, sys._getframe(1))  # noqa: SLF001
            section = found
        count = section.total_entry_cnt
        section.total_entry_cnt = count + 1
        if count % registry.interval:
            return SKIPPED
        # The place is looked at ever more rarely: it costs as much as the measurement.
        if name is not None and not count & (count - 1):
            section.warn_of_place(sys._getframe(1))  # noqa: SLF001
        capture = registry.capture
        if profile_cuda and capture is not None:
            return CapturedEntry(section.cpu_elapsed_times.append, capture)
        return TimedEntry(section.cpu_elapsed_times.append)

    @classmethod
    def wrap_callables(cls, callable_ids: Sequence[CallableId], profile_cuda: bool = True) -> None:
        """Time every call of these callables as a section named `str(callable_id)`.

        Args:
            callable_ids: Attributes of objects, classes or modules; already wrapped ones do not
                change. If one cannot be wrapped, none is.
            profile_cuda: Also time GPU kernels, if possible. Default True.

        Raises:
            NotInitializedError: `initialize` was not called.
            AttributeError: An attribute does not exist or cannot be set.
            TypeError: An attribute is not callable.
        """
        session = cls._require("wrap_callables")
        session.wrapping.wrap(callable_ids, session.registry, profile_cuda=profile_cuda)

    @classmethod
    def restore_original_callables(cls) -> None:
        """Restore the callables that `wrap_callables` has replaced."""
        if cls._session is not None:
            cls._session.wrapping.restore()

    @classmethod
    def generate_report(cls) -> Report | None:
        """Report the window since the last report, and start a new window.

        A collective of all ranks if relative scores are computed or reports are gathered.

        Returns:
            The report; None on other ranks than 0 if gathered, and when other ranks have not
            joined within `exchange_timeout`.

        Raises:
            NotInitializedError: `initialize` was not called.
        """
        return cls._require("generate_report").report()

    @classmethod
    def generate_report_if_interval_elapsed(cls) -> Report | None:
        """Count an iteration and report when `report_time_interval` has passed.

        Call it once per iteration on every rank.

        Returns:
            As `generate_report`; None when no report is due.

        Raises:
            NotInitializedError: `initialize` was not called.
        """
        session = cls._require("generate_report_if_interval_elapsed")
        cls._is_due = session.count_iteration()
        return session.report(is_scheduled=True) if cls._is_due else None

    @classmethod
    def is_interval_elapsed(cls) -> bool:
        """Tell whether the last `generate_report_if_interval_elapsed` was due, on all ranks alike.

        Raises:
            NotInitializedError: `initialize` was not called.
        """
        cls._require("is_interval_elapsed")
        return cls._is_due

    @classmethod
    def pause(cls) -> None:
        """Stop measuring on this rank; reports continue and compare the other ranks without it.

        Raises:
            NotInitializedError: `initialize` was not called.
        """
        cls._require("pause").pause(True)

    @classmethod
    def resume(cls) -> None:
        """Measure again on this rank.

        Raises:
            NotInitializedError: `initialize` was not called.
        """
        cls._require("resume").pause(False)

    @classmethod
    def request_settings(cls, **changes: Any) -> None:
        """Change settings of the running job; all ranks apply them at the next report.

        Call it on rank 0; on other ranks it is an error.

        Args:
            **changes: `enabled`, `profiling_interval`, `report_time_interval`, `ranks` (such as
                `0-3,8`, or `all`), `gpu_rel_threshold`, `section_rel_threshold`,
                `gpu_indiv_threshold`, `section_indiv_threshold`.

        Raises:
            NotInitializedError: `initialize` was not called.
            ConfigError: A name or value is wrong (a `ValueError`).
            RuntimeError: This is not rank 0 of the ranks that report together.
        """
        cls._require("request_settings").request(changes)

    @classmethod
    def _require(cls, what: str) -> Session:
        if cls._session is None:
            raise _not_initialized(what)
        return cls._session


def _not_initialized(what: str) -> NotInitializedError:
    return NotInitializedError(f"Detector.{what}: call Detector.initialize first")


def _host_name() -> str:
    import socket

    return socket.gethostname()
