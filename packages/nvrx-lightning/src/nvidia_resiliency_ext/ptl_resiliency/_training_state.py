# SPDX-License-Identifier: Apache-2.0
"""What a training run has done so far, and what follows for its timeouts; no I/O, no Lightning."""

from __future__ import annotations

from typing import Any, NamedTuple

__all__ = ["SectionUpdate", "TrainingStateMachine", "reached_limit", "section_update"]

_MIN_ITERS_FOR_HB_UPDATE = 2


class TrainingStateMachine:
    """Follow one run by its hooks, from `on_setup` to `on_teardown` or `on_exception`."""

    def __init__(self) -> None:
        """Begin with a run that has done nothing."""
        self.on_setup()

    def on_setup(self) -> None:
        """Begin a run: forget the one before."""
        self.iterations = 0
        self.has_loaded_checkpoint = False
        self.has_saved_checkpoint = False
        self.has_failed = False
        self._has_ended = False
        self._heartbeats = 0
        self._is_save_open = False
        self._has_measured_save = False
        self._are_timeouts_updated = False

    def on_train_start(self) -> None:
        """Record nothing: only completed iterations count."""

    def on_train_batch_end(self) -> None:
        """Count a training iteration."""
        self.iterations += 1

    def on_train_end(self) -> None:
        """Record that training ended by itself."""
        self._has_ended = True

    def on_validation_start(self) -> None:
        """Record nothing: validation is no progress of training."""

    def on_validation_batch_end(self) -> None:
        """Record nothing; see `on_validation_start`."""

    def on_validation_end(self) -> None:
        """Record nothing; see `on_validation_start`."""

    def on_load_checkpoint(self) -> None:
        """Remember that the run continues an earlier one."""
        self.has_loaded_checkpoint = True

    def on_save_checkpoint(self) -> None:
        """Remember a save; it is measured if there are heartbeats before it and after it."""
        self.has_saved_checkpoint = True
        self._is_save_open = self._heartbeats > 0

    def on_ft_heartbeat_sent(self) -> None:
        """Count a heartbeat; the first one after a save completes the measurement of that save."""
        self._heartbeats += 1
        if self._is_save_open:
            self._is_save_open = False
            self._has_measured_save = True

    def on_ft_timeouts_updated(self) -> None:
        """Remember that the timeouts of this run are calculated."""
        self._are_timeouts_updated = True

    def on_teardown(self) -> None:
        """Record that the run ended without an exception."""
        self._has_ended = True

    def on_exception(self, exc: BaseException | None = None) -> None:
        """Remember a failure. `SystemExit` with a false code (None, 0) is a clean stop."""
        if not (isinstance(exc, SystemExit) and not exc.code):
            self.has_failed = True

    def is_training_completed(self, trainer: Any = None) -> bool:
        """Return whether the job has nothing left to train.

        Args:
            trainer: Lightning's trainer, for `max_steps` and `max_epochs`; None leaves them out.
        """
        if self.has_failed:
            return False
        if self._has_ended and self.iterations <= 1:
            return True  # there was nothing left when the run began
        return trainer is not None and reached_limit(trainer)

    @property
    def can_update_timeouts(self) -> bool:
        """Whether this run has measured enough to calculate heartbeat timeouts."""
        return (
            not self._are_timeouts_updated
            and not self.has_failed
            and self.iterations >= _MIN_ITERS_FOR_HB_UPDATE
            and self.has_loaded_checkpoint
            and self._has_measured_save
        )


def reached_limit(trainer: Any) -> bool:
    """Tell whether a trainer has reached its `max_steps` or `max_epochs`; -1 and None are none."""
    max_steps, max_epochs = trainer.max_steps, trainer.max_epochs
    if max_steps is not None and 0 < max_steps <= trainer.global_step:
        return True
    return max_epochs is not None and 0 < max_epochs <= trainer.current_epoch


class SectionUpdate(NamedTuple):
    """Which section timeouts to calculate, and whether the time outside sections too."""

    sections: list[str]
    out_of_section: bool


def section_update(
    state: TrainingStateMachine, *, min_iterations: int, is_async_save: bool, is_final: bool
) -> SectionUpdate | None:
    """Decide which timeouts a run has measured well enough; None when there are none.

    Args:
        state: What the run has done.
        min_iterations: The section `step` needs more training iterations than this.
        is_async_save: Whether checkpoints are saved in the background, so that the section
            `checkpointing` says nothing about a whole save.
        is_final: Whether the run ends now.
    """
    if state.has_failed:
        return None
    sections = []
    if state.has_loaded_checkpoint:
        sections.append("setup")
    if state.iterations > min_iterations:
        sections.append("step")
    if state.has_saved_checkpoint and not is_async_save:
        sections.append("checkpointing")
    out_of_section = is_final and state.has_saved_checkpoint and {"setup", "step"} <= {*sections}
    return SectionUpdate(sections, out_of_section) if sections else None
