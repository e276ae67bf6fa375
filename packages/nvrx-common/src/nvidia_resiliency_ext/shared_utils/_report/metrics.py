# SPDX-License-Identifier: Apache-2.0
"""Figures of the report for Prometheus and OpenTelemetry."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nvidia_resiliency_ext.shared_utils.abandonable import DeadlineCaller, StuckError
from nvidia_resiliency_ext.shared_utils.errors import NvrxError

from .timeline import Timeline, plain

if TYPE_CHECKING:
    from opentelemetry.metrics import CallbackOptions, Meter, Observation

_ESCAPES = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n"})
_TIMEOUT_S = 10.0  # of the exporter, which counts from the last byte that came
_WHOLE_TIMEOUT_S = 20.0
_PATH = "/v1/metrics"

_caller = DeadlineCaller()


@dataclass(frozen=True, slots=True)
class Metric:
    """A named figure: one value, or one for each value of its label."""

    name: str
    help: str
    values: Mapping[str, float]
    label: str

    @property
    def kind(self) -> str:
        """A counter only grows while a job runs; a gauge may fall."""
        return "counter" if self.name.endswith("_total") else "gauge"


def metrics_of(timeline: Timeline) -> list[Metric]:
    """Return the figures of a job; one that is not known is left out."""
    workers, checkpoints = timeline.workers, timeline.checkpoints
    downs = [restart.down_s for restart in timeline.restarts if restart.down_s is not None]
    starts = {"warm": workers.warm, "cold": workers.cold}
    outcomes = {
        "saved": checkpoints.saved, "failed": checkpoints.failed, "loaded": checkpoints.loaded,
    }  # fmt: skip
    found = [
        _metric("nvrx_job_info", "The job; always 1.", {timeline.job_id or "unknown": 1}, "job_id"),
        _metric("nvrx_job_running", "1 until the record has an end.", not timeline.is_ended),
        _metric("nvrx_job_exit_code", "Exit code of a job that has ended.", timeline.exit_code),
        _metric("nvrx_nodes", "Nodes that have recorded anything.", len(timeline.hosts)),
        _metric("nvrx_ranks", "Ranks of the job.", timeline.ranks),
        _metric("nvrx_last_event_time_seconds", "Time of the last event.", timeline.end or None),
        _metric("nvrx_wall_seconds", "From the first event to the last.", timeline.wall_s),
        _metric("nvrx_goodput_ratio", "Productive time by wall time.", timeline.goodput),
        # Work that a fault throws away was productive before: no counter.
        _metric("nvrx_spent_seconds", "Where the time went.", timeline.seconds, "category"),
        _metric("nvrx_cycles_total", "Starts of all workers.", len(timeline.cycles)),
        _metric("nvrx_faults_total", "Faults.", timeline.faults_by_cause, "cause"),
        _metric("nvrx_restarts_total", "Restarts.", timeline.restarts_by_layer, "layer"),
        _metric("nvrx_restart_down_seconds_total", "Time without training.", sum(downs)),
        _metric("nvrx_workers_started_total", "Started workers.", starts, "start"),
        _metric("nvrx_checkpoints_total", "Checkpoints.", outcomes, "what"),
        _metric("nvrx_checkpoint_bytes_total", "Bytes of checkpoints.", checkpoints.bytes),
        _metric("nvrx_checkpoint_stall_seconds_total", "Waiting for them.", checkpoints.stall_s),
        _metric("nvrx_steps_total", "Steps that were reported.", timeline.steps),
        _metric("nvrx_events_dropped_total", "Events that were not recorded.", timeline.dropped),
    ]
    return [metric for metric in found if metric.values]


def _metric(
    name: str, text: str, value: float | Mapping[str, float] | None, label: str = ""
) -> Metric:
    if isinstance(value, (int, float)):
        value = {"": value}
    # Names that read alike once they are plain are one: a name that comes twice spoils the file.
    sums: dict[str, float] = {}
    for each, amount in (value or {}).items():
        sums[plain(each)] = sums.get(plain(each), 0.0) + float(amount)
    return Metric(name, text, sums, label)


def render_prometheus(timeline: Timeline) -> str:
    """Return the figures of `timeline` in the text format of Prometheus."""
    lines = []
    for metric in metrics_of(timeline):
        lines.append(f"# HELP {metric.name} {metric.help}")
        lines.append(f"# TYPE {metric.name} {metric.kind}")
        for of, value in metric.values.items():
            labels = f'{{{metric.label}="{of.translate(_ESCAPES)}"}}' if metric.label else ""
            lines.append(f"{metric.name}{labels} {value:.17g}")
    return "\n".join(lines) + "\n"


class ExportError(NvrxError, RuntimeError):
    """Figures could not be exported; the message says why."""


def export_otlp(timeline: Timeline, endpoint: str) -> None:
    """Send the figures of a job to a collector."""
    address = endpoint if endpoint.endswith(_PATH) else endpoint.rstrip("/") + _PATH
    try:
        _caller.run(address, lambda: _export(timeline, address), _WHOLE_TIMEOUT_S)
    except StuckError as error:
        raise ExportError(str(error)) from error


def _export(timeline: Timeline, address: str) -> None:
    try:
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import InMemoryMetricReader, MetricExportResult
        from opentelemetry.sdk.resources import Resource
        from requests import Session
    except ImportError as error:
        message = f"{error.name} is missing: pip install 'nvrx-common[otel]'"
        raise ExportError(message) from error
    # What it would print of a failure is in our error; handlers that a program has still get it.
    logging.getLogger("opentelemetry").addHandler(logging.NullHandler())
    reader = InMemoryMetricReader()
    resource = Resource.create({"service.name": "nvrx", "nvrx.job_id": timeline.job_id})
    provider = MeterProvider([reader], resource=resource, shutdown_on_exit=False)
    session = Session()
    session.stream = True  # the body of an answer says nothing and may be without end
    exporter = OTLPMetricExporter(endpoint=address, timeout=_TIMEOUT_S, session=session)
    try:
        meter = provider.get_meter("nvrx-report")
        for metric in metrics_of(timeline):
            _observe(meter, metric)
        data = reader.get_metrics_data()
        if data is None or exporter.export(data) is not MetricExportResult.SUCCESS:
            raise ExportError(f"{address}: the collector did not take the figures")
    finally:
        exporter.shutdown()
        session.close()
        provider.shutdown()


def _observe(meter: Meter, metric: Metric) -> None:
    from opentelemetry.metrics import Observation

    def observe(_: CallbackOptions) -> Iterable[Observation]:
        return [
            Observation(value, {metric.label: of} if metric.label else {})
            for of, value in metric.values.items()
        ]

    is_gauge = metric.kind == "gauge"
    make = meter.create_observable_gauge if is_gauge else meter.create_observable_counter
    make(metric.name, callbacks=[observe], description=metric.help)
