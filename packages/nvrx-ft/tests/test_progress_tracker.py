# SPDX-License-Identifier: Apache-2.0
"""Counting restarts without progress."""

import contextlib
import logging
import os
import threading
import time

import pytest

from nvidia_resiliency_ext.fault_tolerance.progress_tracker import (
    IterationFile,
    TrainingProgressTracker,
)

USUAL_LIMIT = IterationFile.__init__.__defaults__


@pytest.fixture(autouse=True)
def _patience(monkeypatch):
    """A file that is there is read, however long the machine lets the reading thread stand."""
    monkeypatch.setattr(IterationFile.__init__, "__defaults__", (30.0,))


def counts_after(tracker, cycles):
    """Run cycles that each report the given iterations; return the count after each."""
    counts = []
    for reported in cycles:
        for iteration in reported:
            tracker.update_iteration(iteration)
        tracker.analyze_previous_cycle()
        counts.append(tracker.no_progress_count)
    return counts


@pytest.mark.parametrize(
    ("minimum", "cycles", "counts"),
    [
        (1, [[5], [9], [10]], [0, 0, 0]),
        (1, [[5], [5], [5], [6]], [0, 1, 2, 0]),
        (10, [[5], [14], [24]], [1, 2, 0]),
        # Reports may come in any order; the furthest counts.
        (1, [[5, 9, 7], [8], [10]], [0, 1, 0]),
        # A cycle that ends before it reports anything made no progress.
        (1, [[5], [], []], [0, 1, 2]),
        # The bar is never lowered by a cycle that resumed from an older checkpoint.
        (1, [[100], [50], [60], [101]], [0, 1, 2, 0]),
        # Nothing known at all: not counted.
        (1, [[], [], [0], [1]], [0, 0, 0, 0]),
    ],
)
def test_reported_iterations(minimum, cycles, counts):
    """A cycle counts as progress when it gets the minimum beyond all earlier ones."""
    tracker = TrainingProgressTracker(min_progress_iterations=minimum)
    assert counts_after(tracker, cycles) == counts
    assert tracker.cycle_number == len(cycles)
    assert tracker.current_max_iteration == 0


def test_baseline_is_the_furthest_iteration():
    """The baseline only moves forward."""
    tracker = TrainingProgressTracker()
    baselines = []
    for iteration in (10, 4, 20):
        tracker.update_iteration(iteration)
        tracker.analyze_previous_cycle()
        baselines.append(tracker.last_restart_iteration)
    assert baselines == [10, 10, 20]


def test_too_many_cycles():
    """After the allowed number of cycles without progress it is time to end."""
    tracker = TrainingProgressTracker(max_no_progress_cycles=2)
    assert counts_after(tracker, [[5], [5]]) == [0, 1]
    assert not tracker.should_terminate_early()
    assert counts_after(tracker, [[5]]) == [2]
    assert tracker.should_terminate_early()


@pytest.mark.parametrize("limit", [0, -1])
def test_disabled(limit, tmp_path):
    """A limit of 0 or less switches everything off, the file included."""
    file = tmp_path / "iteration"
    file.write_text("7")
    tracker = TrainingProgressTracker(
        max_no_progress_cycles=limit, checkpoint_iteration_file=str(file)
    )
    assert counts_after(tracker, [[5], [5], [5]]) == [0, 0, 0]
    assert tracker.cycle_number == 0
    assert tracker.last_restart_iteration == 0
    assert not tracker.should_terminate_early()


def test_cycle_number():
    """Counting begins where told, and the job's number is taken over."""
    tracker = TrainingProgressTracker(initial_cycle_number=3)
    tracker.analyze_previous_cycle()
    assert tracker.cycle_number == 4
    tracker.sync_cycle_number(new_cycle_number=9)
    assert tracker.cycle_number == 9


def test_unknown_iterations_are_said_once(caplog):
    """It is said once, and not before the cycle after which the job would have been given up."""
    tracker = TrainingProgressTracker(max_no_progress_cycles=3)
    with caplog.at_level(logging.WARNING, logger="nvrx"):
        counts_after(tracker, [[], []])
        assert not caplog.records
        counts_after(tracker, [[], []])
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_a_file_that_is_not_there_is_said_once(tmp_path, caplog):
    """Checkpoints begin late: a cycle without the file is no news; a file that goes again is."""
    path = tmp_path / "iteration"
    with caplog.at_level(logging.WARNING, logger="nvrx"):
        tracker = TrainingProgressTracker(checkpoint_iteration_file=str(path))
        for _ in range(3):
            tracker.analyze_previous_cycle()
        assert caplog.text.count(f"{path} does not exist") == 1
        path.write_text("5")
        tracker.analyze_previous_cycle()
        path.unlink()
        tracker.analyze_previous_cycle()
    assert caplog.text.count(f"{path} does not exist") == 2
    tracker.close()


