# SPDX-License-Identifier: Apache-2.0
"""Leaves no detector behind, whatever a test does."""

import leftovers
import pytest

from nvidia_resiliency_ext.attribution.straggler import Detector

_leaves_nothing_behind = leftovers.guard(leftovers.threads, leftovers.run_directories)


@pytest.fixture(autouse=True)
def _no_detector_left(_leaves_nothing_behind):
    yield
    Detector.shutdown()


@pytest.fixture(autouse=True)
def _no_cupti_of_the_machine(monkeypatch, tmp_path):
    """Keep a real libcupti out of the process: the first one that works stays loaded for good."""
    monkeypatch.setenv("NVRX_CUPTI_LIBRARY", str(tmp_path / "no-libcupti.so"))
