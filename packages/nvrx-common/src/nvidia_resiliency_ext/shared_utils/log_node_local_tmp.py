# SPDX-License-Identifier: Apache-2.0
"""Face of the per-node log files: what writes them, what reads their lines, what merges them."""

from __future__ import annotations

from ._aggregation.aggregator import NodeLogAggregator
from ._logging.formatters import DynamicLogFormatter
from ._logging.message import LogMessage
from ._logging.node_local import NodeLocalTmpLogHandler

__all__ = ["DynamicLogFormatter", "LogMessage", "NodeLocalTmpLogHandler", "NodeLogAggregator"]
