# SPDX-License-Identifier: Apache-2.0
"""What the two fault tolerance callbacks share: the life of one `fit` with its monitor session."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ._framework import Callback, require
from ._monitor_session import LOSS_POLICIES, MonitorSession, write_timeouts
from ._training_state import TrainingStateMachine
from ._utils import SimulatedFaultParams, parse_simulated_fault_params, setup_simulated_fault

if TYPE_CHECKING:
    from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient
    from nvidia_resiliency_ext.shared_utils.inject_fault import DispatchedFault

__all__ = ["FINISHED_FLAG_VARIABLE", "FaultToleranceBase"]

FINISHED_FLAG_VARIABLE = "FAULT_TOL_FINISHED_FLAG_FILE"
_FIT = "fit"


class FaultToleranceBase(Callback):  # type: ignore[misc] # Lightning is found at run time
    """Own a run's monitor session from `setup` to `teardown` or `on_exception`."""

    TIMEOUTS_FILENAME = "_ft_state.json"
    FT_DIR_NAME = "ft_state"

    def __init__(  # noqa: PLR0913, PLR0917 - the signature is given
        self,
        autoresume: bool,
        calculate_timeouts: bool,
        simulated_fault_params: SimulatedFaultParams | Mapping[str, Any] | None,
        exp_dir: str | os.PathLike[str] | None,
        logger_name: str,
        on_monitor_loss: str,
        min_heartbeat_interval: float,
    ) -> None:
        require("fault_tolerance", "ft")
        if on_monitor_loss not in LOSS_POLICIES:
            policies = " or ".join(LOSS_POLICIES)
            raise ValueError(f"on_monitor_loss must be {policies}, not {on_monitor_loss!r}")
        if not min_heartbeat_interval >= 0.0:
            raise ValueError(
                f"min_heartbeat_interval must be 0 or more seconds, not {min_heartbeat_interval!r}"
            )
        super().__init__()
        self.autoresume = autoresume
        self.calculate_timeouts = calculate_timeouts
        self.simulated_fault_params = parse_simulated_fault_params(simulated_fault_params)
        self.exp_dir = exp_dir
        self.on_monitor_loss = on_monitor_loss
        self.min_heartbeat_interval = min_heartbeat_interval
        self.logger = logging.getLogger(logger_name)
        self.state_machine = TrainingStateMachine()
        self._session: MonitorSession | None = None
        self._timeouts_path = ""
        self._fault: DispatchedFault | None = None

    @property
    def is_initialized(self) -> bool:
        """Whether a run is under way and has a session with its monitor."""
        return self._session is not None

    @property
    def fault_tol_client(self) -> RankMonitorClient | None:
        """The client of the run that is under way, else None."""
        return None if self._session is None else self._session.client

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Connect to the monitor and load the timeouts that an earlier run has calculated.

        Args:
            trainer: The trainer; without `exp_dir`, its `log_dir` is where calculated timeouts are
                read.
            pl_module: Not used.
            stage: The trainer's stage; nothing happens unless it is "fit".

        Raises:
            RuntimeError: `autoresume` without the environment variable that names the flag file,
                or the configuration leaves timeouts open and `calculate_timeouts` is off.
            RankMonitorClientError: The program was not started by `ft_launcher`.
            ValueError: `exp_dir` does not exist.
        """
        if stage != _FIT:
            return
        if self.autoresume and not os.environ.get(FINISHED_FLAG_VARIABLE):
            raise RuntimeError(
                f"autoresume=True needs the environment variable {FINISHED_FLAG_VARIABLE}: the path"
                " of a file that is made when the training is complete"
            )
        self._end_run()  # of a fit that ended without a hook
        self.state_machine.on_setup()
        self._session = MonitorSession(
            self.logger, self.on_monitor_loss, self.min_heartbeat_interval
        )
        try:
            self._check_config()
            self._load_timeouts(trainer)
            if not self.calculate_timeouts:
                self._require_valid_timeouts()
            if self.simulated_fault_params is not None:
                self._fault = setup_simulated_fault(self.simulated_fault_params)
        except BaseException:
            self._end_run()
            raise

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Save calculated timeouts, write the flag file after a complete training, disconnect.

        Args:
            trainer: The trainer; tells whether training is complete.
            pl_module: Not used.
            stage: The trainer's stage; nothing happens unless it is "fit".
        """
        if stage != _FIT or self._session is None:
            return
        self.state_machine.on_teardown()
        try:
            if self.autoresume and self.state_machine.is_training_completed(trainer):
                self._touch_finished_flag(trainer)
            self._finish(trainer)
        finally:
            self._end_run()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """End the run after an exception; timeouts are calculated after a clean stop only.

        Args:
            trainer: The trainer.
            pl_module: Not used.
            exception: What ended the run.
        """
        if self._session is None:
            return
        self.state_machine.on_exception(exception)
        try:
            self._finish(trainer)
        finally:
            self._end_run()

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
        """Remember that the run continues an earlier one.

        Args:
            trainer: Not used.
            pl_module: Not used.
            checkpoint: Not used.
        """
        self.state_machine.on_load_checkpoint()

    def _check_config(self) -> None:
        """Raise ValueError where the launcher's configuration does not suit the callback."""

    def _require_valid_timeouts(self) -> None:
        if not self._timeouts_are_valid():
            raise RuntimeError(
                "the fault tolerance configuration leaves timeouts open (null); set them, or"
                " calculate_timeouts=True"
            )

    def _timeouts_are_valid(self) -> bool:
        raise NotImplementedError

    def _finish(self, trainer: Any) -> None:
        """Run the last step of a run, while its session is open."""
        raise NotImplementedError

    def _load_timeouts(self, trainer: Any) -> None:
        """Find the file of timeouts on rank 0, and load on all ranks what an earlier run wrote.

        Raises:
            OSError: Rank 0 cannot make the directory or read the file (a RuntimeError elsewhere).
            ValueError: `exp_dir` does not exist on rank 0 (a RuntimeError elsewhere).
        """
        root = trainer.log_dir or trainer.default_root_dir  # `log_dir` is a collective
        path, state, problem = "", None, None
        if trainer.is_global_zero:
            try:
                path, state = self._open_timeouts(root)
            except (OSError, ValueError) as error:
                problem = error
        text = "" if problem is None else f"{type(problem).__name__}: {problem}"
        path, state, text = trainer.strategy.broadcast((path, state, text))
        if problem is not None:
            raise problem
        if text:
            raise RuntimeError(f"rank 0 cannot use the file of timeouts ({text})")
        self._timeouts_path = path
        if state is not None and not trainer.is_global_zero:
            assert self._session is not None
            self._session.client.load_state_dict(state)
        if state is not None:
            self.logger.info("fault tolerance timeouts were loaded from %s", path)

    def _open_timeouts(self, root: str) -> tuple[str, dict[str, Any] | None]:
        """Return the path of the timeouts file, and on this rank the timeouts in it."""
        assert self._session is not None
        if self.exp_dir is None:
            folder = os.path.join(root, self.FT_DIR_NAME)
            os.makedirs(folder, exist_ok=True)
        else:
            folder = os.fspath(self.exp_dir)
            if not os.path.isdir(folder):
                raise ValueError(f"exp_dir {folder!r} is no directory; make it first")
        path = os.path.join(folder, self.TIMEOUTS_FILENAME)
        return path, self._session.load_timeouts(path) if self.calculate_timeouts else None

    def _calculate(
        self, trainer: Any, method: str, *, is_wanted: bool = True, **options: Any
    ) -> bool:
        """Calculate timeouts on all ranks, and keep them in the file; return whether it was done.

        All ranks call this, also those that have no monitor or nothing measured: calculating is a
        collective, so it is done on all ranks or on none. A failure here costs nothing but better
        timeouts, so it never ends a run.

        Args:
            trainer: Lightning's trainer.
            method: Method of the client.
            is_wanted: This rank has measured what is needed.
            options: Arguments of the method.
        """
        assert self._session is not None
        is_ready = is_wanted and self._session.is_connected
        if not trainer.strategy.reduce_boolean_decision(is_ready, all=True):
            self.logger.info("the timeouts are not calculated: a rank is not ready or not watched")
            return False
        errors = require("fault_tolerance.timeouts_calc", "ft").TimeoutsCalcError
        done = False

        def calculate() -> None:
            nonlocal done
            assert self._session is not None
            client = self._session.client
            try:
                done = getattr(client, method)(**options, skip_if_not_ready=True)
            except errors as error:
                self.logger.warning("the timeouts are not calculated: %s", error)
                return
            if done and trainer.is_global_zero:
                self._write(dict(client.state_dict()))

        self._session.call(calculate)
        return done

    def _write(self, state: dict[str, Any]) -> None:
        try:
            write_timeouts(self._timeouts_path, state)
        except OSError as error:
            self.logger.warning("the timeouts cannot be kept in %s: %s", self._timeouts_path, error)
        else:
            self.logger.info("fault tolerance timeouts were saved to %s", self._timeouts_path)

    def _touch_finished_flag(self, trainer: Any) -> None:
        path = os.environ.get(FINISHED_FLAG_VARIABLE)
        if not (trainer.is_global_zero and path):
            return
        with open(path, "ab"):
            os.utime(path)
        self.logger.info("the training is complete: %s was made", path)

    def _end_run(self) -> None:
        """Cancel the simulated fault and disconnect."""
        if self._fault is not None:
            self._fault.cancel()
            self._fault = None
        session, self._session = self._session, None
        if session is not None:
            session.close()
