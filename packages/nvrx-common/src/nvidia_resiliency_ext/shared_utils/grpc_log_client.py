# SPDX-License-Identifier: Apache-2.0
"""Sending log lines to the log funnel: batches, confirmations, resending, and files as a buffer.

It needs the extra `grpc`, and says so when a client is made. The rooms are in `_funnel_client`.
"""

from __future__ import annotations

from nvidia_resiliency_ext.shared_utils._funnel_client.access import FunnelTls
from nvidia_resiliency_ext.shared_utils._funnel_client.client import LogFunnelClient
from nvidia_resiliency_ext.shared_utils._funnel_client.target import FunnelStats, LogTarget

__all__ = ["FunnelStats", "FunnelTls", "LogFunnelClient", "LogTarget"]
