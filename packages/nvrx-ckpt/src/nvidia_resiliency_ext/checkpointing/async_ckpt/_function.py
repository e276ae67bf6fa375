# SPDX-License-Identifier: Apache-2.0
"""Functions with their arguments, as they arrive in a worker process.

torch is imported only when there are tensors among them.
"""

from __future__ import annotations

import io
import multiprocessing.spawn
import pickle
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from nvidia_resiliency_ext.checkpointing._staging import StagingBuffer


def load_code(data: bytes) -> Any:
    """Unpickle the object that the trainer gave to `dump_code`; modules are found as there."""
    return pickle.loads(_prepare(data))  # noqa: S301 - our own parent's, through a memfd


def call_payload(code: bytes, buffer: StagingBuffer) -> None:
    """Call the function of a payload."""
    function, args, kwargs = _Unpickler(io.BytesIO(_prepare(code)), buffer).load()
    function(*args, **kwargs)


def call_with_bytes(code: bytes, buffer: StagingBuffer) -> None:
    """Call the function of a payload whose attribute `takes_bytes` is true.

    It gets views of bytes in place of tensors, and nothing of the user's program is imported.
    """
    function, args, kwargs = _BytesUnpickler(io.BytesIO(code), buffer).load()
    function(*args, **kwargs)


class _BytesUnpickler(pickle.Unpickler):
    def __init__(self, stream: io.BytesIO, buffer: StagingBuffer) -> None:
        super().__init__(stream)
        self._buffer = buffer

    def persistent_load(self, pid: Any) -> Any:
        start, nbytes, *_ = pid
        return self._buffer.view[start : start + nbytes]


class _Unpickler(_BytesUnpickler):
    def persistent_load(self, pid: Any) -> torch.Tensor:
        import torch

        start, nbytes, dtype, shape, stride, offset = pid
        data = self._buffer.tensor()[start : start + nbytes].view(getattr(torch, dtype))
        return data.as_strided(shape, stride, data.storage_offset() + offset)


def _prepare(data: bytes) -> bytes:
    preparation, rest = pickle.loads(data)  # noqa: S301 - our own parent's, through a memfd
    if "__mp_main__" in sys.modules:
        preparation.pop("init_main_from_name", None)
        preparation.pop("init_main_from_path", None)
    multiprocessing.spawn.prepare(preparation)
    return rest  # type: ignore[no-any-return]
