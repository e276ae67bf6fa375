# SPDX-License-Identifier: Apache-2.0
"""Count restarts without progress; it does not restart or stop anything."""

from __future__ import annotations

import logging
import os

__all__ = ["TrainingProgressTracker"]

logger = logging.getLogger("nvrx")
_READ_LIMIT_BYTES = 4096


class IterationFile:
    """A file that holds one integer; a hung file system blocks at most one read, in one thread."""

    def __init__(self, path: str, timeout_s: float = 2.0) -> None:
        from nvidia_resiliency_ext.shared_utils.abandonable import DeadlineCaller

        self.path = path
        self.timeout_s = timeout_s
        self._caller = DeadlineCaller()
        self._is_missed = False

    def read(self) -> int | None:
        """Return the integer; None when the file is absent, unreadable, empty or too slow."""
        text = ""
        try:
            text = self._caller.run(f"reading {self.path}", self._read, self.timeout_s)
            self._is_missed = False
            return int(text)
        except FileNotFoundError:
            if not self._is_missed:
                self._is_missed = True
                logger.warning("%s does not exist (yet): it is read in each cycle", self.path)
        except ValueError:
            logger.warning("%s: holds %.40r, not one integer, skipped", self.path, text)
        except (OSError, RuntimeError) as error:  # too slow, unreadable, or the limit of threads
            self._is_missed = False
            logger.warning("%s: %s, skipped", self.path, error)
        return None

    def _read(self) -> str:
        descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.read(descriptor, _READ_LIMIT_BYTES).decode("ascii", "replace").strip()
        finally:
            os.close(descriptor)


class TrainingProgressTracker:
    """Compare the iteration reached in each cycle with the highest one reached before.

    The iteration comes from the checkpoint iteration file, if one is configured, else from the
    values that ranks report with `update_iteration`. Not thread-safe.

    Attributes:
        current_max_iteration: highest iteration of the current cycle.
        last_restart_iteration: the baseline: highest iteration of all earlier cycles.
        no_progress_count: cycles in a row that gained less than the minimum.
        cycle_number: the current cycle.

    Example:
        >>> tracker = TrainingProgressTracker(max_no_progress_cycles=1)
        >>> tracker.update_iteration(10)
        >>> tracker.analyze_previous_cycle()
        >>> tracker.should_terminate_early()
        False
        >>> tracker.update_iteration(10)
        >>> tracker.analyze_previous_cycle()
        >>> tracker.should_terminate_early()
        True

    Args:
        min_progress_iterations: a cycle that gains fewer iterations made no progress.
        max_no_progress_cycles: so many such cycles in a row are too many; <= 0 disables.
        initial_cycle_number: number of the present cycle.
        checkpoint_iteration_file: path of a file that holds the last saved iteration; it is read
            at once, as the baseline.
    """

    def __init__(
        self,
        min_progress_iterations: int = 1,
        max_no_progress_cycles: int = 3,
        initial_cycle_number: int = 0,
        checkpoint_iteration_file: str | None = None,
    ) -> None:
        self.min_progress_iterations = min_progress_iterations
        self.max_no_progress_cycles = max_no_progress_cycles
        self.checkpoint_iteration_file = checkpoint_iteration_file
        self.current_max_iteration = 0
        self.last_restart_iteration = 0
        self.no_progress_count = 0
        self.cycle_number = initial_cycle_number
        self._unknown_cycles = 0
        self._file: IterationFile | None = None
        if checkpoint_iteration_file and self.is_enabled:
            self._file = IterationFile(checkpoint_iteration_file)
            self.last_restart_iteration = self._file.read() or 0

    @property
    def is_enabled(self) -> bool:
        """Whether cycles without progress are counted at all."""
        return self.max_no_progress_cycles > 0

    def update_iteration(self, iteration: int) -> None:
        """Record an `iteration` that a rank reported; one below the maximum changes nothing."""
        self.current_max_iteration = max(self.current_max_iteration, iteration)

    def sync_cycle_number(self, new_cycle_number: int) -> None:
        """Set `new_cycle_number`, counted from 0, to the one of the job."""
        self.cycle_number = new_cycle_number

    def analyze_previous_cycle(self) -> None:
        """Evaluate the cycle that just ended; call it once before each restart."""
        if not self.is_enabled:
            return
        if self._file is not None:
            saved = self._file.read()
            if saved is None:
                self.cycle_number += 1
                return
            self.current_max_iteration = saved
        self._count(self.current_max_iteration - self.last_restart_iteration)
        self.cycle_number += 1
        # A cycle that resumed from an older checkpoint and died early must not lower the bar.
        self.last_restart_iteration = max(self.last_restart_iteration, self.current_max_iteration)
        self.current_max_iteration = 0

    def should_terminate_early(self) -> bool:
        """Return whether too many cycles in a row made no progress."""
        return self.is_enabled and self.no_progress_count >= self.max_no_progress_cycles

    def close(self) -> None:
        """Release the file; a read that hangs continues in its daemon thread."""
        self._file = None

    def _count(self, gained: int) -> None:
        if self.current_max_iteration == 0 and self.last_restart_iteration == 0:
            self._unknown_cycles += 1
            if self._file is not None and self._unknown_cycles == 1:
                logger.warning(
                    "%s holds 0: cycles without progress are counted from the first iteration that"
                    " it names",
                    self.checkpoint_iteration_file,
                )
            # Without a file it matters first where the job would be given up.
            elif self._file is None and self._unknown_cycles == self.max_no_progress_cycles:
                logger.warning(
                    "no iteration is known, so cycles without progress cannot be counted:"
                    " checkpoint_iteration_file can name a file that holds the last saved one"
                )
            return
        if gained >= self.min_progress_iterations:
            self.no_progress_count = 0
            logger.info("cycle %d gained %d iterations", self.cycle_number, gained)
            return
        self.no_progress_count += 1
        logger.warning(
            "cycle %d reached iteration %d, %d were reached before: no progress, %d of %d cycles",
            self.cycle_number,
            self.current_max_iteration,
            self.last_restart_iteration,
            self.no_progress_count,
            self.max_no_progress_cycles,
        )
