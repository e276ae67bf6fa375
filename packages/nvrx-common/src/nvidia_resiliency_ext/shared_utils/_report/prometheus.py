# SPDX-License-Identifier: Apache-2.0
"""Owns the text format of Prometheus, as its node exporter collects it from files."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .metrics import metrics_of

if TYPE_CHECKING:
    from .metrics import Sample
    from .timeline import Timeline

__all__ = ["render_prometheus"]

_ESCAPES = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n"})


def render_prometheus(timeline: Timeline) -> str:
    """Return a job's figures in the text format of Prometheus.

    Args:
        timeline: The job.
    """
    lines = []
    for metric in metrics_of(timeline):
        lines.append(f"# HELP {metric.name} {metric.help}")
        lines.append(f"# TYPE {metric.name} {metric.kind}")
        lines.extend(
            f"{metric.name}{_labels(sample)} {sample.value:.17g}" for sample in metric.samples
        )
    return "\n".join(lines) + "\n"


def _labels(sample: Sample) -> str:
    pairs = ",".join(f'{name}="{value.translate(_ESCAPES)}"' for name, value in sample.labels)
    return f"{{{pairs}}}" if pairs else ""
