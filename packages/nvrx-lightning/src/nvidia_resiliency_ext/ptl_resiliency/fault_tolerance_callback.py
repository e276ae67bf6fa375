# SPDX-License-Identifier: Apache-2.0
"""Heartbeats of a Lightning training, for the rank monitors of `ft_launcher`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ._fault_tolerance import FaultToleranceBase
from ._training_state import TrainingStateMachine
from ._utils import SimulatedFaultParams

__all__ = ["FaultToleranceCallback"]

_TrainingStateMachine = TrainingStateMachine  # the name that programs know it by


class FaultToleranceCallback(FaultToleranceBase):
    """Send heartbeats at Lightning's hooks, and calculate the heartbeat timeouts.

    Run the program with `ft_launcher`. Active in `trainer.fit` only. Timeouts are calculated once
    per run, at its end, when it has loaded a checkpoint, saved one between two heartbeats and done
    two training iterations; the next run loads them.

    Lightning calls the hooks with `trainer`, the running trainer, and `pl_module`, the module that
    it trains; `args`, `kwargs` and `checkpoint` are the hook's further arguments, which are not
    used.

    Args:
        autoresume: Touch the file that `FAULT_TOL_FINISHED_FLAG_FILE` names when the training is
            complete: `max_steps` or `max_epochs` reached, or nothing left to train.
        calculate_timeouts: Calculate the timeouts, and load those of an earlier run.
        simulated_fault_params: A fault to inject; `SimulatedFaultParams` or a mapping.
        exp_dir: Existing directory of the timeouts file; None: `ft_state` in the trainer's
            `log_dir`, or in its `default_root_dir` without a logger.
        logger_name: Name of the logger.
        on_monitor_loss: `warn` continues without a monitor and tries to reconnect; `raise` fails
            the step in which the monitor does not answer.
        min_heartbeat_interval: Minimum seconds between heartbeats; 0 sends one at every hook.

    Raises:
        ImportError: nvrx-ft is not installed.
        ValueError: An argument is wrong.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from nvidia_resiliency_ext.ptl_resiliency import FaultToleranceCallback
        >>> callback = FaultToleranceCallback(autoresume=False, calculate_timeouts=True)
        >>> trainer = Trainer(callbacks=[callback])  # doctest: +SKIP
    """

    def __init__(  # noqa: PLR0913 - the signature is given
        self,
        autoresume: bool,
        calculate_timeouts: bool,
        simulated_fault_params: SimulatedFaultParams | Mapping[str, Any] | None = None,
        exp_dir: str | os.PathLike[str] | None = None,
        logger_name: str = "nemo_logger.FaultToleranceCallback",
        *,
        on_monitor_loss: str = "warn",
        min_heartbeat_interval: float = 0.0,
    ) -> None:
        super().__init__(
            autoresume, calculate_timeouts, simulated_fault_params, exp_dir, logger_name,
            on_monitor_loss, min_heartbeat_interval,
        )  # fmt: skip

    def on_sanity_check_start(self, trainer: Any, pl_module: Any) -> None:
        """Send a heartbeat."""
        self._heartbeat()

    def on_sanity_check_end(self, trainer: Any, pl_module: Any) -> None:
        """Send a heartbeat."""
        self._heartbeat()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Send a heartbeat."""
        self.state_machine.on_train_start()
        self._heartbeat()

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Send a heartbeat."""
        self._heartbeat()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any, **kwargs: Any) -> None:
        """Count the iteration and send a heartbeat."""
        self.state_machine.on_train_batch_end()
        self._heartbeat()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Send a heartbeat."""
        self._heartbeat()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Send a heartbeat."""
        self.state_machine.on_train_end()
        self._heartbeat()

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Send a heartbeat."""
        self.state_machine.on_validation_start()
        self._heartbeat()

    def on_validation_batch_end(
        self, trainer: Any, pl_module: Any, *args: Any, **kwargs: Any
    ) -> None:
        """Send a heartbeat."""
        self.state_machine.on_validation_batch_end()
        self._heartbeat()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Send a heartbeat."""
        self.state_machine.on_validation_end()
        self._heartbeat()

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
        """Send a heartbeat: the one before the save. The next hook sends the one after it."""
        self._heartbeat()
        self.state_machine.on_save_checkpoint()

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
        """Remember that the run continues an earlier one, and send a heartbeat."""
        super().on_load_checkpoint(trainer, pl_module, checkpoint)
        self._heartbeat()

    def _heartbeat(self) -> None:
        if self._session is not None and self._session.heartbeat():
            self.state_machine.on_ft_heartbeat_sent()

    def _timeouts_are_valid(self) -> bool:
        assert self._session is not None
        timeouts = self._session.client.hb_timeouts
        return timeouts is not None and timeouts.are_valid

    def _finish(self, trainer: Any) -> None:
        self._heartbeat()
        if not self.calculate_timeouts or self.state_machine.has_failed:
            return
        is_wanted = self.state_machine.can_update_timeouts
        if self._calculate(trainer, "calculate_and_set_hb_timeouts", is_wanted=is_wanted):
            self.state_machine.on_ft_timeouts_updated()
