# SPDX-License-Identifier: Apache-2.0
"""Words for a placement: who is where, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from nvidia_resiliency_ext.fault_tolerance._infra.nodelist import compact_nodes

if TYPE_CHECKING:
    from .placement import Candidate, Placement

__all__ = ["few", "summary", "why_excluded", "why_too_few_segments"]

_FEW: Final = 8


def few(texts: Sequence[str], *, separator: str = ", ") -> str:
    """Return the first texts in one, and how many more there are."""
    more = len(texts) - _FEW
    return separator.join(texts[:_FEW]) + (f" and {more} more" if more > 0 else "")


def summary(placement: Placement) -> str:
    """Return one line: who is active, who stands by, who is excluded and why.

    Example: `4 active: node[001-004]; 1 standby: node007; 1 excluded: node006 (group 3 has 1 of 2
    nodes)`.
    """
    parts = [
        _count(placement.active, "active"),
        _count(placement.standby, "standby"),
        _count(placement.excluded, "excluded"),
    ]
    why = placement.why_excluded
    return "; ".join(parts) + (f" ({why})" if why else "")


def why_excluded(
    excluded: Sequence[Candidate], group_size: int | None, unhealthy_groups: Collection[str]
) -> str:
    """Return what is wrong with each group of the nodes that are excluded."""
    reasons = []
    for group, size in Counter(candidate.group for candidate in excluded).items():
        if group is None:
            nodes = "node has" if size == 1 else "nodes have"
            reasons.append(f"{size} {nodes} no NVRX_REPLACEMENT_GROUP_ID")
        elif group in unhealthy_groups:
            reasons.append(f"group {group} is unhealthy")
        else:
            reasons.append(f"group {group} has {size} of {group_size} nodes")
    return few(reasons)


def why_too_few_segments(nodes_per_domain: Mapping[str, int], segment: int, min_nodes: int) -> str:
    """Return how many whole segments the domains give, and what each of them has."""
    whole = sum(nodes // segment for nodes in nodes_per_domain.values())
    domains = [f"{domain}: {nodes}" for domain, nodes in nodes_per_domain.items()]
    return (
        f"but they fill {whole} of {min_nodes // segment} segments of {segment}"
        f" (nodes per NVLink domain: {few(domains)})"
    )


def _count(candidates: Sequence[Candidate], what: str) -> str:
    nodes = compact_nodes(candidate.addr for candidate in candidates)
    return f"{len(candidates)} {what}" + (f": {nodes}" if nodes else "")
