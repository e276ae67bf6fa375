# SPDX-License-Identifier: Apache-2.0
"""Assembly of a leaf server's process: calls of nodes on one side, the root on the other."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import process
from .files import Roots
from .relay import Relay, RelayRpc, Upstream
from .service import AddressError, Service
from .settings import ServerConfig

if TYPE_CHECKING:
    from nvidia_resiliency_ext.shared_utils._funnel.shared import Access


_logger = logging.getLogger("LogAggregationLeaf")


class _LeafService(Service):
    def __init__(self, access: Access, relay: Relay, upstream: Upstream, roots: Roots) -> None:
        super().__init__(access, _logger)
        self._relay = relay
        self._upstream = upstream
        self._roots = roots

    @property
    def is_healthy(self) -> bool:
        return self._upstream.is_up

    def log_stats(self) -> None:
        relay = self._relay
        _logger.info(
            "received %d bytes in %d chunks, %d chunks with %d bytes wait for the root (at most"
            " %d), %d streams open",
            relay.received_bytes, relay.received_chunks, relay.held_chunks, relay.held_bytes,
            relay.peak_bytes, self.stream_count,
        )  # fmt: skip

    def _open(self, context: Any, *, acknowledges: bool) -> RelayRpc:
        return RelayRpc(self._relay, self._roots, context, acknowledges=acknowledges)

    def _counts(self) -> dict[str, int]:
        relay = self._relay
        return {
            "bytes_received": relay.received_bytes,
            "chunks_received": relay.received_chunks,
            "buffered_bytes": relay.held_bytes,
            "buffered_bytes_peak": relay.peak_bytes,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class LeafConfig(ServerConfig):
    """Settings of a leaf; it holds `max_chunks` at most until the root confirms them."""

    upstream: str
    allowed_roots: tuple[str, ...]
    max_chunks: int = 8192
    max_bytes: int = 32 << 20
    root_timeout_s: float = 120.0


def run(config: LeafConfig) -> int:
    """Serve until asked to end; return the exit code."""
    roots = Roots(config.allowed_roots, must_exist=False)
    lost_chunks = 0

    async def main() -> None:
        nonlocal lost_chunks
        lost_chunks = await _serve(config, roots)

    process.run_until_complete(main)
    return 1 if lost_chunks else 0


async def _serve(config: LeafConfig, roots: Roots) -> int:
    """Serve; return how many chunks did not reach the root."""
    stopping = process.stop_event()
    relay = Relay(config.max_chunks, config.max_bytes)
    upstream = Upstream(config.upstream, config.access, relay)
    try:
        if not await _root_is_healthy(config, upstream, stopping):
            return 0
        carrying = asyncio.create_task(upstream.run())
        try:
            service = _LeafService(config.access, relay, upstream, roots)
            await process.serve(service, config, stopping, f", root at {config.upstream}")
            if not await process.happened(relay.wait_settled(), process.CLOSE_S):
                _logger.error("%d chunks did not reach the root in time", relay.held_chunks)
            service.log_stats()
        finally:
            carrying.cancel()
            await asyncio.gather(carrying, return_exceptions=True)
    finally:
        await upstream.close()
    return relay.held_chunks


async def _root_is_healthy(config: LeafConfig, upstream: Upstream, stopping: asyncio.Event) -> bool:
    looking = asyncio.create_task(upstream.wait_healthy(config.root_timeout_s))
    stop = asyncio.create_task(stopping.wait())
    await asyncio.wait([looking, stop], return_when=asyncio.FIRST_COMPLETED)
    stop.cancel()
    if not looking.done():
        looking.cancel()
        return False
    why = looking.result()
    if why is not None:
        raise AddressError(f"no healthy root at {config.upstream}: {why}")
    return True
