# SPDX-License-Identifier: Apache-2.0
"""The history of NVLink counters, without any hardware."""

import pytest

from nvidia_resiliency_ext.shared_utils._health import nvlink
from nvidia_resiliency_ext.shared_utils._health.nvlink import NVLinkWindowHealthCheck, Port


def _windows(readings, window_count: int = 10) -> list[bool]:
    """Return which windows of a port are flagged after some readings."""
    port = Port(0, 0, window_count)
    for reading in readings:
        port.add(reading)
    return list(port.windows)


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


def test_bad_ports_make_a_bad_gpu(monkeypatch) -> None:
    """A GPU is bad from `gpu_ports_threshold` ports on that are over `threshold`."""
    growth = {(0, 0): 3, (0, 1): 1, (1, 0): 3, (1, 3): 3}
    number = 0

    def read(device, port):
        return {"a": min(number, growth[device, port])} if (device, port) in growth else {}

    monkeypatch.setattr(nvlink, "_METHODS", (read,))
    monkeypatch.setattr(nvlink, "link_count", lambda _: 4)
    check = NVLinkWindowHealthCheck(window_count=5, threshold=1, gpu_ports_threshold=2)
    for value in range(4):
        number = value
        finding = check._examine_devices([0, 1])
    assert finding.warnings == (
        "GPU 1: error counters of NVLink ports 0, 3 grew in more than 1 of the last 5 windows",
    )
    assert finding.evidence == {
        "flagged_windows": {"GPU 0": {"0": 3, "1": 1}, "GPU 1": {"0": 3, "3": 3}}
    }
