# SPDX-License-Identifier: Apache-2.0
"""Analysis of flight-recorder traces: which ranks hold a hung job up; no model is needed."""

from __future__ import annotations

from nvidia_resiliency_ext.attribution.trace_analyzer.fr_support import *  # noqa: F403 - its list
from nvidia_resiliency_ext.attribution.trace_analyzer.fr_support import __all__ as __all__
