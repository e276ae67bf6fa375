# SPDX-License-Identifier: Apache-2.0
"""Local checkpoints of a Lightning training: when they are saved, and where they go."""

from __future__ import annotations

import inspect
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ._framework import framework, require

if TYPE_CHECKING:
    from datetime import timedelta

    from nvidia_resiliency_ext.checkpointing.local.base_state_dict import TensorAwareStateDict
    from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.base_manager import (
        BaseCheckpointManager,
    )

__all__ = ["LOCAL_CKPT_OPTS_KEY", "HierarchicalCheckpointIO", "LocalCheckpointCallback"]

LOCAL_CKPT_OPTS_KEY = "local_checkpoint_options"

_ModelCheckpoint: Any = framework().callbacks.ModelCheckpoint
# Lightning has no other name for what a checkpoint I/O that wraps another derives from.
_WrappingCheckpointIO: Any = vars(import_module(f"{framework().__name__}.plugins.io.wrapper"))[
    "_WrappingCheckpointIO"
]


class LocalCheckpointCallback(_ModelCheckpoint):  # type: ignore[misc] # found at run time
    """Save a local checkpoint at the end of training batches, and at no other time.

    Use it together with a `ModelCheckpoint`, and with a `HierarchicalCheckpointIO` in the strategy.
    It keeps no best checkpoints and no metrics.

    Lightning calls the hooks with `trainer`, the running trainer, and `pl_module`, the module that
    it trains; `exception`, `args` and `kwargs` are the hook's further arguments, which are not
    used.

    Args:
        every_n_train_steps: Save every n steps.
        train_time_interval: Save when this time has passed since the last save.
        async_save: Ignored; the checkpoint I/O decides whether a save runs in the background.

    Raises:
        ImportError: nvrx-ckpt is not installed.
        ValueError: Neither steps nor a time is given.

    Example:
        >>> from nvidia_resiliency_ext.ptl_resiliency.local_checkpoint_callback import (
        ...     LocalCheckpointCallback,
        ... )
        >>> callback = LocalCheckpointCallback(every_n_train_steps=100)
    """

    def __init__(
        self,
        every_n_train_steps: int | None = None,
        train_time_interval: timedelta | None = None,
        async_save: bool | None = None,
    ) -> None:
        require("checkpointing", "ckpt")
        if not every_n_train_steps and train_time_interval is None:
            raise ValueError(
                "a LocalCheckpointCallback saves at training batches only: give"
                " every_n_train_steps or train_time_interval"
            )
        super().__init__(
            every_n_train_steps=every_n_train_steps, train_time_interval=train_time_interval
        )
        self._steps, self._interval = every_n_train_steps, train_time_interval
        self._saved_step = -1
        self._saved_at = time.monotonic()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Start the timer; save nothing."""
        self._saved_step, self._saved_at = trainer.global_step, time.monotonic()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any, **kwargs: Any) -> None:
        """Save a local checkpoint when one is due; all ranks take part."""
        step = trainer.global_step
        if trainer.fast_dev_run or step == self._saved_step:  # gradients are still accumulated
            return
        is_due = bool(self._steps) and step % self._steps == 0
        if self._interval is not None and not is_due:
            age_s = time.monotonic() - self._saved_at
            is_due = trainer.strategy.broadcast(age_s >= self._interval.total_seconds())
        if not is_due:
            return
        self._saved_step, self._saved_at = step, time.monotonic()
        options = {"ckpt_type": "local", "iteration": step}
        trainer.save_checkpoint(None, storage_options={LOCAL_CKPT_OPTS_KEY: options})

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Save nothing."""

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Save nothing."""

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Save nothing."""

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Save nothing."""


class HierarchicalCheckpointIO(_WrappingCheckpointIO, ABC):  # type: ignore[misc] # run time
    """Send local checkpoints to their manager, all others to the wrapped checkpoint I/O.

    A subclass converts a trainer's checkpoint to a `TensorAwareStateDict` and back.

    Args:
        wrapped_checkpoint_io: Checkpoint I/O of global checkpoints.
        local_ckpt_manager: Saves and loads local checkpoints.
        get_global_ckpt_iteration_fn: Returns the iteration of a global checkpoint by its path.
        async_save: Whether local checkpoints are saved in the background by default.
    """

    def __init__(
        self,
        wrapped_checkpoint_io: Any,
        local_ckpt_manager: BaseCheckpointManager,
        get_global_ckpt_iteration_fn: Callable[[Any], int],
        async_save: bool = False,
    ) -> None:
        super().__init__(wrapped_checkpoint_io)
        self.local_ckpt_manager = local_ckpt_manager
        self.get_global_ckpt_iteration_fn = get_global_ckpt_iteration_fn
        self.async_save = async_save

    @classmethod
    def get_partial_wrapper_constructor(
        cls,
        local_ckpt_manager: BaseCheckpointManager,
        get_global_ckpt_iteration_fn: Callable[[Any], int],
    ) -> Callable[..., HierarchicalCheckpointIO]:
        """Return a constructor whose only argument is the wrapped checkpoint I/O."""
        return partial(
            cls,
            local_ckpt_manager=local_ckpt_manager,
            get_global_ckpt_iteration_fn=get_global_ckpt_iteration_fn,
        )

    @abstractmethod
    def to_tensor_aware_state_dict(self, checkpoint: dict[str, Any]) -> TensorAwareStateDict:
        """Convert a trainer's checkpoint to the form that the local checkpoint manager takes.

        Args:
            checkpoint: The checkpoint as Lightning passes it to `save_checkpoint`.
        """

    @abstractmethod
    def from_tensor_aware_state_dict(
        self, tensor_aware_checkpoint: TensorAwareStateDict, **kwargs: Any
    ) -> dict[str, Any]:
        """Convert a loaded local checkpoint to the form that the trainer takes.

        Args:
            tensor_aware_checkpoint: What the manager's `load` returned.
            kwargs: Options that the caller of `load_checkpoint` gave.
        """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None
    ) -> Any:
        """Save a checkpoint, locally when the options have `local_checkpoint_options`.

        Args:
            checkpoint: The trainer's checkpoint.
            path: Path of a global checkpoint; None for a local one.
            storage_options: `{"local_checkpoint_options": {"ckpt_type": "local", "iteration": n}}`
                for a local checkpoint; anything else is passed on to the wrapped plugin.

        Returns:
            For a local checkpoint the result of the manager's `save`: an `AsyncRequest` if it is
            saved in the background, else None.

        Raises:
            ValueError: A path was given for a local checkpoint.
        """
        options = (storage_options or {}).get(LOCAL_CKPT_OPTS_KEY)
        if options is None:
            return self.checkpoint_io.save_checkpoint(checkpoint, path, storage_options)
        if path is not None:
            raise ValueError(f"a local checkpoint has no path of its own, but {path!r} was given")
        return self.local_ckpt_manager.save(
            self.to_tensor_aware_state_dict(checkpoint),
            options["iteration"],
            is_async=options.get("is_async", self.async_save),
        )

    def load_checkpoint(self, path: Any, map_location: Any | None = None, **kwargs: Any) -> Any:
        """Load the local checkpoint if it is at least as new as the global one, else the latter.

        Args:
            path: The global checkpoint.
            map_location: Device mapping for the global checkpoint; not used for a local one.
            kwargs: Passed on to the wrapped plugin, or to `from_tensor_aware_state_dict`.
        """
        latest = self.local_ckpt_manager.find_latest()
        if latest < 0 or latest < self.get_global_ckpt_iteration_fn(path):
            return self.checkpoint_io.load_checkpoint(path, map_location, **kwargs)
        state, _ckpt_id = self.local_ckpt_manager.load()
        # Lightning's own options say nothing to a function whose keywords are options of its own.
        named = inspect.signature(self.from_tensor_aware_state_dict).parameters
        if "weights_only" not in named:
            kwargs.pop("weights_only", None)
        return self.from_tensor_aware_state_dict(state, **kwargs)

    def remove_checkpoint(self, path: Any) -> None:
        """Remove a global checkpoint; the manager removes local ones itself.

        Args:
            path: The global checkpoint.
        """
        self.checkpoint_io.remove_checkpoint(path)