def test_a_file_that_holds_0_is_not_asked_for_again(tmp_path, caplog):
    """Who has configured a file is told what it holds, not to configure one."""
    path = tmp_path / "iteration"
    path.write_text("0")
    tracker = TrainingProgressTracker(checkpoint_iteration_file=str(path))
    with caplog.at_level(logging.WARNING, logger="nvrx"):
        tracker.analyze_previous_cycle()
    tracker.close()
    assert f"{path} holds 0" in caplog.text


def test_file_gives_the_iterations(tmp_path):
    """With a file what it says counts: at the start as baseline, then after each cycle."""
    file = tmp_path / "latest"
    file.write_text("100\n")
    tracker = TrainingProgressTracker(checkpoint_iteration_file=str(file))
    assert tracker.last_restart_iteration == 100
    counts = []
    for saved in ("100", "100", "150", "120", "151"):
        file.write_text(saved)
        # Reported but not saved: lost at the restart.
        tracker.update_iteration(1000)
        tracker.analyze_previous_cycle()
        counts.append(tracker.no_progress_count)
    assert counts == [1, 2, 0, 1, 0]
    tracker.close()


@pytest.mark.parametrize("content", [None, "", "  \n", "release", "12.5", "\N{SNOWMAN}"], ids=repr)
def test_unusable_file_is_skipped(tmp_path, content):
    """A cycle whose file cannot be read is not evaluated; only the cycle number moves."""
    file = tmp_path / "latest"
    file.write_text("5")
    tracker = TrainingProgressTracker(checkpoint_iteration_file=str(file))
    tracker.analyze_previous_cycle()
    assert tracker.no_progress_count == 1
    file.unlink() if content is None else file.write_text(content)
    tracker.analyze_previous_cycle()
    assert tracker.no_progress_count == 1
    assert tracker.cycle_number == 2
    assert tracker.last_restart_iteration == 5


@contextlib.contextmanager
def stuck_file(path):
    """A FIFO nobody writes to: opening it blocks, as on a dead file system, until this ends."""
    os.mkfifo(path)
    yield str(path)
    # Lets the reader that waits in open() go; one that comes later finds nothing.
    writer = os.open(path, os.O_RDWR)
    os.unlink(path)
    os.close(writer)


def reads_end():
    """Wait until no thread reads a file any more."""
    for thread in threading.enumerate():
        if thread.name.startswith("nvrx-reading"):
            thread.join(30)
            assert not thread.is_alive()


def test_dead_file_system_delays_a_restart_by_a_bounded_time(tmp_path):
    """A file that never answers costs its time limit, once, and one thread, not one per restart."""
    with stuck_file(tmp_path / "fifo") as path:
        file = IterationFile(path, timeout_s=0.1)
        threads = threading.active_count()
        began = time.monotonic()
        assert file.read() is None
        file.timeout_s = 60.0
        for _ in range(20):
            assert file.read() is None
        assert time.monotonic() - began < 20.0
        assert threading.active_count() == threads + 1
    reads_end()


def test_tracker_survives_a_dead_file_system(tmp_path, monkeypatch):
    """With a dead file the tracker is made, skips, and recovers when the file comes back."""
    path = tmp_path / "fifo"
    with stuck_file(path):
        monkeypatch.setattr(IterationFile.__init__, "__defaults__", USUAL_LIMIT)
        began = time.monotonic()
        tracker = TrainingProgressTracker(checkpoint_iteration_file=str(path))
        tracker.analyze_previous_cycle()
        assert time.monotonic() - began < 20.0
        assert (tracker.cycle_number, tracker.no_progress_count) == (1, 0)
    reads_end()
    path.write_text("5")
    tracker._file.timeout_s = 30.0
    tracker.analyze_previous_cycle()
    assert tracker.last_restart_iteration == 5


def test_huge_file_is_not_read_whole(tmp_path):
    """Only the beginning of the file is looked at."""
    path = tmp_path / "sparse"
    path.touch()
    os.truncate(path, 1 << 40)
    assert IterationFile(str(path)).read() is None


def test_no_thread_for_the_file_skips_one_read(tmp_path, monkeypatch, caplog):
    """At the limit of threads the cycle is not evaluated by the file, and the launcher lives on."""
    path = tmp_path / "iteration"
    path.write_text("7")
    file = IterationFile(str(path))
    with monkeypatch.context() as limit:

        def refuse(_):
            raise RuntimeError("can't start new thread")

        limit.setattr(threading.Thread, "start", refuse)
        assert file.read() is None
    assert "can't start new thread" in caplog.text
    assert file.read() == 7
