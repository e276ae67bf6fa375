# SPDX-License-Identifier: Apache-2.0
"""The nodes of a cycle, as other programs are told of them. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nvidia_resiliency_ext.fault_tolerance._cycleinfo.reporter import CycleInfoRoundSnapshot
    from nvidia_resiliency_ext.fault_tolerance._rendezvous.host import Member
    from nvidia_resiliency_ext.fault_tolerance._rendezvous.placement import Candidate, Placement

__all__ = ["CycleNodes", "nodes_of", "nodes_of_members"]


@dataclass(frozen=True, slots=True)
class CycleNodes:
    """The nodes of a cycle: those that work, each one's rank, and those that wait."""

    active: Sequence[str]
    ranks: Sequence[int]
    standby: Sequence[str] = ()

    def snapshot(self, cycle: int) -> CycleInfoRoundSnapshot:
        """Return what is reported of a cycle with these nodes."""
        from nvidia_resiliency_ext.fault_tolerance._cycleinfo.reporter import (
            CycleInfoRoundSnapshot,
        )

        return CycleInfoRoundSnapshot(cycle, self.active, self.standby, self.ranks)


def nodes_of(placement: Placement, hosts: Mapping[str, str]) -> CycleNodes:
    """Return the nodes of a closed round by their hosts' names."""
    return CycleNodes(
        active=[hosts.get(one.node, one.addr) for one in placement.active],
        ranks=[_rank(one, rank) for rank, one in enumerate(placement.active)],
        standby=[
            hosts.get(one.node, one.addr) for one in (*placement.standby, *placement.excluded)
        ],
    )


def nodes_of_members(members: Sequence[Member]) -> CycleNodes:
    """Return the nodes of a round that another host has closed; who waits is not known."""
    ranked = sorted(members, key=lambda member: member.candidate.previous_rank or 0)
    return CycleNodes(
        active=[member.host or member.candidate.addr for member in ranked],
        ranks=[_rank(member.candidate, rank) for rank, member in enumerate(ranked)],
    )


def _rank(node: Candidate, rank: int) -> int:
    return node.infra_rank if node.infra_rank >= 0 else rank
