# SPDX-License-Identifier: Apache-2.0
"""Aborts of what other packages keep across iterations; none of them is imported at start."""

from __future__ import annotations

import importlib
import importlib.util
import logging
from typing import Any

from nvidia_resiliency_ext.inprocess.state import FrozenState
from nvidia_resiliency_ext.shared_utils.abort_hooks import run_abort_hooks

from .base import Abort

__all__ = ["AbortPersistentCheckpointProcesses", "AbortTransformerEngine"]

logger = logging.getLogger("nvrx")

_ENGINE = "transformer_engine"
_USER_BUFFERS = "transformer_engine.pytorch.module.base"
# The second is where newer versions keep it.
_FP8_ROOMS = ("transformer_engine.pytorch.fp8", "transformer_engine.pytorch.quantization")


class AbortTransformerEngine(Abort):
    """Destroys TransformerEngine's user buffers and resets its FP8 state, where it is installed.

    It must run after `AbortTorchDistributed`: in a `Compose` it stands before it.
    """

    def __call__(self, state: FrozenState) -> FrozenState:
        """Free Transformer Engine's communication buffers and reset its FP8 state.

        Args:
            state: The rank's state when the fault was seen.
        """
        if importlib.util.find_spec(_ENGINE) is None:
            return state
        try:
            base = _import(_USER_BUFFERS)
            if base is not None:
                base.destroy_ub()
        finally:
            manager = _fp8_manager()
            if manager is not None:
                manager.reset()
        return state


class AbortPersistentCheckpointProcesses(Abort):
    """Ends the workers of asynchronous checkpoints: runs the abort hooks that are registered."""

    def __call__(self, state: FrozenState) -> FrozenState:
        """Run all registered abort hooks.

        Args:
            state: The rank's state when the fault was seen.

        Raises:
            Exception: Raised by the first hook that failed, after all hooks ran.
        """
        failures = run_abort_hooks()
        if failures:
            raise failures[0].error
        return state


def _fp8_manager() -> Any:
    for name in _FP8_ROOMS:
        manager = getattr(_import(name), "FP8GlobalStateManager", None)
        if manager is not None:
            return manager
    return None


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        logger.debug("nothing to abort in %s: %s", name, error)
        return None
