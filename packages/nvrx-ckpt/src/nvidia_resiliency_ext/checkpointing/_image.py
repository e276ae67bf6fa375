# SPDX-License-Identifier: Apache-2.0
"""Stage tensors and objects as the bytes that `torch.save` would write, with one copy.

What surrounds the data of a tensor in such a file depends on dtype, shape and strides only. It is
made once by `torch.save` itself, without data, and kept; a save then copies the data between.
Checksums stay open: the writer fills them in (`ZipShape`), away from the training thread.
"""

from __future__ import annotations

import io
import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils import _pytree

from ._copying import Copier
from ._write_plan import ZipShape
from ._zip_layout import ZipImage, shape_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_MAX_FRAMES = 16384


@dataclass(frozen=True)
class TensorFrame:
    """Bytes that `torch.save` writes around the data of one tensor.

    Attributes:
        head: Bytes in front of the data.
        nbytes: Length of the data.
        tail: Bytes behind it; those of `shape` are to be filled in.
        shape: Where checksums go.
    """

    head: bytes
    nbytes: int
    tail: bytes
    shape: ZipShape

    @property
    def length(self) -> int:
        """Length of the whole."""
        return len(self.head) + self.nbytes + len(self.tail)


_frames: OrderedDict[tuple[object, ...], TensorFrame] = OrderedDict()
_options_lock = threading.Lock()


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is nothing but dense numbers, so that frame and copy suffice."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout == torch.strided
        and not tensor.is_quantized
        and not tensor.is_conj()
        and not tensor.is_neg()
        and tensor.device.type in ("cpu", "cuda")
    )


def frame_of(tensor: torch.Tensor) -> TensorFrame | None:
    """Return the frame of a plain tensor as it is saved: on the CPU, with a storage of its own.

    Returns:
        None where this version of torch cannot save without data (before 2.6), and for a tensor
        without elements.
    """
    if not hasattr(torch.serialization, "skip_data") or tensor.numel() == 0:
        return None
    if _covers_storage(tensor) and tensor.storage_offset():
        return None  # elements that overlap
    stride = saved_stride(tensor)
    options = _options()
    key = (tensor.dtype, tensor.shape, stride, options)
    frame = _frames.get(key)
    if frame is None:
        frame = _make_frame(tensor.dtype, tensor.shape, stride)
        if frame is None:
            return None
        _frames[key] = frame
        if len(_frames) > _MAX_FRAMES:
            _frames.popitem(last=False)
    return frame if frame.nbytes == tensor.numel() * tensor.element_size() else None


def storage_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes that are saved for a plain tensor: uint8, shape (nbytes,), same device.

    They are a view where the tensor fills its storage or is contiguous, otherwise a copy.
    """
    tensor = tensor.detach()
    if _covers_storage(tensor):
        flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        return flat.set_(tensor.untyped_storage())  # type: ignore[call-overload,no-any-return,unused-ignore]
    if not tensor.is_contiguous():
        return storage_bytes(tensor.clone())
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    first = tensor.storage_offset() * tensor.element_size()
    return flat.set_(tensor.untyped_storage(), first, (tensor.nbytes,))  # type: ignore[call-overload,no-any-return]


def stage_copies(copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy each second tensor of a pair to the first, in host memory; return when all is there.

    Args:
        copies: Tensors of dtype uint8; the sources may be on CUDA devices.
    """
    devices = set()
    for target, source in copies:
        if source.is_cuda:
            target.copy_(source, non_blocking=True)
            devices.add(source.device)
    with Copier() as copier:
        copier.copy([(to.numpy(), what.numpy()) for to, what in copies if not what.is_cuda])
    for device in devices:
        torch.cuda.current_stream(device).synchronize()


