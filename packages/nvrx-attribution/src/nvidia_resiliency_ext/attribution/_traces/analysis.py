# SPDX-License-Identifier: Apache-2.0
"""Decide which ranks are guilty, of what kind, and how sure that is; and the report about it."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from nvidia_resiliency_ext.attribution._traces.loading import (
    DEFAULT_PATTERN,
    FILE_LIMIT_BYTES,
    Finding,
    LoadedTraces,
    collector_paused,
    load_traces,
)
from nvidia_resiliency_ext.attribution._traces.mismatch import Mismatch, find_mismatch
from nvidia_resiliency_ext.attribution._traces.waits import LagKind, WaitGraph, WaitPoint
from nvidia_resiliency_ext.attribution._traces.world import World
from nvidia_resiliency_ext.shared_utils.rank_sets import format_ranks

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from nvidia_resiliency_ext.attribution._traces.dumps import Op

__all__ = ["TraceAnalysis", "TraceKind", "analyze_dumps", "analyze_traces", "hanging_ranks_text"]

TraceKind = Literal["host", "device", "missing", "mismatch", "desync", "deadlock", "none"]

_SCHEMA = "nvrx_fr_report.v1"
_CONFIDENCE: dict[str, float] = {
    "host": 0.9,
    "device": 0.85,
    "missing": 0.7,
    "mismatch": 0.95,
    "desync": 0.9,
    "deadlock": 0.75,
}
_TIE_CONFIDENCE = 0.4
_UNRESOLVED_CONFIDENCE = 0.2
_MOST_UNRESOLVED = 16
_WAITER_FRAMES = 3


@dataclass(frozen=True, slots=True)
class _Suspect:
    rank: int
    kind: str
    confidence: float
    point: WaitPoint | None = None
    note: str = ""


@dataclass(slots=True)
class TraceAnalysis:
    """Findings from the traces of a job.

    Attributes:
        world: The groups of all ranks.
        graph: Who waits for whom.
        kind: What holds the job up.
        guilty_ranks: Who does, sorted.
        suspects: The same with reasons, and others that are less sure.
        findings: About files and data.
        elapsed_s: Seconds that loading and analysis took.
    """

    world: World
    graph: WaitGraph
    kind: TraceKind = "none"
    guilty_ranks: list[int] = field(default_factory=list)
    suspects: list[_Suspect] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    elapsed_s: float = 0.0

    def host_lag_ranks(self) -> list[int]:
        """Return the guilty ranks without those whose device alone is late."""
        device = {suspect.rank for suspect in self.suspects if suspect.kind == "device"}
        return [rank for rank in self.guilty_ranks if rank not in device]

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON object `nvrx_fr_report.v1`."""
        return {
            "schema": _SCHEMA,
            "world_size": self.world.size,
            "ranks_seen": format_ranks(self.world.dumps),
            "ranks_missing": format_ranks(self.world.missing),
            "kind": self.kind,
            "guilty_ranks": list(self.guilty_ranks),
            "suspects": [self._suspect(suspect) for suspect in self.suspects],
            "groups": [_point(point) for point in self.graph.points if point.lagging],
            "findings": [finding.to_dict() for finding in self.findings],
            "elapsed_s": round(self.elapsed_s, 3),
        }

    def _suspect(self, suspect: _Suspect) -> dict[str, Any]:
        point = suspect.point
        op = None if point is None else point.op
        status = None if point is None else self.world.status(suspect.rank, point.group)
        dump = self.world.dumps.get(suspect.rank)
        own = dump.ops[-1] if dump is not None and dump.ops else None
        waiters = [] if point is None else point.here
        waiting_op = None
        if point is not None:
            waiting_op = next((w for rank in waiters if (w := self._entry(rank, point))), None)
        return {
            "rank": suspect.rank,
            "host": dump.host if dump is not None else None,
            "kind": suspect.kind,
            "confidence": suspect.confidence,
            "group": None if point is None else point.group.desc or point.group.name,
            "op": None if op is None else op.full_name,
            "seq": None if op is None else op.p2p_seq if op.is_p2p else op.seq,
            "last_completed": None if status is None else status.completed,
            "peers_waiting": format_ranks(rank for rank in waiters if rank != suspect.rank),
            "frames_tail": _frames(own),
            "waiters_frames": _frames(waiting_op),
            "note": suspect.note,
        }

    def _entry(self, rank: int, point: WaitPoint) -> Op | None:
        blocking = self.graph.blocking.get(rank)
        return blocking.op if blocking is not None and blocking.group is point.group else None


def analyze_traces(
    path: str | Sequence[str],
    pattern: str = DEFAULT_PATTERN,
    *,
    rank_regex: str | None = None,
    file_limit_bytes: int = FILE_LIMIT_BYTES,
    allowed_root: str | None = None,
) -> TraceAnalysis:
    """Read the dumps of a job and say which ranks hold it up.

    Args:
        path: Directory, prefix or single file; or several, such as one directory per node.
        pattern: Which files of a directory.
        rank_regex: Finds the rank in a file's name, as its first group.
        file_limit_bytes: Larger files are not read.
        allowed_root: What leads outside of this directory is not read; None: no limit.

    Raises:
        NoTraceError: There is no readable dump.
    """
    started_s = time.perf_counter()
    loaded = LoadedTraces()
    for each in [path] if isinstance(path, str) else path:
        part = load_traces(
            each,
            pattern,
            rank_regex=rank_regex,
            file_limit_bytes=file_limit_bytes,
            allowed_root=allowed_root,
        )
        loaded.dumps.update(part.dumps)
        loaded.findings += part.findings
    analysis = analyze_dumps(loaded)
    analysis.elapsed_s = time.perf_counter() - started_s
    return analysis


