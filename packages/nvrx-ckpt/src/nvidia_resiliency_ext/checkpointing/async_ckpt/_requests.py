# SPDX-License-Identifier: Apache-2.0
"""Define `AsyncRequest`, and convert requests of other frameworks to it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from nvidia_resiliency_ext.checkpointing.utils import debug_time

if TYPE_CHECKING:
    from collections.abc import Callable

PAYLOAD_INDEX = 1
"""The positional argument that is replaced by what `preload_fn` returns."""


class AsyncRequest(NamedTuple):
    """A function to run outside of the trainer, and the functions that the trainer runs after it.

    Args:
        async_fn: Work to do; None for nothing.
        async_fn_args: Its positional arguments. Number 1 is replaced by the result of `preload_fn`.
        finalize_fns: Called in order on the trainer once every rank is done.
        async_fn_kwargs: Its keyword arguments; None means none.
        preload_fn: Copies data from device to host; called without arguments when it is scheduled.
        is_frozen: Whether finalize functions can no longer be added.
        call_idx: Index in the queue.
    """

    async_fn: Callable[..., Any] | None
    async_fn_args: tuple[Any, ...]
    finalize_fns: list[Callable[[], Any]]
    async_fn_kwargs: dict[str, Any] | None = None
    preload_fn: Callable[[], Any] | None = None
    is_frozen: bool = False
    call_idx: int = 0

    def add_finalize_fn(self, fn: Callable[[], Any]) -> None:
        """Add a function to call once every rank is done.

        Args:
            fn: The function; it takes no argument and runs on every rank, in the order of addition.

        Raises:
            RuntimeError: The request is frozen.
        """
        if self.is_frozen:
            raise RuntimeError("finalize functions cannot be added to a request that is frozen")
        self.finalize_fns.append(fn)

    def freeze(self) -> AsyncRequest:
        """Return a copy to which nothing can be added."""
        return self._replace(is_frozen=True)

    def loaded_args(self) -> tuple[Any, ...]:
        """Return the positional arguments, with what `preload_fn` returns in its place."""
        if self.preload_fn is None:
            return tuple(self.async_fn_args)
        args = list(self.async_fn_args)
        args[PAYLOAD_INDEX] = self.preload_fn()
        return tuple(args)

    def execute_sync(self) -> None:
        """Do all of it here and now; all ranks wait for each other before they finalise."""
        if self.async_fn is not None:
            self.async_fn(*self.loaded_args(), **(self.async_fn_kwargs or {}))
        if dist.is_initialized():
            dist.barrier()
        self.execute_finalize_fns(validate_matching_call_idx=False)

    def execute_finalize_fns(self, validate_matching_call_idx: bool = True) -> int:
        """Call the finalize functions and return the index of the call.

        Args:
            validate_matching_call_idx: Compare the index over all ranks afterwards.

        Raises:
            AssertionError: Another rank finalised another call.
        """
        with debug_time("finalize_fn"):
            for fn in self.finalize_fns:
                fn()
        if validate_matching_call_idx and dist.is_initialized():
            largest = torch.tensor([self.call_idx], dtype=torch.int64, device=_device())
            dist.all_reduce(largest, op=dist.ReduceOp.MAX)
            if int(largest) != self.call_idx:
                raise AssertionError(
                    f"this rank finalises call {self.call_idx}, another one call {int(largest)}"
                )
        return self.call_idx


def converted(request: Any) -> AsyncRequest:
    """Return a request of any type with the same leading fields as ours.

    Raises:
        TypeError: It has not even the first three fields.
    """
    if isinstance(request, AsyncRequest):
        return request
    if hasattr(request, "_asdict"):
        fields = request._asdict()
    else:
        names = AsyncRequest._fields
        fields = {name: getattr(request, name) for name in names if hasattr(request, name)}
    known = {name: value for name, value in fields.items() if name in AsyncRequest._fields}
    try:
        return AsyncRequest(**known)
    except TypeError as error:
        raise TypeError(f"{type(request).__name__} is no request for a save: {error}") from None


def _device() -> torch.device:
    config = str(dist.get_backend_config())
    if "cpu:" in config or config == "gloo":
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())
