# SPDX-License-Identifier: Apache-2.0
"""Public names of cycle information: one small file about each cycle, for other programs."""

from ._logs.lines import cycle_log_file
from ._report.cycle_files import (
    CycleInfoReporter,
    CycleInfoRoundSnapshot,
    CycleInfoWriter,
    utc_iso_now,
)

__all__ = [
    "CycleInfoReporter", "CycleInfoRoundSnapshot", "CycleInfoWriter", "cycle_log_file",
    "utc_iso_now",
]  # fmt: skip
