# SPDX-License-Identifier: Apache-2.0
"""Check whether this rank can continue: the base class and the built-in checks.

A check raises when the rank is unhealthy. If there is nothing to check, no GPU or no adapter, it
logs one line and passes.
"""

from __future__ import annotations

import abc
import logging
from datetime import timedelta
from typing import Any, ClassVar

from nvidia_resiliency_ext.shared_utils.health_check import HealthResult

from ._inputs import call_bounded, check_duration, check_integer, device_of_rank, is_in_use
from .exception import HealthCheckError, RestartError
from .state import FrozenState

__all__ = [
    "ChainedGPUHealthCheck",
    "ChainedNVLHealthCheck",
    "ChainedNicHealthCheck",
    "CudaHealthCheck",
    "FaultCounter",
    "FaultCounterExceeded",
    "HealthCheck",
]

logger = logging.getLogger("nvrx")

_DEFAULT_TIMEOUT = timedelta(seconds=30)


class HealthCheck(abc.ABC):
    """Called on each rank at the start of an iteration, and after `Finalize` before the next.

    At the start an exception makes all ranks restart; after `Finalize` it makes this rank leave.
    """

    @abc.abstractmethod
    def __call__(self, state: FrozenState) -> FrozenState:
        """Check the rank, raise if it is unhealthy, return `state`; subclasses implement it."""
        raise NotImplementedError


class CudaHealthCheck(HealthCheck):
    """Check that the rank's CUDA device still answers; pass if the process does not use CUDA.

    Args:
        timeout: Longest time of both synchronisations, a `timedelta` of at least 0; default: 30 s.

    Raises:
        TypeError: The timeout is not a `timedelta`.

    Example:
        >>> from datetime import timedelta
        >>> from nvidia_resiliency_ext.inprocess import Compose
        >>> from nvidia_resiliency_ext.inprocess.health_check import CudaHealthCheck, FaultCounter
        >>> check = Compose(CudaHealthCheck(timedelta(seconds=20)), FaultCounter(max_rank_faults=3))
    """

    def __init__(self, timeout: timedelta = _DEFAULT_TIMEOUT) -> None:
        check_duration("timeout", timeout)
        self.timeout = timeout

    def __call__(self, state: FrozenState) -> FrozenState:
        """Synchronise the device twice, in a thread, and return `state`.

        Raises:
            exception.TimeoutError: The device has not answered in time.
            RuntimeError: The device is in error.
        """
        device = device_of_rank()
        if device is not None:
            name = f"{type(self).__name__}-{state.rank}"
            call_bounded(name, lambda: _synchronize_twice(device), self.timeout)
        return state


class FaultCounter(HealthCheck):
    """Limit the number of restarts that were caused by this rank's own function.

    It counts within one call of the wrapped function.

    Args:
        max_rank_faults: The most; `None` for any number.

    Raises:
        TypeError: It is not an integer.
    """

    def __init__(self, max_rank_faults: int | None = None) -> None:
        if max_rank_faults is not None:
            check_integer("max_rank_faults", max_rank_faults)
        self.max_rank_faults = max_rank_faults
        self.faults_count = 0
        self._iteration = 0

    def __call__(self, state: FrozenState) -> FrozenState:
        """Count a fault if `state.fn_exception` is set; `FaultCounterExceeded` for one too many."""
        if state.iteration < self._iteration:
            self.faults_count = 0  # iterations only start again with a new call
        self._iteration = state.iteration
        if state.fn_exception is not None:
            self.faults_count += 1
            if self.max_rank_faults is not None and self.faults_count > self.max_rank_faults:
                raise FaultCounterExceeded(
                    f"faults_count={self.faults_count} / max_rank_faults={self.max_rank_faults}"
                )
        return state


class FaultCounterExceeded(RestartError):  # noqa: N818 - the name that users catch
    """This rank's function has failed more often than `FaultCounter` allows."""


class _ChainedHealthCheck(HealthCheck):
    """Ask a check of nvrx-common, made with this object, as some compare with what was then."""

    _skip_level = logging.INFO
    _check_name: ClassVar[str]

    def __init__(self, device_index: int | None = None) -> None:
        if device_index is not None:
            check_integer("device_index", device_index, least=0)
        self.device_index = device_index
        self._cannot_run = self._skipped_for = ""
        self._check: Any = None
        try:
            # Not before: it brings what talks to the driver.
            from nvidia_resiliency_ext.shared_utils import health_check

            self._check = getattr(health_check, self._check_name)(device_index=device_index)
        except Exception as error:  # noqa: BLE001 - a check that cannot run is no failed check
            self._cannot_run = f"it cannot be set up: {type(error).__name__}: {error}"

    def __call__(self, state: FrozenState) -> FrozenState:
        """Check the device and return `state`; `HealthCheckError` names why it is unhealthy."""
        reason = self._cannot_run or self._find_no_device()
        if reason:
            if reason != self._skipped_for:
                self._skipped_for = reason
                logger.log(self._skip_level, "%s is skipped: %s", type(self).__name__, reason)
            return state
        self._check.skip_level = self._skip_level
        result: HealthResult = self._check.check()
        if result.status == "unhealthy":
            self._on_unhealthy(result)
        return state

    def _on_unhealthy(self, result: HealthResult) -> None:
        raise HealthCheckError(
            f"health check {result.name} ({result.component}) failed: {result.reason}"
        )

    def _find_no_device(self) -> str:
        """Return why there is nothing to check, "" where there is something."""
        # A rank that uses CUDA has had a device: if that is not there any more, it is lost.
        if self.device_index is None or is_in_use():
            return ""
        if self._check.has_device(self.device_index) is not False:
            return ""
        return f"there is no GPU for local rank {self.device_index}, and CUDA is not in use"


class ChainedGPUHealthCheck(_ChainedHealthCheck):
    """Check that the driver requests no recovery of the GPU.

    Args:
        device_index: Local rank whose GPU is checked; `None` checks all GPUs of the node.
    """

    _check_name = "GPUHealthCheck"


class ChainedNVLHealthCheck(_ChainedHealthCheck):
    """Check the GPU's NVLinks; only log the result, because a job can run without some of them.

    Args:
        device_index: Local rank whose GPU is checked; `None` checks all GPUs of the node.
    """

    _check_name = "NVLHealthCheck"

    def _on_unhealthy(self, result: HealthResult) -> None:
        # The check itself has logged it.
        del result


class ChainedNicHealthCheck(_ChainedHealthCheck):
    """Check whether a link of the GPU's adapter has gone down since this object was created.

    Args:
        device_index: Local rank whose adapter is checked; `None` checks none.
    """

    _check_name = "NicHealthCheck"


def log_skips_at_debug(check: Any) -> None:
    """Have a check of devices say only at DEBUG that it is skipped: nobody has asked for it."""
    check._skip_level = logging.DEBUG  # noqa: SLF001 - of this module


def _synchronize_twice(device: int) -> None:
    import torch

    try:
        torch.cuda.synchronize(device)
    except Exception as error:  # noqa: BLE001 - what lasts is raised again below
        # What was under way when the fault happened may fail here, once, on a sound device.
        logger.warning("CUDA device %d reports %s; looking again", device, error)
    torch.cuda.synchronize(device)