def copies_left(
    target: torch.Tensor, tensor: torch.Tensor
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the copy of a tensor's bytes to its place in host memory, for `stage_copies`.

    A tensor whose bytes have to be put together first is copied here, so that there is one such
    copy at a time; then nothing is returned.
    """
    copy = (target, storage_bytes(tensor))
    if copy[1].untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr():
        return [copy]
    stage_copies([copy])
    return []


def saved_size(value: Any, save: Callable[..., None] = torch.save) -> int:
    """Return how many bytes `save(value, stream)` writes, without moving data where possible."""
    sizes = _Counter()
    if hasattr(torch.serialization, "skip_data"):
        with torch.serialization.skip_data():
            save(value, sizes)
    else:
        save(value, sizes)
    return sizes.length


def save_into(
    image: memoryview, value: Any, save: Callable[..., None] = torch.save
) -> ZipShape | None:
    """Write `save(value, stream)` into staging memory, with one copy of tensors on the CPU.

    Args:
        image: Memory of exactly the size that `saved_size` said.
        value: What to save.
        save: Function like `torch.save`.

    Returns:
        Where the checksums go; None if the bytes are complete.

    Raises:
        ValueError: It has another size now: something changed the value meanwhile.
    """
    with Copier() as copier, _options_lock:
        stream = _ImageStream(image, value, copier)
        computes = _computes_checksums()
        if computes:
            torch.serialization.set_crc32_options(False)
        try:
            save(value, stream)
        finally:
            if computes:
                torch.serialization.set_crc32_options(True)
        copier.copy(stream.copies)
    if stream.position != len(image):
        raise ValueError(f"it took {stream.position} bytes, {len(image)} had been counted")
    return shape_of(ZipImage(image)) if computes else None


def _computes_checksums() -> bool:
    """Return whether torch is to write checksums and can be told to leave that to us."""
    return hasattr(torch.serialization, "get_crc32_options") and bool(
        torch.serialization.get_crc32_options()
    )


def _options() -> tuple[object, ...]:
    from torch.utils.serialization import config

    return (_computes_checksums(), getattr(config.save, "storage_alignment", 64))


def _covers_storage(tensor: torch.Tensor) -> bool:
    return tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def saved_stride(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the strides of a plain tensor in the result of `storage_bytes`."""
    if tensor.is_contiguous() or _covers_storage(tensor):
        return tensor.stride()
    return torch.empty_like(tensor.detach(), device="meta").stride()


class _Counter:
    """Count the bytes written; bytes that are left out are announced by `seek`."""

    def __init__(self) -> None:
        self.length = 0

    def write(self, data: Any) -> int:
        size = memoryview(data).nbytes
        self.length += size
        return size

    def seek(self, offset: int, whence: int = 0) -> int:
        # torch moves to the end of the data of a record, from where its header began.
        self.length = offset if whence == io.SEEK_SET else self.length + offset
        return self.length

    def tell(self) -> int:
        return self.length

    def flush(self) -> None:
        pass


class _FrameRecorder(_Counter):
    """Keeps the bytes before and after the data of a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = [bytearray()]
        self.gaps: list[int] = []

    def write(self, data: Any) -> int:
        self.parts[-1] += data
        return super().write(data)

    def seek(self, offset: int, whence: int = 0) -> int:
        before = self.length
        after = super().seek(offset, whence)
        self.gaps.append(after - before)
        self.parts.append(bytearray())
        return after


class _ImageStream:
    """Write a saved object to memory.

    Args:
        image: The memory.
        value: What is saved.
        copier: What copies.

    Attributes:
        position: How much was written.
        copies: What is left to copy, all at once: data of tensors, whose storages are kept.
    """

    def __init__(self, image: memoryview, value: Any, copier: Copier) -> None:
        self._image = image
        self._copier = copier
        try:
            leaves = _pytree.tree_leaves(value)
        except RecursionError:  # A state that holds itself: each tensor is copied when it comes.
            leaves = []
        storages = (
            leaf.untyped_storage()
            for leaf in leaves
            if isinstance(leaf, torch.Tensor) and is_plain(leaf) and not leaf.is_cuda
        )
        self._kept = {storage.data_ptr(): storage for storage in storages}
        self.position = 0
        self.copies: list[tuple[Any, Any]] = []

    def write(self, data: Any) -> int:
        source = np.frombuffer(data, np.uint8)
        size = source.nbytes
        target = self._image[self.position : self.position + size]
        if len(target) < size:
            raise ValueError(f"more than the {len(self._image)} bytes that had been counted")
        storage = self._kept.get(source.ctypes.data)
        if storage is not None and storage.nbytes() == size:
            self.copies.append((target, source))
        else:
            self._copier.copy([(target, source)])
        self.position += size
        return size

    def flush(self) -> None:
        pass


def _make_frame(
    dtype: torch.dtype, size: tuple[int, ...], stride: tuple[int, ...]
) -> TensorFrame | None:
    like = torch.empty_strided(size, stride, dtype=dtype)
    recorder = _FrameRecorder()
    with torch.serialization.skip_data():
        torch.save(like, recorder)  # type: ignore[arg-type]
    if len(recorder.gaps) != 1 or recorder.gaps[0] != like.untyped_storage().nbytes():
        return None
    head, tail = recorder.parts
    nbytes = recorder.gaps[0]
    image = ZipImage(head, nbytes, tail)
    shape = shape_of(image) if _computes_checksums() else ZipShape([])
    if shape is None:
        return None
    return TensorFrame(bytes(image.head), nbytes, bytes(image.tail), shape)
