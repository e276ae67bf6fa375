# SPDX-License-Identifier: Apache-2.0
"""Functions with their arguments on the way to a worker process.

Plain tensors travel by value in the staging buffer and arrive as views of it; the rest is pickled.
Only our own child gets these bytes, in memory that has no name.
"""

from __future__ import annotations

import io
import multiprocessing
import multiprocessing.spawn
import pickle
from typing import TYPE_CHECKING, Any

import torch

from nvidia_resiliency_ext.checkpointing._image import (
    copies_left,
    is_plain,
    saved_stride,
    stage_copies,
)
from nvidia_resiliency_ext.checkpointing._staging import round_up

if TYPE_CHECKING:
    from nvidia_resiliency_ext.checkpointing._staging import StagingBuffer

_ALIGNMENT = 64


class FunctionPayload:
    """A function and its arguments, pickled apart from the data of their tensors.

    Args:
        function: What to call; importable in another process, like its arguments.
        args: Positional arguments.
        kwargs: Keyword arguments.

    Raises:
        Exception: Whatever pickling raises.
    """

    def __init__(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._tensors: list[tuple[int, torch.Tensor]] = []
        self.nbytes = 0
        self.pinned = False
        stream = io.BytesIO()
        _Pickler(stream, self).dump((function, args, kwargs))
        # Such a function gets bytes where there were tensors: it needs neither torch nor the
        # user's modules, which take seconds to import.
        self.takes_bytes = bool(getattr(function, "takes_bytes", False))
        self.code = stream.getvalue() if self.takes_bytes else _packed(stream.getvalue())

    def add(self, tensor: torch.Tensor) -> tuple[object, ...]:
        """Record a tensor and return its reference in the pickle: position, type and layout."""
        start = self.nbytes
        self._tensors.append((start, tensor))
        self.nbytes = round_up(start + tensor.nbytes, _ALIGNMENT)
        self.pinned = self.pinned or tensor.is_cuda
        covers = tensor.nbytes == tensor.untyped_storage().nbytes()
        offset = tensor.storage_offset() if covers and tensor.nbytes else 0
        dtype = str(tensor.dtype).removeprefix("torch.")
        return start, tensor.nbytes, dtype, tuple(tensor.shape), saved_stride(tensor), offset

    def stage(self, buffer: StagingBuffer) -> None:
        """Copy the data of the tensors, and wait for copies from devices."""
        target = buffer.tensor()
        views = []
        for start, tensor in self._tensors:
            views += copies_left(target[start : start + tensor.nbytes], tensor)
        stage_copies(views)
        self._tensors = []


class _Pickler(pickle.Pickler):
    def __init__(self, stream: io.BytesIO, payload: FunctionPayload) -> None:
        super().__init__(stream, protocol=pickle.HIGHEST_PROTOCOL)
        self._payload = payload

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor) and type(obj) is torch.Tensor and is_plain(obj):
            return self._payload.add(obj)
        return None


def dump_code(value: Any) -> bytes:
    """Pickle a function for `_function.load_code` in the worker."""
    return _packed(pickle.dumps(value))


def _packed(code: bytes) -> bytes:
    """Return pickled code with the data by which the worker imports the same modules."""
    preparation = multiprocessing.spawn.get_preparation_data("nvrx-ckpt-worker")
    # The key may be pickled only while multiprocessing itself starts a process.
    preparation.pop("authkey", None)
    if b"__main__" not in code:
        # The user's program is not run again, as a module, unless something in it is needed.
        preparation.pop("init_main_from_name", None)
        preparation.pop("init_main_from_path", None)
    return pickle.dumps((preparation, code))