@collector_paused()
def analyze_dumps(loaded: LoadedTraces) -> TraceAnalysis:
    """Find the ranks that hold a job up, from dumps that were read; read nothing more."""
    world = World(loaded.dumps)
    graph = WaitGraph(world)
    analysis = TraceAnalysis(world, graph, findings=list(loaded.findings))
    if not graph.blocking:
        return analysis
    mismatch = find_mismatch(world)
    if mismatch is not None:
        _accuse_mismatch(analysis, mismatch)
    elif graph.sinks:
        _accuse_sinks(analysis)
    elif graph.skipped:
        analysis.kind = "desync"
        analysis.guilty_ranks = sorted(graph.skipped)
        for rank, point in sorted(graph.skipped.items()):
            note = "went on without an operation that ranks at the same place have called"
            confidence = _CONFIDENCE["desync"]
            analysis.suspects.append(_Suspect(rank, "desync", confidence, point, note))
    elif graph.unexplained:
        _accuse_cycle(analysis)
    else:
        _name_unresolved(analysis)
    analysis.suspects.sort(key=lambda suspect: (-suspect.confidence, suspect.rank))
    return analysis


def hanging_ranks_text(ranks: Iterable[int]) -> str:
    """Return the text form that callers parse: `hanging ranks: [1, 2]`."""
    return f"hanging ranks: {sorted(ranks)}"


def _accuse_mismatch(analysis: TraceAnalysis, mismatch: Mismatch) -> None:
    analysis.kind = mismatch.kind
    analysis.guilty_ranks = list(mismatch.ranks)
    point = next(
        (
            point
            for point in analysis.graph.points
            if point.group is mismatch.group and point.op.seq == mismatch.seq
        ),
        None,
    )
    confidence = _TIE_CONFIDENCE if mismatch.is_tie else _CONFIDENCE[mismatch.kind]
    for rank in mismatch.ranks:
        note = f"called {mismatch.found[rank]} where most called {mismatch.expected}"
        if mismatch.is_tie:
            note = f"called {mismatch.found.get(rank, mismatch.expected)}; no side has more ranks"
        analysis.suspects.append(_Suspect(rank, mismatch.kind, confidence, point, note))


def _accuse_sinks(analysis: TraceAnalysis) -> None:
    graph = analysis.graph
    # What a rank without a dump has reached is not known. It is guilty where only such ranks lag.
    sure_missing = {
        member
        for point in graph.points
        if not point.is_frozen and set(point.lagging.values()) == {"missing"}
        for member in point.lagging
    }
    points: dict[int, WaitPoint] = {}
    for point in graph.points:
        for member in (*point.lagging, *(point.here if point.is_frozen else ())):
            if member in graph.sinks:
                points.setdefault(member, point)
    guilty: dict[int, LagKind] = {}
    for rank, kind in graph.sinks.items():
        is_sure = kind != "missing" or rank in sure_missing
        if is_sure:
            guilty[rank] = kind
        confidence = _CONFIDENCE[kind] if is_sure else _UNRESOLVED_CONFIDENCE
        point_of_rank = points.get(rank) or graph.point_of(rank)
        analysis.suspects.append(_Suspect(rank, kind, confidence, point_of_rank))
    analysis.guilty_ranks = sorted(guilty)
    kinds = set(guilty.values())
    for kind in ("host", "device", "missing"):
        if kind in kinds:
            analysis.kind = kind
            break


def _accuse_cycle(analysis: TraceAnalysis) -> None:
    """Accuse the smaller side of ranks that wait for each other, else all of the circle."""
    graph = analysis.graph
    cycle = graph.cycle()
    analysis.kind = "deadlock"
    waiters: Counter[int] = Counter()
    points: dict[int, WaitPoint] = {}
    for rank in graph.unexplained:
        point = graph.point_of(rank)
        if point is not None:
            waiters[id(point)] += 1
            points[id(point)] = point
    (largest, most), *others = waiters.most_common()
    guilty = sorted(cycle)
    if not others or others[0][1] < most:
        minority = [rank for rank in points[largest].lagging if rank in graph.unexplained]
        if 0 < len(minority) < most:
            guilty = sorted(minority)
    analysis.guilty_ranks = guilty
    text = " -> ".join(str(rank) for rank in [*cycle, cycle[0]][:32])
    analysis.findings.append(Finding("cycle", "", f"ranks wait for each other: {text}"))
    for rank in guilty:
        suspect = _Suspect(rank, "deadlock", _CONFIDENCE["deadlock"], graph.point_of(rank))
        analysis.suspects.append(suspect)


def _name_unresolved(analysis: TraceAnalysis) -> None:
    """Report operations that all members reached and that do not end; nobody is accused."""
    for point in analysis.graph.unresolved:
        op = point.op
        text = f"all members have reached {op.full_name} {op.seq} of {point.group.name!r}"
        analysis.findings.append(Finding("all_reached", "", text))
        if len(point.here) <= _MOST_UNRESOLVED:
            analysis.suspects += [
                _Suspect(rank, "device", _UNRESOLVED_CONFIDENCE, point) for rank in point.here
            ]


def _point(point: WaitPoint) -> dict[str, Any]:
    kinds = sorted(set(point.lagging.values()))
    return {
        "group": point.group.name,
        "desc": point.group.desc,
        "members": format_ranks(point.group.members),
        "op": point.op.full_name,
        "seq": point.op.p2p_seq if point.op.is_p2p else point.op.seq,
        "waiting": format_ranks(point.here),
        "lagging": {
            kind: format_ranks(r for r, lag in point.lagging.items() if lag == kind)
            for kind in kinds
        },
    }


def _frames(op: Op | None) -> list[str]:
    if op is None:
        return []
    return [f"{name} ({file}:{line})" for name, file, line in op.frames[:_WAITER_FRAMES]]
