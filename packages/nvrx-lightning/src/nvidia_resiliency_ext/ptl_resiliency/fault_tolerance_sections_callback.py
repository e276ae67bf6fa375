# SPDX-License-Identifier: Apache-2.0
"""Sections of a Lightning training (setup, step, checkpointing), for `ft_launcher`'s monitors."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from nvidia_resiliency_ext.shared_utils.attribute_wrapping import WrappedAttribute

from ._fault_tolerance import FaultToleranceBase
from ._framework import require
from ._training_state import section_update
from ._utils import SimulatedFaultParams

if TYPE_CHECKING:
    from nvidia_resiliency_ext.fault_tolerance import WorkloadControlRequest

__all__ = ["FaultToleranceSectionsCallback"]

SETUP, STEP, CHECKPOINTING = "setup", "step", "checkpointing"
_STRATEGY_SECTIONS = {
    "training_step": STEP,
    "validation_step": STEP,
    "save_checkpoint": CHECKPOINTING,
    "remove_checkpoint": CHECKPOINTING,
}
_ASYNC_FINALIZE = "maybe_finalize_save_checkpoint"


class FaultToleranceSectionsCallback(FaultToleranceBase):
    """Open and close the sections `setup`, `step` and `checkpointing`, calculate their timeouts.

    The fault tolerance configuration must define exactly these three sections. `setup` lasts until
    the first training or validation batch. Methods of the strategy are wrapped during a `fit`
    only; a section closes also when its method raises.

    Lightning calls the hooks with `trainer`, the running trainer, and `pl_module`, the module that
    it trains; `args`, `kwargs` and `kw` are the hook's further arguments, which are not used.

    Args:
        autoresume: As in `FaultToleranceCallback`.
        calculate_timeouts: As in `FaultToleranceCallback`. Calculated at the first batch end after
            a saved checkpoint, and at the end: `setup` if a checkpoint was loaded, `step` after
            more than 16 training iterations, `checkpointing` if one was saved and not in the
            background; at the end also the time out of sections, if the first two were and a
            checkpoint was saved.
        simulated_fault_params: A fault to inject; `SimulatedFaultParams` or a mapping.
        exp_dir: As in `FaultToleranceCallback`.
        logger_name: Name of the logger.
        exc_handling_policy: Called with an exception that ends the training; returns the
            `WorkloadControlRequest` that is sent to the launcher. `ShutdownWorkload` also makes
            the file that `FAULT_TOL_FINISHED_FLAG_FILE` names.
        on_monitor_loss: As in `FaultToleranceCallback`.

    Raises:
        ImportError: nvrx-ft is not installed.
        ValueError: An argument is wrong.

    Example:
        >>> from nvidia_resiliency_ext.ptl_resiliency import FaultToleranceSectionsCallback
        >>> callback = FaultToleranceSectionsCallback(autoresume=False, calculate_timeouts=True)
    """

    TIMEOUTS_FILENAME = "_ft_state_.json"
    MIN_TR_ITERS_FOR_STEP_TIMEOUT_UPDATE = 16

    def __init__(  # noqa: PLR0913 - the signature is given
        self,
        autoresume: bool,
        calculate_timeouts: bool,
        simulated_fault_params: SimulatedFaultParams | Mapping[str, Any] | None = None,
        exp_dir: str | os.PathLike[str] | None = None,
        logger_name: str = "nemo_logger.FaultToleranceCallback",
        exc_handling_policy: Callable[[Exception], WorkloadControlRequest] | None = None,
        *,
        on_monitor_loss: str = "warn",
    ) -> None:
        super().__init__(
            autoresume, calculate_timeouts, simulated_fault_params, exp_dir, logger_name,
            on_monitor_loss, 0.0,
        )  # fmt: skip
        self.exc_handling_policy = exc_handling_policy
        self._wrapped: list[WrappedAttribute] = []
        self._is_async_save = False
        self._is_setup_open = False
        self._is_update_due = False
        self._checkpointing_depth = 0

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Connect, open the section `setup` and wrap the strategy's methods; see the base class.

        Args:
            trainer: The trainer; its strategy's methods are wrapped.
            pl_module: Not used.
            stage: The trainer's stage; nothing happens unless it is "fit".
        """
        super().setup(trainer, pl_module, stage)
        if not self.is_initialized or self._wrapped:
            return
        self._is_update_due, self._checkpointing_depth = False, 0
        self._is_setup_open = self._call("start_section", SETUP)
        strategy = trainer.strategy
        for name, section in _STRATEGY_SECTIONS.items():
            around = self._saving if name == "save_checkpoint" else self._around(section)
            self._wrapped.append(_run_inside(strategy, name, around))
        checkpoint_io = strategy.checkpoint_io
        self._is_async_save = hasattr(checkpoint_io, _ASYNC_FINALIZE)
        if self._is_async_save:
            around = self._around(CHECKPOINTING)
            self._wrapped.append(_run_inside(checkpoint_io, _ASYNC_FINALIZE, around))

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Record that training begins."""
        self.state_machine.on_train_start()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *args: Any, **kw: Any) -> None:
        """Close the section `setup` at the first batch."""
        self._close_setup()

    def on_validation_batch_start(
        self, trainer: Any, pl_module: Any, *args: Any, **kwargs: Any
    ) -> None:
        """Close the section `setup` at the first batch."""
        self._close_setup()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any, **kwargs: Any) -> None:
        """Count the iteration; after a saved checkpoint, calculate timeouts."""
        self.state_machine.on_train_batch_end()
        if self._is_update_due:
            self._is_update_due = False
            self._update(trainer, is_final=False)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Record that training ended."""
        self.state_machine.on_train_end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Call the policy, send its request to the launcher, and end the run.

        Args:
            trainer: The trainer.
            pl_module: Not used.
            exception: What ended the run; the policy gets it unless it is no `Exception` (an
                interrupt).

        Raises:
            TypeError: The policy did not return a `WorkloadControlRequest`.
        """
        try:
            if self.exc_handling_policy is not None and isinstance(exception, Exception):
                self._apply_policy(trainer, self.exc_handling_policy(exception))
        finally:
            super().on_exception(trainer, pl_module, exception)

    def _apply_policy(self, trainer: Any, request: WorkloadControlRequest) -> None:
        data = require("fault_tolerance.data", "ft")
        if not isinstance(request, data.WorkloadControlRequest):
            raise TypeError(
                f"exc_handling_policy must return a WorkloadControlRequest, not {request!r}"
            )
        if request.action is data.WorkloadAction.ShutdownWorkload:
            self._touch_finished_flag(trainer)
        if self._session is None:
            return
        try:
            self._session.client.send_workload_control_request(request)
        except (OSError, RuntimeError) as error:
            self.logger.warning("the launcher cannot be asked for %s: %s", request.action, error)

    def _check_config(self) -> None:
        assert self._session is not None
        timeouts = self._session.client.section_timeouts
        found = set() if timeouts is None else set(timeouts.section)
        wanted = {SETUP, STEP, CHECKPOINTING}
        if found != wanted:
            raise ValueError(
                f"rank_section_timeouts must define the sections {sorted(wanted)}, not"
                f" {sorted(found)}; give ft_launcher --ft-rank-section-timeouts, for example"
                " setup:600,step:180,checkpointing:420"
            )

    def _timeouts_are_valid(self) -> bool:
        assert self._session is not None
        timeouts = self._session.client.section_timeouts
        return timeouts is not None and timeouts.are_valid

    def _finish(self, trainer: Any) -> None:
        self._close_setup()
        self._update(trainer, is_final=True)

    def _end_run(self) -> None:
        while self._wrapped:
            self._wrapped.pop().restore()
        super()._end_run()

    def _update(self, trainer: Any, *, is_final: bool) -> None:
        if not self.calculate_timeouts:
            return
        update = section_update(
            self.state_machine,
            min_iterations=self.MIN_TR_ITERS_FOR_STEP_TIMEOUT_UPDATE,
            is_async_save=self._is_async_save,
            is_final=is_final,
        )
        if update is not None:
            self._calculate(
                trainer, "calculate_and_set_section_timeouts",
                selected_sections=update.sections, calc_out_of_section=update.out_of_section,
            )  # fmt: skip

    def _close_setup(self) -> None:
        if self._is_setup_open:
            self._is_setup_open = False
            self._call("end_section", SETUP)

    def _around(self, section: str) -> Callable[[], contextlib.AbstractContextManager[None]]:
        return lambda: self._section(section)

    @contextlib.contextmanager
    def _saving(self) -> Iterator[None]:
        with self._section(CHECKPOINTING):
            yield
        self.state_machine.on_save_checkpoint()
        self._is_update_due = True

    @contextlib.contextmanager
    def _section(self, section: str) -> Iterator[None]:
        """Open a section for one call; calls for `checkpointing` may nest, the outermost counts."""
        if section == STEP:
            self._close_setup()  # the sanity check calls validation_step
        if section == CHECKPOINTING:
            self._checkpointing_depth += 1
        is_open = self._checkpointing_depth <= 1 if section == CHECKPOINTING else True
        is_open = is_open and self._call("start_section", section)
        try:
            yield
        finally:
            if section == CHECKPOINTING:
                self._checkpointing_depth -= 1
            if is_open:
                self._call("end_section", section)

    def _call(self, method: str, section: str) -> bool:
        session = self._session
        return session is not None and session.call(getattr(session.client, method), section)


def _run_inside(
    owner: object, name: str, around: Callable[[], contextlib.AbstractContextManager[object]]
) -> WrappedAttribute:
    """Run each call of a method inside a context manager of its own, until it is restored."""
    method = getattr(owner, name)

    def replacement(wrapped: WrappedAttribute) -> Callable[..., Any]:
        @functools.wraps(method)
        def run(*args: Any, **kwargs: Any) -> Any:
            if not wrapped.is_active:
                return method(*args, **kwargs)
            with around():
                return method(*args, **kwargs)

        return run

    return WrappedAttribute(owner, name, replacement)
