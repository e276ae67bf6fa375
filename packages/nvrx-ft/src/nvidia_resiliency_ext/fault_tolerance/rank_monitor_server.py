# SPDX-License-Identifier: Apache-2.0
"""A rank monitor without a launcher, under the path that programs import it from."""

from ._monitor.alone import RankMonitorLogger, RankMonitorServer

__all__ = ["RankMonitorLogger", "RankMonitorServer"]
