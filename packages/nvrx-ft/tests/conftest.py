# SPDX-License-Identifier: Apache-2.0
"""Fixtures of all tests of nvrx-ft; first of all, that a test leaves nothing behind."""

import os
from pathlib import Path

import leftovers
import pytest

leftovers.open_pipe_of_libuv()
_leaves_nothing_behind = leftovers.guard(
    leftovers.children, leftovers.threads, leftovers.descriptors, leftovers.shared_memory
)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs a device where there is none."""
    if item.get_closest_marker("gpu") and not Path("/dev/nvidiactl").exists():
        pytest.skip("needs an NVIDIA device")


@pytest.fixture
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Hide the variables of schedulers and launchers that this machine may have set."""
    prefixes = ("SLURM", "CROSS_SLURM", "NVRX_", "FT_", "TORCHELASTIC_")
    names = {"RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    for name in list(os.environ):
        if name in names or name.startswith(prefixes):
            monkeypatch.delenv(name)
    return monkeypatch
