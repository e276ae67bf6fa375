# SPDX-License-Identifier: Apache-2.0
"""The write of one rank's part of a DCP checkpoint: layout, staging, and its results."""

from __future__ import annotations

import io
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.distributed.checkpoint.api import CheckpointException, _wrap_exception
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from nvidia_resiliency_ext.checkpointing._errors import AsyncSaveError
from nvidia_resiliency_ext.checkpointing._image import (
    TensorFrame,
    copies_left,
    frame_of,
    is_plain,
    stage_copies,
)
from nvidia_resiliency_ext.checkpointing._manifest import MANIFEST, METADATA
from nvidia_resiliency_ext.checkpointing._staged_write import StagedWrite
from nvidia_resiliency_ext.checkpointing._staging import round_up
from nvidia_resiliency_ext.checkpointing._write_plan import (
    PLAIN_BYTES,
    FilePlan,
    ItemPlan,
    WritePlan,
    ZipShape,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.distributed.checkpoint.planner import SavePlanner

    from nvidia_resiliency_ext.checkpointing._staging import StagingBuffer
    from nvidia_resiliency_ext.checkpointing._write_plan import FileResult

ResolvedItem = tuple[WriteItem, Any]
WriteBucket = tuple[str, str, tuple[list[ResolvedItem], list[ResolvedItem]]]
"""File path, storage key, and items with their data: serialised objects, then tensors."""


class CheckpointWriteFailedError(AsyncSaveError, CheckpointException):
    """A rank could not write its part of a DCP checkpoint; also a DCP `CheckpointException`."""

    def __init__(self, call_idx: int, rank: int, cause: str) -> None:
        AsyncSaveError.__init__(self, call_idx, rank, cause)
        error = RuntimeError(f"Worker failure: {cause}")
        self._failures = {rank: _wrap_exception(error)}

    def __str__(self) -> str:
        return f"Worker failure: {AsyncSaveError.__str__(self)}"


@dataclass(frozen=True)
class WriteOptions:
    """How the files of a checkpoint are written.

    Attributes:
        opener: Replaces the opening of files; None for ours.
        renames: Whether files get a temporary name first.
        sync: Whether they are synced to the device.
        io_mode: "auto", "buffered" or "direct".
        staging_dir: Node-local directory that they are written to first.
        folder: Of the checkpoint; its metadata is void from the moment that a file is replaced.
        manifest_path: Manifest of this rank's files; None for none.
    """

    opener: Callable[[str, str], Any] | None
    renames: bool
    sync: bool
    io_mode: str
    staging_dir: str | None
    folder: str
    manifest_path: str | None


@dataclass
class _Piece:
    """An item with its place in a file."""

    item: WriteItem
    start: int
    length: int
    frame: TensorFrame | None
    data: Any
    descriptors: list[str]


class CheckpointWrite(StagedWrite):
    """Writes the buckets of one rank; the `async_fn` of its request.

    Args:
        buckets: What goes into which file.
        options: How.
        serialize: Returns the bytes of a tensor that is more than plain numbers, and the names of
            the transformations that were applied to it; also of objects where there are any.
        problem: Why nothing can be staged; raised when it is.
    """

    def __init__(
        self,
        buckets: Sequence[WriteBucket],
        options: WriteOptions,
        serialize: Callable[[WriteItem, Any], tuple[Any, list[str]]] | None,
        problem: BaseException | None = None,
    ) -> None:
        self.buckets = list(buckets)
        self.options = options
        self.opener = options.opener
        self.renames = options.renames
        self._serialize = serialize
        self._problem = problem
        self._files: list[tuple[WriteBucket, list[_Piece], int]] | None = None
        self.results: list[WriteResult] | None = None
        self.manifest: FileResult | None = None
        self.failure: BaseException | None = None
        self.pinned = any(
            isinstance(data, torch.Tensor) and data.is_cuda
            for _, _, (_, tensors) in self.buckets
            for _, data in tensors
        )

    def staging_bytes(self) -> int:
        """Lay the files out and return the size of all of them."""
        if self._problem is not None:
            raise self._problem
        self._files = [self._layout(bucket) for bucket in self.buckets]
        return sum(round_up(length) for _, _, length in self._files)

    def stage(self, buffer: StagingBuffer) -> WritePlan:
        """Copy all items into the buffer."""
        files: list[FilePlan] = []
        shapes: list[ZipShape] = []
        known: dict[int, int] = {}
        copies: list[tuple[Any, Any]] = []
        base = 0
        for (path, _, _), pieces, length in self._files or ():
            items = []
            for piece in pieces:
                number = PLAIN_BYTES
                if piece.frame is not None and piece.frame.shape.records:
                    number = known.setdefault(id(piece.frame), len(shapes))
                    if number == len(shapes):
                        shapes.append(piece.frame.shape)
                copies += _frame_and_copies(buffer, base + piece.start, piece)
                items.append(ItemPlan(_name(piece.item), piece.start, piece.length, number))
            files.append(FilePlan(path, base, length, items))
            base += round_up(length)
        stage_copies(copies)
        self.results = self._write_results()
        self.buckets = []
        self._files = None
        options = self.options
        void = [os.path.join(options.folder, name) for name in (METADATA, MANIFEST)]
        return WritePlan(
            files,
            shapes,
            void if self.renames else [],
            options.manifest_path,
            threads=len(files),
            io_mode=options.io_mode,
            sync=options.sync,
            staging_dir=options.staging_dir,
        )

    def written(self, manifest: FileResult | None) -> None:
        """Keep the manifest's checksum; where everything is was known before."""
        self.manifest = manifest
        self.done = True

    done = False

    def error(self, call_idx: int, rank: int, cause: str) -> AsyncSaveError:
        """Return an error that is also DCP's."""
        self.failure = CheckpointWriteFailedError(call_idx, rank, cause)
        return self.failure

    def __call__(self, *_args: object, **_kwargs: object) -> None:
        """Stage and write in this thread; a failure is kept for `retrieve_write_results`."""
        try:
            super().__call__()
        except Exception as error:  # noqa: BLE001 - it is reported on all ranks when finalised
            self.failure = error

    def _layout(self, bucket: WriteBucket) -> tuple[WriteBucket, list[_Piece], int]:
        _, _, (bytes_items, tensor_items) = bucket
        pieces = []
        position = 0
        for item, data in [*bytes_items, *tensor_items]:
            piece = self._piece(item, data)
            piece.start = position
            position += piece.length
            pieces.append(piece)
        return bucket, pieces, position

    def _piece(self, item: WriteItem, data: Any) -> _Piece:
        frame = None
        if self._serialize is None and item.type != WriteItemType.BYTE_IO and is_plain(data):
            frame = frame_of(data)
        if frame is not None:
            return _Piece(item, 0, frame.length, frame, data, [])
        serialize = self._serialize or default_serialize
        raw, descriptors = serialize(item, data)
        return _Piece(item, 0, memoryview(raw).nbytes, None, raw, descriptors)

    def _write_results(self) -> list[WriteResult]:
        found = []
        for (_, key, _), pieces, _ in self._files or ():
            for piece in pieces:
                info = _StorageInfo(key, piece.start, piece.length)
                if piece.descriptors:
                    info.transform_descriptors = piece.descriptors
                found.append(WriteResult(piece.item.index, piece.length, info))
        return found


def default_serialize(item: WriteItem, data: Any) -> tuple[Any, list[str]]:
    """Return the bytes that DCP writes for an item without transformations."""
    if item.type == WriteItemType.BYTE_IO:
        return data.getbuffer(), []
    stream = io.BytesIO()
    tensor = data.detach().cpu()
    if tensor.layout == torch.strided and tensor.untyped_storage().nbytes() != tensor.nbytes:
        tensor = tensor.clone()
    torch.save(tensor, stream)
    return stream.getbuffer(), []


def _frame_and_copies(
    buffer: StagingBuffer, position: int, piece: _Piece
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Write a piece but for data that is a view of its tensor; return the copies left to make."""
    if piece.frame is None:
        buffer.view[position : position + piece.length] = memoryview(piece.data).cast("B")
        return []
    frame = piece.frame
    start = position + len(frame.head)
    end = start + frame.nbytes
    buffer.view[position:start] = frame.head
    buffer.view[end : position + piece.length] = frame.tail
    return copies_left(buffer.tensor()[start:end], piece.data)


def _name(item: WriteItem) -> str:
    offset = item.index.offset
    where = "" if offset is None or not any(offset) else f"[{','.join(map(str, offset))}]"
    return f"{item.index.fqn}{where}"


def resolved_items(
    bucket: Sequence[WriteItem], planner: SavePlanner, path: str | os.PathLike[str]
) -> tuple[list[ResolvedItem], list[ResolvedItem]]:
    """Return the items of a bucket with their data: serialised objects, then tensors.

    Raises:
        TypeError: The planner cannot give the data of an item; the message names it and the path.
    """
    bytes_items: list[ResolvedItem] = []
    tensor_items: list[ResolvedItem] = []
    for item in bucket:
        try:
            data = planner.resolve_data(item)
        except Exception as error:
            raise TypeError(f"{item.index.fqn!r} cannot be saved to {path}: {error}") from error
        if item.type == WriteItemType.BYTE_IO:
            bytes_items.append((item, data))
        else:
            tensor_items.append((item, _dequantized(cast("torch.Tensor", data).detach())))
    return bytes_items, tensor_items


def _dequantized(tensor: torch.Tensor) -> torch.Tensor:
    kind = type(tensor)
    own = getattr(kind, "dequantize", None)
    if tensor.is_cuda and kind is not torch.Tensor and own is not torch.Tensor.dequantize:
        return tensor.dequantize()
    return tensor


def item_size(item: WriteItem) -> int:
    """Return the bytes of the tensor that an item is a part of."""
    data = item.tensor_data
    if data is None:
        raise AssertionError(f"{item.index.fqn} is no tensor")
    return int(data.size.numel()) * data.properties.dtype.itemsize


def split_by_size_and_type(bins: int, items: list[WriteItem]) -> list[list[WriteItem]]:
    """Divide items into bins: objects in turn, tensors largest first to the emptiest bin."""
    if bins == 1:
        return [items]
    buckets: list[list[WriteItem]] = [[] for _ in range(bins)]
    sizes = [0] * bins
    objects = [item for item in items if item.type == WriteItemType.BYTE_IO]
    tensors = [item for item in items if item.type != WriteItemType.BYTE_IO]
    for index, item in enumerate(objects):
        buckets[index % bins].append(item)
    for item in sorted(tensors, key=item_size, reverse=True):
        emptiest = sizes.index(min(sizes))
        buckets[emptiest].append(item)
        sizes[emptiest] += item_size(item)
    return buckets


def split_by_separation_hint(
    buckets: list[list[WriteItem]], separation_hint: str | None = None
) -> dict[str, list[list[WriteItem]]]:
    """Divide each bin into items whose names begin with the hint, and the others."""
    if separation_hint is None:
        return {"": buckets}
    groups: dict[str, list[list[WriteItem]]] = {"": [], separation_hint: []}
    for bucket in buckets:
        hinted = [item for item in bucket if item.index.fqn.startswith(separation_hint)]
        others = [item for item in bucket if not item.index.fqn.startswith(separation_hint)]
        groups[""].append(others)
        groups[separation_hint].append(hinted)
    return groups
