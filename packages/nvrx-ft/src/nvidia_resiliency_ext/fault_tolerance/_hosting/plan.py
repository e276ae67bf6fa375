# SPDX-License-Identifier: Apache-2.0
"""What the host of a job runs, the token of its log servers, and the nodes of a cycle.

The host says in the store what holds, so that no node sends lines to a server that is not there.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from nvidia_resiliency_ext.fault_tolerance import _env
from nvidia_resiliency_ext.fault_tolerance._attribution.settings import AttributionConfig
from nvidia_resiliency_ext.fault_tolerance._plan.log_plan import LogPlan
from nvidia_resiliency_ext.shared_utils.os_utils import atomic_write

if TYPE_CHECKING:
    from nvidia_resiliency_ext.fault_tolerance._plan.plan import LaunchPlan
    from nvidia_resiliency_ext.fault_tolerance._rendezvous.host import Member
    from nvidia_resiliency_ext.fault_tolerance._rendezvous.placement import Candidate, Placement
    from nvidia_resiliency_ext.fault_tolerance._report.cycle_reporter import CycleInfoRoundSnapshot

__all__ = [
    "IN_A_FILE",
    "NO_SERVER",
    "CycleNodes",
    "HostPlan",
    "TokenFile",
    "host_plan_of",
    "make_token",
    "nodes_of",
    "nodes_of_members",
    "token_file",
    "write_token",
]


# Said in place of a token, which is hexadecimal.
NO_SERVER = "none"
IN_A_FILE = "in a file"
_NAME = "log_token"
_TOKEN_BYTES = 32


class TokenFile(NamedTuple):
    """Where the token is, and whether the user has put it there."""

    path: str
    is_given: bool


def token_file(environ: Mapping[str, str], job_token_file: str | None, run_dir: str) -> TokenFile:
    """Return the file with the token of the log servers, which may be one that is still to come."""
    given = environ.get(_env.LOG_FUNNEL_TOKEN_FILE) or job_token_file
    return TokenFile(given, True) if given else TokenFile(os.path.join(run_dir, _NAME), False)


def make_token(path: str) -> str:
    """Make a token, put it into a file and return it."""
    token = os.urandom(_TOKEN_BYTES).hex()
    write_token(path, token)
    return token


def write_token(path: str, token: str) -> None:
    """Put a token into a file that only we may read."""
    atomic_write(path, token.encode())


@dataclass(frozen=True, slots=True)
class CycleNodes:
    """The nodes of a cycle: those that work, each one's rank, and those that wait."""

    active: Sequence[str]
    ranks: Sequence[int]
    standby: Sequence[str] = ()

    def snapshot(self, cycle: int) -> CycleInfoRoundSnapshot:
        """Return what is reported of a cycle with these nodes."""
        from nvidia_resiliency_ext.fault_tolerance._report.cycle_reporter import (
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


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPlan:
    """What the host of a job runs beside the store.

    Attributes:
        logs: Which log servers there are, and where they may write.
        cycle_info_dir: Where files about cycles go; None: nowhere.
        cycle_info_job_id: The job in their names; None takes the scheduler's.
        job_name: The job's name at a service where no scheduler has one; None: it has none.
        attribution: The service that is asked why a cycle ended.
        excludes_named: Whether hosts that it names get no place any more.
        token_file: File with the job's token.
    """

    logs: LogPlan = field(default_factory=LogPlan)
    cycle_info_dir: str | None = None
    cycle_info_job_id: str | None = None
    job_name: str | None = None
    attribution: AttributionConfig = field(default_factory=AttributionConfig)
    excludes_named: bool = False
    token_file: str | None = None


def host_plan_of(plan: LaunchPlan) -> HostPlan:
    """Return what the launcher with the job's store runs for a launch."""
    config = plan.fault_tolerance
    return HostPlan(
        logs=plan.logs,
        cycle_info_dir=config.cycle_info_dir,
        cycle_info_job_id=plan.cycle_info_job_id,
        job_name=plan.job_name,
        attribution=plan.attribution,
        excludes_named=config.attribution_node_action == "exclude",
        token_file=config.rdzv_token_file,
    )
