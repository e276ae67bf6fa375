# SPDX-License-Identifier: Apache-2.0
"""The deterministic engine: a log, and traces if there are some, in; a verdict out.

It needs no network, no key and no model. The same bytes, rules and history give the same verdict.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, BinaryIO

from nvidia_resiliency_ext.attribution._core.errors import NoTraceError, UnreadableInputError
from nvidia_resiliency_ext.attribution._core.files import open_confined
from nvidia_resiliency_ext.attribution._core.verdict import (
    FirstFault,
    ReportedEvent,
    RetryState,
    Verdict,
    VerdictProgress,
)
from nvidia_resiliency_ext.attribution._logs.diagnosis import Diagnosis, diagnose, role_of
from nvidia_resiliency_ext.attribution._logs.dialects import without_launcher
from nvidia_resiliency_ext.attribution._logs.events import GUESSED, Event, ScanResult
from nvidia_resiliency_ext.attribution._logs.registry import Registry, load_registry
from nvidia_resiliency_ext.attribution._logs.scanner import Scanner
from nvidia_resiliency_ext.attribution._policy.decision import RetryPolicy, decide
from nvidia_resiliency_ext.attribution._policy.fusion import fuse
from nvidia_resiliency_ext.attribution._policy.history import (
    Attempt,
    count_repeats,
    keep_verdict,
    load_history,
)
from nvidia_resiliency_ext.shared_utils.clock import Deadline
from nvidia_resiliency_ext.shared_utils.rank_sets import format_ranks
from nvidia_resiliency_ext.shared_utils.redaction import redact

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = [
    "FirstFault",
    "LogScanner",
    "Registry",
    "RetryPolicy",
    "Verdict",
    "analyze",
    "fr_report_of",
    "load_registry",
    "read_log",
]

_CHUNK_BYTES = 1 << 20
_MOST_REPORTED = 50
_SAMPLE = 200
_HANG_INTERVALS = 10
_UNKNOWN_CONFIDENCE = 0.3
_SURE_GUESS = 0.4
_GUESSED_TEXT = "no rule matches the line; the code is guessed from its words; "
_DATA_POSITION = "data_position"
_RANK_MAP_BYTES = 64 << 20

History = str | os.PathLike[str] | Sequence[Mapping[str, Any]] | None
RankMap = Mapping[Any, str] | str | os.PathLike[str] | None


class LogScanner:
    r"""Scan a log that grows; a verdict can be taken at any time.

    Args:
        rank_map: Rank -> node, as a mapping or a JSON file; default: as the log says.
        history: Earlier attempts: a JSON-lines or SQLite file, verdicts as JSON objects, or None.
        job_id: The job; None: not known.
        cycle_id: Which run of its workers; None: not known.
        attempt_index: How often the scheduler had requeued the job: its cycles begin anew then.
            Default 0.
        registry: The rules; default: the bundled ones.
        policy: What a site may set; default: `RetryPolicy()`.
        fr_report: Report of the flight recorder, `nvrx_fr_report.v1`, or None.

    Raises:
        UnreadableInputError: The rank map or the history cannot be read.

    Example:
        >>> scanner = LogScanner()
        >>> scanner.feed(b"[rank3]: torch.cuda.OutOfMemoryError: CUDA out of memory.\n")
        >>> scanner.finish().reason_code
        'gpu.oom'
    """

    def __init__(  # noqa: PLR0913 - the public signature
        self,
        *,
        rank_map: RankMap = None,
        history: History = None,
        job_id: str | None = None,
        cycle_id: int | None = None,
        attempt_index: int = 0,
        registry: Registry | None = None,
        policy: RetryPolicy | None = None,
        fr_report: dict[str, Any] | None = None,
    ) -> None:
        self._registry = registry or load_registry()
        self._policy = policy or RetryPolicy()
        self._scanner = Scanner(self._registry)
        self._scanner.result.node_map.given = _rank_map(rank_map)
        self._job_id = job_id
        self._cycle_id = cycle_id
        self._attempt_index = attempt_index
        self.set_history(history)
        self._started_s = time.perf_counter()
        self.fr_report = fr_report

    def feed(self, data: bytes) -> None:
        """Scan more bytes of the log.

        Args:
            data: The next bytes; they may end in the middle of a line.
        """
        self._scanner.feed(data)

    def set_history(self, history: History) -> None:
        """Replace the earlier attempts: those that ended while this log was growing count, too.

        Raises:
            UnreadableInputError: The history cannot be read.
        """
        self._earlier = load_history(history, self._job_id, self._cycle_id, self._attempt_index)

    def snapshot(self) -> Verdict:
        """Return the verdict on the lines so far; cheap, whatever the size of the log."""
        return self._verdict()

    def finish(self) -> Verdict:
        """Look at a last line without an end, too, and return the verdict."""
        self._scanner.finish()
        return self._verdict(self._scanner.guessed)

    def skip(self, size: int, lines: int) -> None:
        """Count bytes and lines before the attempt's own part of its log, without reading them.

        Args:
            size: Bytes before the first ones that are fed.
            lines: Lines in them.
        """
        self._scanner.result.bytes, self._scanner.result.lines = size, lines
        self._scanner.result.first_line = lines + 1

    @property
    def lines(self) -> int:
        """How many lines were read or skipped."""
        return self._scanner.result.lines

    def mark_truncated(self) -> None:
        """Record that not all of the log was read."""
        self._scanner.result.truncated = True

    def _verdict(self, guess: Callable[[], Event | None] | None = None) -> Verdict:
        scan = self._scanner.result
        if scan.bytes == 0 and self.fr_report is None:
            return self._empty(scan)
        log = diagnose(scan, self._registry, guess)
        if log.code == "unknown" and _is_silent(scan):
            log.code, log.confidence = "hang.no_output", 0.4
        found = fuse(log, self.fr_report, scan.node_map)
        code = self._registry.code(found.code)
        is_guessed = found.fault is not None and found.fault.rule.id == GUESSED
        if is_guessed and found.confidence < _SURE_GUESS:
            # It names what failed, but ends no job and accuses no node the first time.
            code = replace(code, action="RESTART", stop_first=False, exclude=False)
        progress = scan.progress
        now = Attempt(
            *(self._job_id, self._cycle_id, found.fingerprint, found.entity, found.rank),
            *(found.node, _or_minus(progress.last_step), _or_minus(progress.last_checkpoint)),
        )
        had_steps = found.fault.steps_before if found.fault else progress.last_step is not None
        decision = decide(
            found,
            code,
            count_repeats(now, self._earlier),
            self._policy,
            had_steps=had_steps,
        )
        confidence = found.confidence
        if found.code == "unknown":
            confidence = min(confidence, _UNKNOWN_CONFIDENCE)
        return Verdict(
            action=decision.action,
            reason_code=found.code,
            domain=code.domain,
            confidence=confidence,
            retry=decision.retry,
            first_fault=_first_fault(found),
            suspect_ranks=found.suspects,
            suspect_nodes=found.suspect_nodes,
            exclude_nodes=decision.exclude_nodes,
            entity=_entity(found),
            phase=found.fault.phase if found.fault is not None else progress.phase,
            progress=VerdictProgress(
                progress.first_step, progress.last_step, progress.last_checkpoint
            ),
            events=_reported(scan, found),
            fr=self.fr_report,
            evidence=_evidence(found),
            fingerprint=found.fingerprint,
            registry_version=self._registry.version,
            coverage=_coverage(scan),
            elapsed_s=time.perf_counter() - self._started_s,
            job_id=self._job_id,
            cycle_id=self._cycle_id,
            explanation=_GUESSED_TEXT * is_guessed + decision.explanation,
        )

    def _empty(self, scan: ScanResult) -> Verdict:
        return Verdict(
            *("UNKNOWN", "unknown", "unknown", 0.0),
            retry=RetryState(),
            registry_version=self._registry.version,
            coverage=_coverage(scan),
            job_id=self._job_id,
            cycle_id=self._cycle_id,
            explanation="the log is empty",
        )


def analyze(  # noqa: PLR0913 - the public signature
    log: str | os.PathLike[str] | BinaryIO | Sequence[str | os.PathLike[str]],
    *,
    fr_path: str | None = None,
    rank_map: RankMap = None,
    history: History = None,
    job_id: str | None = None,
    cycle_id: int | None = None,
    attempt_index: int = 0,
    registry: Registry | None = None,
    policy: RetryPolicy | None = None,
    max_bytes: int | None = None,
    deadline_s: float | None = None,
    allowed_root: str | None = None,
) -> Verdict:
    """Say what failed, where, and whether a restart helps.

    Args:
        log: A file, several files in their order, or an open binary file.
        fr_path: Directory or prefix of flight-recorder dumps, or None. Dumps that cannot be read
            leave the verdict to the log.
        rank_map: Rank -> node, as a mapping or a JSON file; default: as the log says.
        history: Earlier attempts. A file is read, and this attempt added when `job_id` is given; a
            file that cannot be written costs a warning, not the verdict.
        job_id: The job; None: not known.
        cycle_id: Which run of its workers; None: not known.
        attempt_index: How often the scheduler had requeued the job: its cycles begin anew then.
            Default 0.
        registry: The rules; default: the bundled ones.
        policy: What a site may set; default: `RetryPolicy()`.
        max_bytes: Read no more than this; the verdict says so. Default: no limit.
        deadline_s: Seconds to read for; the verdict is then about what was read. Default: no limit.
        allowed_root: Logs and dumps that lead outside of this directory are not read; None: no
            limit.

    Raises:
        UnreadableInputError: A log, the rank map or the history cannot be read.
    """
    scanner = LogScanner(
        rank_map=rank_map,
        history=history,
        job_id=job_id,
        cycle_id=cycle_id,
        attempt_index=attempt_index,
        registry=registry,
        policy=policy,
        fr_report=fr_report_of(fr_path, allowed_root),
    )
    read_log(scanner, log, max_bytes=max_bytes, deadline_s=deadline_s, allowed_root=allowed_root)
    verdict = scanner.finish()
    if job_id is not None and isinstance(history, str | os.PathLike):
        keep_verdict(os.fspath(history), verdict, attempt_index)
    return verdict


def read_log(
    scanner: LogScanner,
    log: str | os.PathLike[str] | BinaryIO | Sequence[str | os.PathLike[str]],
    *,
    max_bytes: int | None = None,
    deadline_s: float | None = None,
    allowed_root: str | None = None,
    skips_launcher: bool = False,
) -> None:
    """Feed a log to a scanner.

    Args:
        scanner: What is told that the log is truncated where a limit ends it.
        log: As for `analyze`.
        max_bytes: Read no more of it; None: no limit.
        deadline_s: Seconds after which no more is read; None: no limit.
        allowed_root: Directory below which each path must lie, also when it is opened. None: no
            limit.
        skips_launcher: Leave out lines of the launcher. Default False.

    Raises:
        UnreadableInputError: A file cannot be read.
    """
    deadline = Deadline.after(deadline_s)
    left = max_bytes
    chunks = _chunks(log, allowed_root)
    for data in without_launcher(chunks) if skips_launcher else chunks:
        if deadline.expired() or (left is not None and left <= 0):
            scanner.mark_truncated()
            break
        scanner.feed(data if left is None else data[:left])
        if left is not None:
            left -= len(data)
            if left < 0:
                scanner.mark_truncated()


def _chunks(log: Any, allowed_root: str | None) -> Iterator[bytes]:
    if hasattr(log, "read"):
        while data := log.read(_CHUNK_BYTES):
            yield data
        return
    paths = [log] if isinstance(log, str | os.PathLike) else list(log)
    for path in paths:
        name = os.fspath(path)
        try:
            opened = name if allowed_root is None else open_confined(name, allowed_root)
            with open(opened, "rb", buffering=0) as file:
                while data := file.read(_CHUNK_BYTES):
                    yield data
        except OSError as error:
            raise UnreadableInputError(name, error.strerror or str(error)) from None


def fr_report_of(
    path: str | Sequence[str] | None, allowed_root: str | None = None, pattern: str | None = None
) -> dict[str, Any] | None:
    """Return the report of the dumps at a path; None without a path or a readable dump.

    Args:
        path: Directory, prefix or single file; or several.
        allowed_root: What leads outside of this directory is not read; None: no limit.
        pattern: Which files of a directory; None: `_dump_*`.
    """
    if not path:
        return None
    from nvidia_resiliency_ext.attribution._traces.analysis import analyze_traces
    from nvidia_resiliency_ext.attribution._traces.loading import DEFAULT_PATTERN

    paths = [path] if isinstance(path, str | os.PathLike) else path
    names = [os.fspath(each) for each in paths]
    try:
        report = analyze_traces(names, pattern or DEFAULT_PATTERN, allowed_root=allowed_root)
        return report.to_dict()
    except NoTraceError:
        return None


def _rank_map(value: RankMap) -> dict[int, str]:
    if value is None:
        return {}
    if isinstance(value, str | os.PathLike):
        name = os.fspath(value)
        try:
            with open(name, "rb") as file:
                value = json.loads(file.read(_RANK_MAP_BYTES))
        except (OSError, ValueError) as error:
            raise UnreadableInputError(name, f"not a rank map: {error}") from None
    try:
        return {int(rank): str(node) for rank, node in value.items()}  # type: ignore[union-attr]
    except (AttributeError, TypeError, ValueError):
        raise UnreadableInputError("rank_map", 'not an object {"<rank>": "<node>"}') from None


def _first_fault(found: Diagnosis) -> FirstFault | None:
    fault = found.fault
    if fault is None:
        return None
    first = fault.first
    return FirstFault(
        *(first.line, first.byte, _iso(first.time_s), found.rank, first.local_rank),
        *(found.node, first.gpu, redact(first.text)[0]),
    )


def _reported(scan: ScanResult, found: Diagnosis) -> tuple[ReportedEvent, ...]:
    def weight(event: Event) -> tuple[bool, bool, int]:
        return (event is not found.fault, event.role not in {"root", "either"}, event.first.line)

    return tuple(
        ReportedEvent(
            *(event.code, role_of(event, found), event.count, event.first.line),
            *(format_ranks(event.ranks), redact(event.first.text[:_SAMPLE])[0]),
        )
        for event in sorted(scan.events, key=weight)[:_MOST_REPORTED]
    )


def _entity(found: Diagnosis) -> dict[str, str] | None:
    if found.fault is None or not found.entity:
        return None
    is_position = found.fault.rule.entity == _DATA_POSITION
    return {"kind": _DATA_POSITION if is_position else "artifact", "id": found.entity}


def _evidence(found: Diagnosis) -> tuple[dict[str, Any], ...]:
    if found.fault is None:
        return ()
    return tuple({"line": line, "quote": redact(text)[0]} for line, text in found.fault.evidence)


def _coverage(scan: ScanResult) -> dict[str, Any]:
    truncated = scan.truncated or scan.dropped_events > 0
    return {"bytes": scan.bytes, "lines": scan.lines, "truncated": truncated}


def _is_silent(scan: ScanResult) -> bool:
    """Return whether lines came long after the last step, measured by the steps before."""
    progress = scan.progress
    times = (progress.first_step_time_s, progress.last_step_time_s, scan.last_time_s)
    if None in times or progress.last_step is None or progress.first_step is None:
        return False
    first, last, end = (float(value or 0.0) for value in times)
    steps = max(1, progress.last_step - progress.first_step)
    interval = (last - first) / steps
    return interval > 0 and end - last > _HANG_INTERVALS * interval


def _iso(time_s: float | None) -> str | None:
    if time_s is None:
        return None
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(time_s))
    return f"{whole}.{int(time_s * 1000) % 1000:03d}Z"


def _or_minus(value: int | None) -> int:
    return -1 if value is None else value
