# SPDX-License-Identifier: Apache-2.0
"""What the host of a job is asked to run. Values only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nvidia_resiliency_ext.fault_tolerance._attribution.settings import AttributionConfig
from nvidia_resiliency_ext.fault_tolerance._launch.log_plan import LogPlan

if TYPE_CHECKING:
    from nvidia_resiliency_ext.fault_tolerance._launch.plan import LaunchPlan

__all__ = ["HostPlan", "host_plan_of"]


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
