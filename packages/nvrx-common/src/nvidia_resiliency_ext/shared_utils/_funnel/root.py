# SPDX-License-Identifier: Apache-2.0
"""Assembly of the root server's process: start, signals, draining, end."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nvidia_resiliency_ext.shared_utils._funnel import edge, process
from nvidia_resiliency_ext.shared_utils._funnel.servicer import LogAggregationServicer

if TYPE_CHECKING:
    from nvidia_resiliency_ext.shared_utils._funnel.access import Access
    from nvidia_resiliency_ext.shared_utils._funnel.options import FunnelOptions

__all__ = ["RootConfig", "run"]

_logger = logging.getLogger("LogAggregationServer")
_STATS_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RootConfig:
    """Everything that the root is told.

    Attributes:
        host: Where it listens; `unix:PATH` for a Unix socket.
        grace_s: How long it goes on serving after it was asked to end.
    """

    host: str
    port: int
    grace_s: float
    access: Access
    funnel: FunnelOptions


def run(config: RootConfig) -> int:
    """Serve until asked to end; return the exit code.

    Raises:
        AddressError: It cannot listen.
        ConfigError: A root or a certificate is unusable.
    """
    servicer = LogAggregationServicer(
        graceful_shutdown_timeout=config.grace_s, options=config.funnel
    )
    try:
        process.run_until_complete(lambda: _serve(config, servicer))
    finally:
        # Also after an error: the threads must end.
        servicer.shutdown()
    return 1 if servicer.lost_bytes else 0


async def _serve(config: RootConfig, servicer: LogAggregationServicer) -> None:
    stopping = process.stop_event()
    methods = edge.RootEdge(servicer, config.access)
    address = edge.address_of(config.host, config.port)
    server, port = await edge.start(methods.handlers(), address, config.access)
    where = address if config.host.startswith("unix:") else edge.address_of(config.host, port)
    _logger.info("listening on %s", where)
    while not await process.happened(stopping.wait(), _STATS_S):
        say_stats(servicer)
    _logger.info(
        "asked to end: serving %d streams for up to %.0f s",
        servicer.connected_clients, config.grace_s,
    )  # fmt: skip
    if not await process.happened(methods.wait_empty(), config.grace_s):
        _logger.warning("%d streams are cut off", servicer.connected_clients)
    await server.stop(0)
    await process.happened(methods.wait_empty(), process.CUT_OFF_S)
    say_stats(servicer)


def say_stats(servicer: LogAggregationServicer) -> None:
    """Log what was done so far."""
    found = servicer.funnel.stats()
    _logger.info(
        "received %d bytes in %d chunks, wrote %d bytes to %d files (%d failing), %d bytes wait"
        " (at most %d), %d chunks came again, %d bytes lost, %d streams open",
        found.received_bytes, found.received_chunks, found.written_bytes, found.files,
        found.failing_files, found.buffered_bytes, found.buffered_bytes_peak,
        found.repeated_chunks, found.lost_bytes, servicer.connected_clients,
    )  # fmt: skip
