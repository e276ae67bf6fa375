# SPDX-License-Identifier: Apache-2.0
"""Owns the way of a job's figures to an OpenTelemetry collector: OTLP over HTTP, extra ``otel``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nvidia_resiliency_ext.shared_utils.errors import NvrxError

from .metrics import metrics_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from opentelemetry.metrics import CallbackOptions, Meter, Observation

    from .metrics import Metric
    from .timeline import Timeline

__all__ = ["ExportError", "export_otlp"]

_TIMEOUT_S = 10.0
_PATH = "/v1/metrics"


class ExportError(NvrxError, RuntimeError):
    """Figures could not be exported; the message says why."""


def export_otlp(timeline: Timeline, endpoint: str) -> None:
    """Send the figures of a job to a collector.

    Args:
        timeline: The job.
        endpoint: Its address, for example ``http://localhost:4318``.

    Raises:
        ExportError: The extra is not installed, or the collector did not take them.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import InMemoryMetricReader, MetricExportResult
        from opentelemetry.sdk.resources import Resource
    except ImportError as error:
        message = f"{error.name} is missing: pip install 'nvrx-common[otel]'"
        raise ExportError(message) from error
    address = endpoint if endpoint.endswith(_PATH) else endpoint.rstrip("/") + _PATH
    reader = InMemoryMetricReader()
    resource = Resource.create({"service.name": "nvrx", "nvrx.job_id": timeline.job_id})
    provider = MeterProvider([reader], resource=resource, shutdown_on_exit=False)
    exporter = OTLPMetricExporter(endpoint=address, timeout=_TIMEOUT_S)
    try:
        meter = provider.get_meter("nvrx-report")
        for metric in metrics_of(timeline):
            _observe(meter, metric)
        data = reader.get_metrics_data()
        if data is None or exporter.export(data) is not MetricExportResult.SUCCESS:
            raise ExportError(f"{address}: the collector did not take the figures")
    finally:
        exporter.shutdown()
        provider.shutdown()


def _observe(meter: Meter, metric: Metric) -> None:
    make = (
        meter.create_observable_gauge if metric.kind == "gauge" else meter.create_observable_counter
    )
    make(metric.name, callbacks=[_callback(metric)], description=metric.help)


def _callback(metric: Metric) -> Callable[[CallbackOptions], Iterable[Observation]]:
    from opentelemetry.metrics import Observation

    def observe(_: CallbackOptions) -> Iterable[Observation]:
        return [Observation(sample.value, dict(sample.labels)) for sample in metric.samples]

    return observe
