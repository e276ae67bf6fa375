# SPDX-License-Identifier: Apache-2.0
"""Helpers at the path that older programs import them from."""

from nvidia_resiliency_ext.attribution.trace_analyzer.capture import capture_logs, capture_stdout

__all__ = ["capture_logs", "capture_stdout"]
