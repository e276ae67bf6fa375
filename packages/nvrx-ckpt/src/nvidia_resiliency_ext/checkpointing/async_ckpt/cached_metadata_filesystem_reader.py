# SPDX-License-Identifier: Apache-2.0
"""A DCP reader that reads the metadata of a checkpoint once, and can check it before it is used."""

from __future__ import annotations

import os
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, ClassVar

from torch.distributed.checkpoint.filesystem import FileSystemReader

from nvidia_resiliency_ext.checkpointing._progress import ProgressBar

from ._options import verify_option

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
    from torch.futures import Future

__all__ = ["CachedMetadataFileSystemReader"]

_MAX_ENTRIES = 4
_Key = tuple[str, int, int, int]


class CachedMetadataFileSystemReader(FileSystemReader):
    """Read checkpoints; metadata that was read once is kept for all readers of the process.

    The metadata of a DCP checkpoint is a pickle: reading it can run code of its author.

    Args:
        path: Directory of the checkpoint.
        cache_metadata: Keep metadata; otherwise it is read each time. Default True.
        verify: Check all files against the manifest when the metadata is read. Default
            `NVRX_CKPT_VERIFY_ON_LOAD` (0 or 1), else no. A checkpoint without manifest passes.

    Raises:
        ValueError: `NVRX_CKPT_VERIFY_ON_LOAD` is neither 0 nor 1.

    Example:
        >>> import tempfile, torch, warnings
        >>> import torch.distributed.checkpoint as dcp
        >>> state = {"weight": torch.zeros(2)}
        >>> with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        ...     warnings.simplefilter("ignore")  # torch's about a single process
        ...     _ = dcp.save({"weight": torch.ones(2)}, checkpoint_id=folder, no_dist=True)
        ...     reader = CachedMetadataFileSystemReader(folder, verify=True)
        ...     dcp.load(state, storage_reader=reader, no_dist=True)
        >>> state
        {'weight': tensor([1., 1.])}
    """

    _metadata_cache: ClassVar[OrderedDict[_Key, Metadata]] = OrderedDict()

    def __init__(
        self,
        path: str | os.PathLike[str],
        cache_metadata: bool = True,
        *,
        verify: bool | None = None,
    ) -> None:
        super().__init__(path)
        self._cache_metadata = cache_metadata
        self._verify = verify_option(default=False) if verify is None else verify

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the checkpoint's metadata; cached until the file on disk changes.

        Args:
            args: Passed on to torch's reader.
            kwargs: Passed on to torch's reader.

        Raises:
            DamagedCheckpointError: `verify` is set, and a file is missing, short or altered.
        """
        if self._verify:
            from nvidia_resiliency_ext.checkpointing._verify import require_whole

            with ProgressBar.of_load() as bar:
                require_whole(os.fspath(self.path), on_progress=bar.show)
        if not self._cache_metadata:
            return super().read_metadata(*args, **kwargs)
        path = os.path.abspath(os.path.join(self.path, ".metadata"))
        status = os.stat(path)
        key = (path, status.st_ino, status.st_mtime_ns, status.st_size)
        cache = self._metadata_cache
        if key not in cache:
            for old in [old for old in cache if old[0] == path]:
                del cache[old]
            cache[key] = super().read_metadata(*args, **kwargs)
            if len(cache) > _MAX_ENTRIES:
                cache.popitem(last=False)
        cache.move_to_end(key)
        return cache[key]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the items of a plan; a terminal shows a progress bar when it takes long.

        Args:
            plan: The items to read and where each lies.
            planner: Receives each item that was read.

        Returns:
            A future that is done.
        """
        lengths = {id(i): self.storage_data[i.storage_index].length for i in plan.items}
        with ProgressBar.of_load(sum(lengths.values())) as bar:
            counting: Any = _CountingPlanner(planner, lengths, bar)
            return super().read_data(plan, counting)

    @classmethod
    def clear_metadata_cache(cls, path: str | os.PathLike[str] | None = None) -> None:
        """Forget the metadata of one checkpoint, or of all."""
        if path is None:
            cls._metadata_cache.clear()
            return
        file = os.path.abspath(os.path.join(path, ".metadata"))
        for key in [key for key in cls._metadata_cache if key[0] == file]:
            del cls._metadata_cache[key]


class _CountingPlanner:
    """Forward to a planner while a plan is read, and count the bytes it receives."""

    def __init__(self, planner: LoadPlanner, lengths: dict[int, int], bar: ProgressBar) -> None:
        self._planner = planner
        self._lengths = lengths
        self._bar = bar

    def __getattr__(self, name: str) -> Any:
        return getattr(self._planner, name)

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        self._planner.load_bytes(read_item, value)
        self._bar.add(self._lengths.get(id(read_item), 0))

    def commit_tensor(self, read_item: ReadItem, tensor: Any) -> None:
        self._planner.commit_tensor(read_item, tensor)
        self._bar.add(self._lengths.get(id(read_item), 0))
