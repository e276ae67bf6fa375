# SPDX-License-Identifier: Apache-2.0
"""Callbacks that clean up a rank after a fault: the base class, and one with a time limit."""

from __future__ import annotations

import abc
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from ._inputs import call_bounded, check_callable, check_duration, device_of_rank
from .state import FrozenState

__all__ = ["Finalize", "ThreadedFinalize"]


class Finalize(abc.ABC):
    """Called on each rank after the abort, when the function has ended.

    An exception makes this rank leave the wrapper.
    """

    @abc.abstractmethod
    def __call__(self, state: FrozenState) -> FrozenState:
        """Clean up after the function was left, and return `state`; subclasses implement it."""
        raise NotImplementedError


class ThreadedFinalize(Finalize):
    """Calls a function in a thread and waits for it no longer than the timeout.

    The thread has the rank's CUDA device as its current one, if the process uses CUDA.

    Args:
        timeout: How long the function may take.
        fn: What is called.
        args: Its positional arguments.
        kwargs: Its keyword arguments.

    Raises:
        TypeError: An argument has the wrong type.

    Example:
        >>> import gc
        >>> from datetime import timedelta
        >>> from nvidia_resiliency_ext.inprocess.finalize import ThreadedFinalize
        >>> finalize = ThreadedFinalize(timedelta(seconds=10), gc.collect)
    """

    def __init__(
        self,
        timeout: timedelta,
        fn: Callable[..., Any],
        args: tuple[Any, ...] | None = (),
        kwargs: dict[str, Any] | None = None,
    ) -> None:
        check_duration("timeout", timeout)
        check_callable("fn", fn)
        self.timeout = timeout
        self.fn = fn
        self.args = () if args is None else tuple(args)
        self.kwargs = {} if kwargs is None else dict(kwargs)

    def __call__(self, state: FrozenState) -> FrozenState:
        """Run the function and return `state`.

        Raises:
            exception.TimeoutError: The function has not ended in time.
            BaseException: Raised by the function.
        """
        # Asked here: another thread has another current device.
        device = device_of_rank()
        call_bounded(f"{type(self).__name__}-{state.rank}", lambda: self._run(device), self.timeout)
        return state

    def _run(self, device: int | None) -> None:
        if device is None:
            self.fn(*self.args, **self.kwargs)
            return
        import torch

        with torch.cuda.device(device):
            self.fn(*self.args, **self.kwargs)
