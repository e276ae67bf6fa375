# SPDX-License-Identifier: Apache-2.0
"""Public names of cycle information: one small file about each cycle, for other programs."""

from nvidia_resiliency_ext.fault_tolerance._cycleinfo.reporter import (
    CycleInfoReporter,
    CycleInfoRoundSnapshot,
    utc_iso_now,
)
from nvidia_resiliency_ext.fault_tolerance._cycleinfo.writer import CycleInfoWriter
from nvidia_resiliency_ext.fault_tolerance._cyclelogs.names import cycle_log_file

__all__ = [
    "CycleInfoReporter",
    "CycleInfoRoundSnapshot",
    "CycleInfoWriter",
    "cycle_log_file",
    "utc_iso_now",
]
