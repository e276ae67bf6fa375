# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for what a test machine lacks: GPU driver, network adapters, node health daemon.

They stand in for the world outside, so the code under test is the code that runs on a real node.
"""

from __future__ import annotations

from ._fakes.nvhcd import FakeNodeDaemon
from ._fakes.nvml import FakeDriver, FakeNvml, NoCompilerError
from ._fakes.sysfs import FakeSysfs, fake_sysfs

__all__ = [
    "FakeDriver",
    "FakeNodeDaemon",
    "FakeNvml",
    "FakeSysfs",
    "NoCompilerError",
    "fake_sysfs",
]
