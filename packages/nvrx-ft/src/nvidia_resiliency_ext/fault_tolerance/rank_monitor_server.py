# SPDX-License-Identifier: Apache-2.0
"""A rank monitor without a launcher, under the path that programs import it from."""

from nvidia_resiliency_ext.fault_tolerance._monitor.standalone import (
    RankMonitorLogger,
    RankMonitorServer,
)

__all__ = ["RankMonitorLogger", "RankMonitorServer"]
