# SPDX-License-Identifier: Apache-2.0
"""The results of log and traces together, at the path that older programs import it from."""

from __future__ import annotations

from nvidia_resiliency_ext.attribution.combined_log_fr.combined_log_fr import CombinedLogFR

__all__ = ["CombinedLogFR"]
