# SPDX-License-Identifier: Apache-2.0
"""Leaves no detector behind, whatever a test does."""

import os

import leftovers
import pytest

from nvidia_resiliency_ext.attribution.straggler import Detector

# torch asks for the name of each store and client; where an answer is lost the C library waits for
# 5 s and asks again. It reads this at its first question; ranks and commands inherit it.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

_leaves_nothing_behind = leftovers.guard(leftovers.threads, leftovers.run_directories)


@pytest.fixture(autouse=True)
def _no_detector_left(_leaves_nothing_behind):
    yield
    Detector.shutdown()


@pytest.fixture(autouse=True)
def _no_cupti_of_the_machine(monkeypatch, tmp_path):
    """Keep a real libcupti out of the process: the first one that works stays loaded for good."""
    monkeypatch.setenv("NVRX_CUPTI_LIBRARY", str(tmp_path / "no-libcupti.so"))
