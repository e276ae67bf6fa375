# SPDX-License-Identifier: Apache-2.0
"""What happens to a verdict after clients have it: exported records, messages."""

from __future__ import annotations

from nvidia_resiliency_ext.attribution.postprocessing.pipeline import (
    ResultPoster,
    build_dataflow_record,
    post_analysis_items,
)
from nvidia_resiliency_ext.attribution.postprocessing.slack import should_notify_slack

__all__ = [
    "ResultPoster",
    "build_dataflow_record",
    "post_analysis_items",
    "should_notify_slack",
]
