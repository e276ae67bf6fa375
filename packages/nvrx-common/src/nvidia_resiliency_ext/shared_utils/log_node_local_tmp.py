# SPDX-License-Identifier: Apache-2.0
"""Public API of the per-node log files: their handler, their lines and their merging."""

from __future__ import annotations

from ._logging.aggregator import NodeLogAggregator
from ._logging.handler import DynamicLogFormatter, LogMessage, NodeLocalTmpLogHandler

__all__ = ["DynamicLogFormatter", "LogMessage", "NodeLocalTmpLogHandler", "NodeLogAggregator"]
