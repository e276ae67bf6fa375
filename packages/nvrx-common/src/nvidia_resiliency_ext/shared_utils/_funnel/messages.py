# SPDX-License-Identifier: Apache-2.0
"""The adapter to the generated protobuf modules; nothing else of the funnel imports them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from nvidia_resiliency_ext.shared_utils._funnel.refusal import Refusal
    from nvidia_resiliency_ext.shared_utils._funnel.state import FunnelStats
    from nvidia_resiliency_ext.shared_utils._funnel.streams import Source

__all__ = ["SERVICE", "ack", "health", "prepare", "read_ack", "read_health", "response", "stats"]

SERVICE = "nvidia_resiliency_ext.fault_tolerance.LogAggregationService"


def prepare() -> None:
    """Import the generated modules and make a first message: 15-50 ms, too long for a stream."""
    health(0)


def ack(stream_id: str, committed_seq: int, refusal: Refusal | None = None) -> bytes:
    """Return an Ack."""
    from nvidia_resiliency_ext.shared_utils.proto import log_aggregation_pb2 as pb

    message = pb.Ack(stream_id=stream_id, committed_seq=committed_seq)
    if refusal is not None:
        message.refusal, message.reason = refusal.code, refusal.reason
    return bytes(message.SerializeToString())


def read_ack(data: bytes) -> tuple[str, int, str, str]:
    """Return stream, number, refusal and its reason of an Ack."""
    from nvidia_resiliency_ext.shared_utils.proto import log_aggregation_pb2 as pb

    message = pb.Ack.FromString(data)
    return message.stream_id, message.committed_seq, message.refusal, message.reason


def response(status: str, bytes_received: int, committed_seq: int = 0) -> bytes:
    """Return a StreamResponse."""
    from nvidia_resiliency_ext.shared_utils.proto import log_aggregation_pb2 as pb

    message = pb.StreamResponse(
        status=status, bytes_received=bytes_received, committed_seq=committed_seq
    )
    return bytes(message.SerializeToString())


def health(connected_clients: int, *, healthy: bool = True) -> bytes:
    """Return a HealthResponse."""
    from nvidia_resiliency_ext.shared_utils.proto import log_aggregation_pb2 as pb

    message = pb.HealthResponse(healthy=healthy, connected_clients=connected_clients)
    return bytes(message.SerializeToString())


def read_health(data: bytes) -> bool:
    """Return whether a HealthResponse says healthy."""
    from nvidia_resiliency_ext.shared_utils.proto import log_aggregation_pb2 as pb

    return bool(pb.HealthResponse.FromString(data).healthy)


def stats(
    found: FunnelStats, connected_clients: int, sources: Iterable[Source], now: float
) -> bytes:
    """Return a StatsResponse."""
    from nvidia_resiliency_ext.shared_utils.proto import log_aggregation_pb2 as pb

    message = pb.StatsResponse(
        bytes_received=found.received_bytes,
        chunks_received=found.received_chunks,
        bytes_written=found.written_bytes,
        chunks_repeated=found.repeated_chunks,
        bytes_lost=found.lost_bytes,
        buffered_bytes=found.buffered_bytes,
        buffered_bytes_peak=found.buffered_bytes_peak,
        files=found.files,
        open_files=found.open_files,
        failing_files=found.failing_files,
        connected_clients=connected_clients,
    )
    for source in sources:
        oldest = next(iter(source.outstanding.copy()), None)
        message.clients.add(
            node_id=source.node_id,
            stream_id=source.stream_id,
            bytes_received=source.received_bytes,
            last_seq=source.received_seq,
            committed_seq=source.committed_seq,
            bytes_behind=source.behind_bytes,
            seconds_behind=0.0 if oldest is None else max(0.0, now - oldest.arrived_at),
        )
    return bytes(message.SerializeToString())
