# SPDX-License-Identifier: Apache-2.0
"""The history of NVLink counters, without any hardware."""

import pytest

from nvidia_resiliency_ext.shared_utils._health.nvlink import WindowHistory


def _windows(readings, window_count: int = 10) -> list[bool]:
    """Return which windows of a port are flagged after some readings."""
    history = WindowHistory(window_count, threshold=15, gpu_ports_threshold=1)
    for reading in readings:
        history.add("GPU 0", 0, reading)
    return list(history.windows.get(("GPU 0", 0), ()))


@pytest.mark.parametrize(
    ("readings", "flagged"),
    [
        ([], 0),
        ([{"a": 5}], 0),
        ([{"a": 5}, {"a": 5}], 0),
        ([{"a": 5}, {"a": 6}], 1),
        ([{"a": 5, "b": 9}, {"a": 4, "b": 10}], 1),
        ([{"a": 5}, {"b": 9}], 0),
        ([{"a": 5}, {"a": 5, "b": 9}, {"a": 5, "b": 10}], 1),
        ([{"a": 5}, {"a": 2}, {"a": 3}], 1),
        ([{"a": 5}, {}, {"a": 6}], 1),
        ([{"a": 5}, {"b": 1}, {"a": 9, "b": 1}], 0),
    ],
)
def test_flags(readings, flagged) -> None:
    """Only a counter that grew since its own value one window before flags a window."""
    assert sum(_windows(readings)) == flagged


def test_failed_read_is_no_window() -> None:
    """A read without counters does not advance the window."""
    assert _windows(({"a": 1}, {}, {}, {"a": 1})) == [False]


def test_old_windows_are_forgotten() -> None:
    """Only the last `window_count` windows count."""
    assert _windows(({"a": value} for value in (0, 1, 2, 2, 2)), 2) == [False, False]


def test_bad_ports_make_a_bad_gpu() -> None:
    """A GPU is bad from `gpu_ports_threshold` ports on that are over `threshold`."""
    history = WindowHistory(window_count=5, threshold=1, gpu_ports_threshold=2)
    for value in range(4):
        history.add("GPU 0", 0, {"a": value})
        history.add("GPU 0", 1, {"a": min(value, 1)})
        history.add("GPU 1", 0, {"a": value})
        history.add("GPU 1", 3, {"a": value})
    assert history.bad_ports() == {"GPU 1": {0: 3, 3: 3}}
    assert history.evidence() == {"GPU 0": {"0": 3, "1": 1}, "GPU 1": {"0": 3, "3": 3}}
