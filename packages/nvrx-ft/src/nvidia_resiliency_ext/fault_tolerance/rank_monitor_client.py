# SPDX-License-Identifier: Apache-2.0
"""The rank's side of the monitor, under the path that programs import it from."""

from ._monitor.client import RankMonitorClient, RankMonitorClientError

__all__ = ["RankMonitorClient", "RankMonitorClientError"]
