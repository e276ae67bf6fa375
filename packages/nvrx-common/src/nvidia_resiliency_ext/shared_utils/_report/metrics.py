# SPDX-License-Identifier: Apache-2.0
"""Owns which figures of a timeline are exported and what they are called; knows no format."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from .words import plain

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .timeline import Timeline

__all__ = ["Metric", "Sample", "metrics_of"]


@dataclass(frozen=True, slots=True)
class Sample:
    """One value with what tells it from others of the same name."""

    value: float
    labels: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Metric:
    """A named figure. A counter only grows while a job runs; a gauge may fall."""

    name: str
    kind: Literal["gauge", "counter"]
    help: str
    samples: tuple[Sample, ...]


def metrics_of(timeline: Timeline) -> list[Metric]:
    """Return the figures of a job; one that is not known is left out."""
    workers, checkpoints = timeline.workers, timeline.checkpoints
    downs = [restart.down_s for restart in timeline.restarts if restart.down_s is not None]
    found = [
        _gauge(
            "nvrx_job_info",
            "The job; always 1.",
            {plain(timeline.job_id) or "unknown": 1},
            "job_id",
        ),
        _gauge("nvrx_job_running", "1 until the record has an end.", not timeline.is_ended),
        _gauge("nvrx_job_exit_code", "Exit code of a job that has ended.", timeline.exit_code),
        _gauge("nvrx_nodes", "Nodes that have recorded anything.", len(timeline.hosts)),
        _gauge("nvrx_ranks", "Ranks of the job.", timeline.ranks),
        _gauge("nvrx_last_event_time_seconds", "Time of the last event.", timeline.end or None),
        _gauge("nvrx_wall_seconds", "From the first event to the last.", timeline.wall_s),
        _gauge("nvrx_goodput_ratio", "Productive time by wall time.", timeline.goodput),
        # Work that a fault throws away was productive before: no counter.
        _gauge("nvrx_spent_seconds", "Where the time went.", timeline.seconds, "category"),
        _counter("nvrx_cycles_total", "Starts of all workers.", len(timeline.cycles)),
        _counter("nvrx_faults_total", "Faults.", timeline.faults_by_cause, "cause"),
        _counter("nvrx_restarts_total", "Restarts.", timeline.restarts_by_layer, "layer"),
        _counter("nvrx_restart_down_seconds_total", "Time without training.", sum(downs)),
        _counter(
            "nvrx_workers_started_total",
            "Started workers.",
            {"warm": workers.warm, "cold": workers.cold},
            "start",
        ),
        _counter(
            "nvrx_checkpoints_total",
            "Checkpoints.",
            {
                "saved": checkpoints.saved,
                "failed": checkpoints.failed,
                "loaded": checkpoints.loaded,
            },
            "what",
        ),
        _counter("nvrx_checkpoint_bytes_total", "Bytes of checkpoints.", checkpoints.bytes),
        _counter("nvrx_checkpoint_stall_seconds_total", "Waiting for them.", checkpoints.stall_s),
        _counter("nvrx_steps_total", "Steps that were reported.", timeline.steps),
        _counter("nvrx_events_dropped_total", "Events that were not recorded.", timeline.dropped),
    ]
    return [metric for metric in found if metric.samples]


def _gauge(
    name: str, text: str, value: float | Mapping[str, float] | None, label: str = ""
) -> Metric:
    return Metric(name, "gauge", text, _samples(value, label))


def _counter(name: str, text: str, value: float | Mapping[str, float], label: str = "") -> Metric:
    return Metric(name, "counter", text, _samples(value, label))


def _samples(value: float | Mapping[str, float] | None, label: str) -> tuple[Sample, ...]:
    if value is None:
        return ()
    if isinstance(value, (int, float)):
        return (Sample(float(value)),)
    # Names that read alike once they are plain are one: a name that comes twice spoils the file.
    sums: dict[str, float] = {}
    for name, each in value.items():
        sums[plain(name)] = sums.get(plain(name), 0.0) + each
    return tuple(Sample(float(each), ((label, name),)) for name, each in sums.items())
