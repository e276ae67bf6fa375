# SPDX-License-Identifier: Apache-2.0
"""`torch.save` in the background; the file appears complete or not at all."""

from __future__ import annotations

import io
import os
import pickle
from typing import TYPE_CHECKING, Any

import torch

from nvidia_resiliency_ext.checkpointing._image import save_into, saved_size
from nvidia_resiliency_ext.checkpointing._places import place_that_fails
from nvidia_resiliency_ext.checkpointing._staged_write import StagedWrite
from nvidia_resiliency_ext.checkpointing._write_plan import (
    PLAIN_BYTES,
    FilePlan,
    ItemPlan,
    WritePlan,
)

from ._options import path_text
from .core import AsyncCallsQueue, AsyncRequest

if TYPE_CHECKING:
    from nvidia_resiliency_ext.checkpointing._staging import StagingBuffer
    from nvidia_resiliency_ext.checkpointing._write_plan import FileResult

__all__ = ["TorchAsyncCheckpoint"]


class TorchAsyncCheckpoint:
    """Saves states like `torch.save`, without waiting for the file system.

    Example:
        >>> import tempfile, torch
        >>> from nvidia_resiliency_ext.checkpointing.async_ckpt import TorchAsyncCheckpoint
        >>> checkpoint = TorchAsyncCheckpoint()
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     checkpoint.async_save({"weight": torch.ones(2)}, f"{folder}/model.pt")
        ...     checkpoint.finalize_async_save(blocking=True)
        ...     torch.load(f"{folder}/model.pt")
        {'weight': tensor([1., 1.])}
        >>> checkpoint.close()

    Args:
        persistent_queue: Keep one worker process; otherwise one runs only during a save. Default
            True.
    """

    def __init__(self, persistent_queue: bool = True) -> None:
        self.save = torch.save
        self._async_calls_queue = AsyncCallsQueue(persistent=persistent_queue)

    def _get_async_calls_queue(self) -> AsyncCallsQueue:
        return self._async_calls_queue

    def async_save(self, state_dict: Any, *args: Any, **kwargs: Any) -> None:
        """Stage a state and write it in the background; arguments as for `torch.save(obj, f, ...)`.

        When it returns, the state may be changed. A failure is raised by `finalize_async_save`.

        Args:
            state_dict: The object to save, as the first argument of `torch.save`.
            args: The other positional arguments of `torch.save`: first `f`, the path of the file.
            kwargs: Keyword arguments of `torch.save`.

        Raises:
            TypeError: `f` is not a path.
        """
        path, options = _target(*args, **kwargs)
        write = _TorchFileWrite(state_dict, path, options)
        self._async_calls_queue.schedule_async_request(AsyncRequest(write, (), []))

    def finalize_async_save(
        self, blocking: bool = False, no_dist: bool = True, terminate: bool = False
    ) -> None:
        """Finish the saves that are written.

        Args:
            blocking: Wait for all of them. Default False.
            no_dist: Check only this rank; otherwise all ranks must call this. Default True.
            terminate: Stop the worker afterwards. Default False.

        Raises:
            AsyncSaveError: A save failed.
        """
        self._async_calls_queue.maybe_finalize_async_calls(blocking, no_dist=no_dist)
        if terminate:
            self.close()

    def close(self, abort: bool = False) -> None:
        """Finish all saves of this rank, or with `abort` drop them, and stop the worker."""
        try:
            if not abort:
                self._async_calls_queue.maybe_finalize_async_calls(blocking=True, no_dist=True)
        finally:
            self._async_calls_queue.close(abort=True)


class _TorchFileWrite(StagedWrite):
    """One file of `torch.save`."""

    def __init__(self, value: Any, path: str, options: tuple[tuple[Any, ...], Any]) -> None:
        self._value = value
        self._path = path
        self._args, self._kwargs = options
        self._nbytes = 0

    def staging_bytes(self) -> int:
        try:
            self._nbytes = saved_size(self._value, self._save)
        except Exception as error:
            place = place_that_fails(self._value, lambda v: _Probe(io.BytesIO()).dump(v))
            raise TypeError(f"{place} cannot be saved to {self._path}: {error}") from error
        return self._nbytes

    def stage(self, buffer: StagingBuffer) -> WritePlan:
        shape = save_into(buffer.view[: self._nbytes], self._value, self._save)
        self._value = None
        item = ItemPlan(
            os.path.basename(self._path), 0, self._nbytes, PLAIN_BYTES if shape is None else 0
        )
        shapes = [] if shape is None else [shape]
        return WritePlan([FilePlan(self._path, 0, self._nbytes, [item])], shapes)

    def written(self, manifest: FileResult | None) -> None:
        pass

    def _save(self, value: Any, stream: Any) -> None:
        torch.save(value, stream, *self._args, **self._kwargs)


class _Probe(pickle.Pickler):
    """Pickles all but the data of tensors."""

    def persistent_id(self, obj: Any) -> Any:
        """Return an empty id for a tensor or storage, whose data is left out; None for all else."""
        return "" if isinstance(obj, (torch.Tensor, torch.UntypedStorage)) else None


def _target(*args: Any, **kwargs: Any) -> tuple[str, tuple[tuple[Any, ...], dict[str, Any]]]:
    """Return the path among the arguments of `torch.save`, and the other ones."""
    if args:
        target, *rest = args
    else:
        rest = []
        target = kwargs.pop("f", None)
    if not isinstance(target, (str, os.PathLike)):
        raise TypeError(f"a path is needed to save to, not {type(target).__name__}")
    # A link stays what it is, as with torch.save: the file that it names is replaced.
    return os.path.realpath(path_text(target)), (tuple(rest), kwargs)
