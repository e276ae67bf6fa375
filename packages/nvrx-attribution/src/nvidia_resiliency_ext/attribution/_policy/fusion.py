# SPDX-License-Identifier: Apache-2.0
"""Bring the log's diagnosis and the traces' report together: who, what, how sure."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nvidia_resiliency_ext.attribution._logs.diagnosis import Diagnosis
    from nvidia_resiliency_ext.attribution._logs.nodes import NodeMap

__all__ = ["fuse"]

_TIMEOUTS = frozenset({"nccl.timeout", "unknown", "net.store_lost", "hang.no_output"})
_KILLED = frozenset({"unknown", "nccl.timeout", "net.store_lost"})


def fuse(log: Diagnosis, report: dict[str, Any] | None, nodes: NodeMap) -> Diagnosis:
    """Return the diagnosis, completed by the report of the traces.

    Agreement raises the confidence; a log that has only timeouts leaves rank and cause to the
    traces; a cause in the log stays, and the traces' ranks become suspects beside it.

    Args:
        log: From the log.
        report: `nvrx_fr_report.v1`, or None.
        nodes: Rank -> node.
    """
    if report is None or report.get("kind") == "none" or not report.get("guilty_ranks"):
        return log
    ranks = tuple(report["guilty_ranks"])
    kind = report["kind"]
    sure = max(
        (s["confidence"] for s in report.get("suspects", ()) if s["rank"] in ranks), default=0.5
    )
    hosts = {s["rank"]: s.get("host") for s in report.get("suspects", ())}
    if kind in {"mismatch", "desync"} and log.code in _TIMEOUTS | {"user.exception"}:
        return _moved(log, "user.collective_mismatch", ranks, sure, nodes, hosts)
    if log.code in _TIMEOUTS:
        code = "nccl.timeout" if log.code == "unknown" else log.code
        if kind == "missing" and log.code in _KILLED:
            code = "host.sigkill"
        return _moved(log, code, ranks, sure, nodes, hosts)
    if log.rank in ranks or set(log.suspects) & set(ranks):
        agreed = 1 - (1 - log.confidence) * (1 - sure)
        return replace(log, confidence=round(min(agreed, 0.99), 3))
    others = tuple(rank for rank in ranks if rank not in log.suspects)
    return replace(log, suspects=(*log.suspects, *others))


def _moved(
    log: Diagnosis,
    code: str,
    ranks: tuple[int, ...],
    sure: float,
    nodes: NodeMap,
    hosts: dict[int, str | None],
) -> Diagnosis:
    """Return the diagnosis with rank, node and code from the traces."""
    first = ranks[0]
    found = {rank: nodes.node_of(rank) or hosts.get(rank) for rank in ranks}
    names = tuple(sorted({node for node in found.values() if node is not None}))
    return replace(
        log,
        code=code,
        rank=first,
        node=found[first],
        suspects=ranks,
        suspect_nodes=names,
        confidence=round(sure, 3),
        is_mass=False,
    )
