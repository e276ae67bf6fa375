# SPDX-License-Identifier: Apache-2.0
"""How many processors are idle, from counters as the kernel writes them."""

from pathlib import Path

import pytest

from nvidia_resiliency_ext.fault_tolerance._core.local_world import IdleMeter

BEFORE = """cpu  300 0 300 2400 0 0 0 0 0 0
cpu0 100 0 100 800 0 0 0 0 50 0
cpu1 100 0 100 700 100 0 0 0 0 0
cpu9 100 0 100 800 0 0 0 0 0 0
intr 12345
"""


def write(path: Path, *, idle: tuple[int, int], busy: tuple[int, int]) -> None:
    """Let the two processors go on by so many idle and busy ticks."""
    path.write_text(
        f"cpu  1 2 3\ncpu0 {100 + busy[0]} 0 100 {800 + idle[0]} 0 0 0 0 90 0\n"
        f"cpu1 100 0 {100 + busy[1]} 700 {100 + idle[1]} 0 0 0 0 0\ncpu9 0 0 0 99999 0 0 0 0\n"
    )


def test_counts_the_idle_part_of_its_own_processors(tmp_path):
    """Idle time and waiting for disks count, guests and other processors do not."""
    stat = tmp_path / "stat"
    stat.write_text(BEFORE)
    meter = IdleMeter(frozenset({0, 1}), stat)
    write(stat, idle=(150, 200), busy=(50, 0))
    assert meter.idle_cores() == pytest.approx(1.75)
    write(stat, idle=(150, 200), busy=(150, 100))
    assert meter.idle_cores() == 0.0


def test_nothing_is_idle_where_nothing_is_known(tmp_path):
    """Without the kernel's counters, or with some that make no sense, nothing counts as idle."""
    meter = IdleMeter(frozenset({0}), tmp_path / "missing")
    assert meter.idle_cores() == 0.0
    (tmp_path / "missing").write_text("cpu0 a b c d e f\ncpu0\n")
    assert meter.idle_cores() == 0.0


def test_reads_the_machine():
    """The kernel's own counters are understood: no more is idle than there is."""
    import os

    meter = IdleMeter()
    assert 0.0 <= meter.idle_cores() <= len(os.sched_getaffinity(0))
