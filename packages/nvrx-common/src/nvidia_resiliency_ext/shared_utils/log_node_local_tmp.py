# SPDX-License-Identifier: Apache-2.0
"""Face of the per-node log files: the handler that writes them and what reads their lines."""

from __future__ import annotations

from ._logging.formatters import DynamicLogFormatter
from ._logging.message import LogMessage
from ._logging.node_local import NodeLocalTmpLogHandler

__all__ = ["DynamicLogFormatter", "LogMessage", "NodeLocalTmpLogHandler"]
