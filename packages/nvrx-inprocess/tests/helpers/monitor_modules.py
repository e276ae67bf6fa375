# SPDX-License-Identifier: Apache-2.0
"""What a rank has of the monitor's modules, imported without torch."""

import importlib.util
import os

import nvidia_resiliency_ext

_BOOT = next(
    path
    for folder in nvidia_resiliency_ext.__path__
    if os.path.exists(path := os.path.join(folder, "inprocess", "_monitor", "boot.py"))
)
_spec = importlib.util.spec_from_file_location("boot", _BOOT)
_boot = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_boot)
_boot.make_shell()

from nvidia_resiliency_ext.inprocess._monitor import start  # noqa: E402
from nvidia_resiliency_ext.inprocess._monitor.client import (  # noqa: E402
    MonitorLink,
    MonitorSettings,
)
from nvidia_resiliency_ext.inprocess._monitor.messages import Decided, Interrupted  # noqa: E402
from nvidia_resiliency_ext.inprocess._monitor.page import Phase, ProgressPage  # noqa: E402
from nvidia_resiliency_ext.inprocess.attribution import Interruption  # noqa: E402

__all__ = [
    "Decided",
    "Interrupted",
    "Interruption",
    "MonitorLink",
    "MonitorSettings",
    "Phase",
    "ProgressPage",
    "start",
]
