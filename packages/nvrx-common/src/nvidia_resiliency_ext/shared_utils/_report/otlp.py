# SPDX-License-Identifier: Apache-2.0
"""Owns the way of a job's figures to an OpenTelemetry collector: OTLP over HTTP, extra ``otel``."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from nvidia_resiliency_ext.shared_utils.abandonable import DeadlineCaller, StuckError
from nvidia_resiliency_ext.shared_utils.errors import NvrxError

from .metrics import metrics_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from opentelemetry.metrics import CallbackOptions, Meter, Observation

    from .metrics import Metric
    from .timeline import Timeline

__all__ = ["ExportError", "export_otlp"]

_TIMEOUT_S = 10.0  # of the exporter, which counts from the last byte that came
_WHOLE_TIMEOUT_S = 20.0
_PATH = "/v1/metrics"

_caller = DeadlineCaller()


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
    make = (
        meter.create_observable_gauge if metric.kind == "gauge" else meter.create_observable_counter
    )
    make(metric.name, callbacks=[_callback(metric)], description=metric.help)


def _callback(metric: Metric) -> Callable[[CallbackOptions], Iterable[Observation]]:
    from opentelemetry.metrics import Observation

    def observe(_: CallbackOptions) -> Iterable[Observation]:
        return [Observation(sample.value, dict(sample.labels)) for sample in metric.samples]

    return observe
