# SPDX-License-Identifier: Apache-2.0
"""The analysis as text: the table that existing callers parse, and a summary for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nvidia_resiliency_ext.shared_utils.console import plain
from nvidia_resiliency_ext.shared_utils.rank_sets import format_ranks

if TYPE_CHECKING:
    from nvidia_resiliency_ext.attribution._traces.analysis import TraceAnalysis

__all__ = ["TABLE_HEADER", "format_summary", "format_table"]

TABLE_HEADER = "PGID | Process Group Desc | Op Type | Size | Dtype | Missing Ranks"

_KIND_TEXT = {
    "host": "their programs have not called the operation that the others wait in",
    "device": "their devices do not end an operation that they have enqueued",
    "missing": "they left no dump, and others wait for them",
    "mismatch": "they called another operation than their peers",
    "desync": "they left out an operation, or called one more, than their peers",
    "deadlock": "they wait for each other",
    "none": "no operation is pending, or none shows who holds it up",
}


def format_table(analysis: TraceAnalysis, *, include_device_lag: bool = False) -> str:
    """Return one row per group with ranks that hold it up.

    The last column has these ranks, separated by commas. Transfers between two ranks have no row.

    Args:
        analysis: Of the traces.
        include_device_lag: Name also ranks whose device alone is late.
    """
    named = analysis.guilty_ranks if include_device_lag else analysis.host_lag_ranks()
    guilty = set(named)
    rows: dict[tuple[str, tuple[int, ...]], str] = {}
    for point in analysis.graph.points:
        found = sorted(guilty & {*point.lagging, *point.here})
        if point.op.is_p2p or not found:
            continue
        op = point.op
        cells = (
            plain(point.group.name),
            plain(point.group.desc),
            plain(op.name),
            str([list(shape) for shape in op.sizes[0]]),
            plain(",".join(op.dtypes[0])),
            ",".join(map(str, found)),
        )
        rows.setdefault((point.group.name, point.group.members), " | ".join(cells))
    return "\n".join([TABLE_HEADER, *rows.values()])


def format_summary(analysis: TraceAnalysis) -> str:
    """Return a short text for people: who, what kind, at which operation, where in the program."""
    lines = [
        (
            f"{len(analysis.world.dumps)} dumps of {analysis.world.size} ranks;"
            f" missing: {format_ranks(analysis.world.missing) or 'none'}"
        ),
        f"kind: {analysis.kind}: {_KIND_TEXT[analysis.kind]}",
        f"guilty ranks: {format_ranks(analysis.guilty_ranks) or 'none'}",
    ]
    for suspect in analysis.to_dict()["suspects"][:16]:
        where = f"  rank {suspect['rank']} ({suspect['kind']}, {suspect['confidence']:.2f})"
        if suspect["op"]:
            where += f": {suspect['op']} {suspect['seq']} of {suspect['group']}"
        if suspect["peers_waiting"]:
            where += f"; waiting: {suspect['peers_waiting']}"
        lines.append(plain(where))
        if suspect["note"]:
            lines.append(plain(f"    {suspect['note']}"))
        lines += [plain(f"    at {frame}") for frame in suspect["frames_tail"]]
        lines += [plain(f"    a waiter is at {frame}") for frame in suspect["waiters_frames"][:1]]
    lines += [
        plain(f"  {finding.kind}: {finding.file} {finding.text}")
        for finding in analysis.findings[:16]
    ]
    return "\n".join(lines) + "\n"
