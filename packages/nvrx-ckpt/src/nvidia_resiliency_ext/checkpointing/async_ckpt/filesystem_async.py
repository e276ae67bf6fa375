# SPDX-License-Identifier: Apache-2.0
"""DCP's file system writer that writes outside of the training thread.

The order of calls: `save_state_dict_async_plan`, `get_save_function_and_args`, a queue or
`execute_sync`, `save_state_dict_async_finalize`. The files are those of DCP's own writer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import io
import logging
import multiprocessing
import os
import pickle
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch.distributed.checkpoint.api import _wrap_exception
from torch.distributed.checkpoint.filesystem import (
    CURRENT_DCP_VERSION,
    DEFAULT_SUFFIX,
    FileSystemWriter,
    _StoragePrefix,
)

from nvidia_resiliency_ext.checkpointing._durable import write_small_file
from nvidia_resiliency_ext.checkpointing._errors import CheckpointWriteError
from nvidia_resiliency_ext.checkpointing._manifest import (
    MANIFEST,
    METADATA,
    rank_manifest_name,
    write_manifest,
)
from nvidia_resiliency_ext.checkpointing._staged_write import NoArguments
from nvidia_resiliency_ext.shared_utils.errors import MissingExtraError

from ._dcp_write import (
    CheckpointWrite,
    WriteBucket,
    WriteOptions,
    default_serialize,
    resolved_items,
)
from ._dcp_write import item_size as _item_size  # noqa: F401 - frameworks import it from here
from ._dcp_write import split_by_separation_hint as _split_by_separation_hint
from ._dcp_write import split_by_size_and_type as _split_by_size_and_type
from ._options import io_mode_option, path_text, staging_dir_option
from ._write_results import ResultsQueue

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
    from torch.distributed.checkpoint.storage import WriteResult

    from nvidia_resiliency_ext.checkpointing._staged_write import Publication

__all__ = [
    "ConsistentDataIdentifier",
    "FileSystemWriterAsync",
    "WriteBucket",
    "get_write_results_queue",
]

logger = logging.getLogger("nvrx")

_MSC = "msc://"
_MAX_DEFAULT_THREADS = 4
_MIN_THREADS_WITH_HINT = 2

_results_queue: ResultsQueue | None = None


@dataclass(frozen=True)
class ConsistentDataIdentifier:
    """Names data that a worker already has; kept for compatibility, data is always copied.

    Attributes:
        key: Its name.
    """

    key: str


def get_write_results_queue(mp_mode: str = "spawn") -> ResultsQueue:  # noqa: ARG001 - given
    """Return the queue object that save functions get; it does not transport results.

    Args:
        mp_mode: Accepted for compatibility; no process is started for it.
    """
    global _results_queue  # noqa: PLW0603 - users reset it by assigning None
    if _results_queue is None or _results_queue._manager.is_shut_down:  # noqa: SLF001
        _results_queue = ResultsQueue()
    return _results_queue


_get_write_results_queue = get_write_results_queue


class FileSystemWriterAsync(FileSystemWriter):
    """Writes a DCP checkpoint whose data is staged on the trainer and written by a queue's worker.

    Args:
        path: Directory of the checkpoint, or `msc://...`.
        args: For DCP's `FileSystemWriter`.
        separation_hint: Items whose names begin with it are written to separate files;
            `thread_count` must then be at least 2. Default: none.
        use_msc: Write through multi-storage-client (extra `msc`). Default False, and True for
            `msc://...`.
        is_multiproc_io: Accepted for compatibility; files are always written in parallel.
        use_cached_data_structure: Accepted for compatibility; data is always staged by value.
        use_cpu_shm_for_gpu_tensors: Likewise; the worker never needs a CUDA context.
        open_file: Replaces the opening of files, called as `open_file(path, "wb")`.
        io_mode: "auto", "buffered" or "direct". Default `NVRX_CKPT_IO_MODE`, else "auto".
        staging_dir: Node-local directory that files are written to first. Default
            `NVRX_CKPT_STAGING_DIR`, else none.
        kwargs: For DCP's `FileSystemWriter`. `thread_count` (files written at a time) is by
            default half of the CPUs, at most 4.

    Raises:
        NotImplementedError: `single_file_per_rank=False`, or another format than torch.save's.
        ValueError: An option has a value that is not allowed, or conflicts with another one.
        MissingExtraError: `use_msc` without multi-storage-client.

    Attributes:
        has_data_to_write: Whether this rank writes anything.
        can_run_decentralized_global_plan: True: plans need not go through one rank.

    Example:
        >>> import tempfile
        >>> from nvidia_resiliency_ext.checkpointing.async_ckpt.state_dict_saver import (
        ...     save_state_dict_async_plan)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     writer = FileSystemWriterAsync(folder, thread_count=2)
        ...     _ = save_state_dict_async_plan({"weight": torch.ones(2)}, writer)
        >>> writer.has_data_to_write
        True
    """

    can_run_decentralized_global_plan = True
    _cached_identifiers: ClassVar[set[str]] = set()
    _cached_tensor_data_ptrs: ClassVar[dict[str, Any]] = {}
    _shm_tensor_cache: ClassVar[dict[str, Any]] = {}

    def __init__(  # noqa: PLR0913 - given
        self,
        path: str | os.PathLike[str],
        *args: Any,
        separation_hint: str | None = None,
        use_msc: bool = False,
        is_multiproc_io: bool = False,
        use_cached_data_structure: bool = False,
        use_cpu_shm_for_gpu_tensors: bool = False,
        open_file: Callable[..., Any] = open,
        io_mode: str | None = None,
        staging_dir: str | os.PathLike[str] | None = None,
        **kwargs: Any,
    ) -> None:
        if len(args) < 3 and "thread_count" not in kwargs:  # noqa: PLR2004 - its position
            kwargs["thread_count"] = max(1, min(_MAX_DEFAULT_THREADS, (os.cpu_count() or 1) // 2))
        super().__init__(path_text(path), *args, **kwargs)
        if not self.single_file_per_rank:
            raise NotImplementedError("single_file_per_rank=False: one file for each item")
        form = getattr(self, "serialization_format", None)
        if form is not None and form.name != "TORCH_SAVE":
            raise NotImplementedError(f"serialization format {form.name}")
        self.use_msc = use_msc or os.fspath(path).startswith(_MSC)
        if self.use_msc:
            self.path = os.fspath(path)  # a Path would drop one of the slashes
            open_file = _msc().open
        self.separation_hint = separation_hint
        self.is_multiproc_io = is_multiproc_io
        self.use_cached_data_structure = use_cached_data_structure
        self.use_cpu_shm_for_gpu_tensors = use_cpu_shm_for_gpu_tensors
        self.open_file = open_file
        self.io_mode = io_mode_option(io_mode)
        self.staging_dir = staging_dir_option(staging_dir)
        if self.staging_dir is not None and self.open_file is not open:
            raise ValueError(
                "staging_dir (NVRX_CKPT_STAGING_DIR) does not go together with open_file or use_msc"
            )
        self.has_data_to_write = False
        self.rank_manifests: list[dict[str, Any]] = []
        self._buckets: list[WriteBucket] = []
        self._write: CheckpointWrite | None = None
        self.publication: Publication | None = None

    def prepare_write_data(self, plan: SavePlan, planner: SavePlanner) -> None:
        """Resolve the items of a plan and divide them into files.

        Args:
            plan: The items that this rank writes.
            planner: Gives the tensor or the bytes of each item.

        Raises:
            AssertionError: `separation_hint` with fewer than two threads.
        """
        bins = self.thread_count
        if self.separation_hint is not None:
            if bins < _MIN_THREADS_WITH_HINT:
                raise AssertionError(f"separation_hint needs thread_count >= 2, it is {bins}")
            bins //= 2
        groups = _split_by_separation_hint(
            _split_by_size_and_type(bins, list(plan.items)), self.separation_hint
        )
        prefix = plan.storage_data.prefix
        self._buckets = []
        problem = None
        try:
            for hint, buckets in groups.items():
                for bucket in filter(None, buckets):
                    name = f"{hint}{prefix}{len(self._buckets)}{DEFAULT_SUFFIX}"
                    path = os.path.join(self.path, name)
                    self._buckets.append((path, name, resolved_items(bucket, planner, self.path)))
        except Exception as error:  # noqa: BLE001 - the queue reports it, and on all ranks
            problem, self._buckets = error, []
        self.has_data_to_write = bool(self._buckets) or problem is not None
        self._write = None
        if self.has_data_to_write:
            options = self._options(prefix)
            special = self._transformed if self.transforms.extensions else None
            self._write = CheckpointWrite(self._buckets, options, special, problem)

    def get_save_function_and_args(
        self,
    ) -> tuple[Callable[..., Any] | None, Callable[[], Any] | None, list[Any]]:
        """Return the save function, the staging function and the arguments of a request.

        A rank with nothing to write gets no functions; its request carries the empty arguments.
        """
        if self._write is None:
            return None, None, NoArguments(self.publication)
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        self._write.publication = self.publication
        preload = functools.partial(self.preload_tensors, self._buckets, True)
        return self._write, preload, [rank, None, get_write_results_queue()]

    @staticmethod
    def preload_tensors(
        resolved_plan_data: Sequence[WriteBucket], non_blocking: bool = True
    ) -> list[WriteBucket]:
        """Return the buckets with tensors on the host.

        Args:
            resolved_plan_data: Buckets with tensors anywhere.
            non_blocking: Let copies from a device overlap; they are complete on return. Default
                True.
        """
        loaded = []
        for path, key, (bytes_items, tensor_items) in resolved_plan_data:
            tensors = [
                (item, data.to("cpu", non_blocking=non_blocking)) for item, data in tensor_items
            ]
            loaded.append((path, key, (list(bytes_items), tensors)))
        if non_blocking and torch.cuda.is_available():
            torch.cuda.synchronize()
        return loaded

    @staticmethod
    def write_preloaded_data_multithread(
        transform_list: Sequence[Any],
        use_msc: bool,
        open_file: Callable[..., Any],
        rank: int,
        write_buckets: Sequence[WriteBucket],
        global_results_queue: Any,
    ) -> None:
        """Write buckets and put `{bucket index: results}`, or the exception, on the queue.

        Args:
            transform_list: Stream transforms of the data, as torch's writer has them; empty: none.
            use_msc: Write through the multi-storage client instead of the file system.
            open_file: How a file is opened; the built-in `open` by default.
            rank: Accepted for compatibility; not used.
            write_buckets: For each file its path, its name and its items.
            global_results_queue: Receives one object with `put`.
        """
        del rank
        try:
            result = _write_here(transform_list, use_msc, open_file, write_buckets)
        except Exception as error:  # noqa: BLE001 - it goes to whoever reads the queue
            global_results_queue.put(error)
        else:
            global_results_queue.put(result)

    @staticmethod
    def write_preloaded_data_multiproc(
        transform_list: Sequence[Any],
        use_msc: bool,
        open_file: Callable[..., Any],
        rank: int,
        write_buckets: Sequence[WriteBucket],
        global_results_queue: Any,
    ) -> None:
        """Write as `write_preloaded_data_multithread` does; refuse in a daemonic process.

        Args:
            transform_list: As there, like all other arguments.
            use_msc: Write through the multi-storage client.
            open_file: How a file is opened.
            rank: Accepted for compatibility; not used.
            write_buckets: For each file its path, its name and its items.
            global_results_queue: Receives the results, or a `RuntimeError` from a daemonic process.
        """
        if multiprocessing.current_process().daemon:
            text = "Invalid Setup! A daemonic process cannot start processes that write"
            global_results_queue.put(RuntimeError(text))
            return
        FileSystemWriterAsync.write_preloaded_data_multithread(
            transform_list, use_msc, open_file, rank, write_buckets, global_results_queue
        )

    @staticmethod
    def write_preloaded_data(  # noqa: PLR0913, PLR0917 - given
        transform_list: Sequence[Any],
        local_proc_idx: int,
        write_bucket: WriteBucket,
        results_queue: Any,
        use_fsync: bool = True,
        use_msc: bool = False,
        open_file: Callable[..., Any] = open,
    ) -> None:
        """Write one bucket and put `(index, results or exception)` on the queue.

        Args:
            transform_list: Stream transforms of the data; empty: none.
            local_proc_idx: The index that is put on the queue.
            write_bucket: The file's path, its name and its items.
            results_queue: Receives one pair with `put`.
            use_fsync: Make the file durable before the result is reported. Default True.
            use_msc: Write through the multi-storage client instead of the file system. Default
                False.
            open_file: How the file is opened.
        """
        try:
            found = _write_here(transform_list, use_msc, open_file, [write_bucket], use_fsync)
            results_queue.put((local_proc_idx, found[0]))
        except Exception as error:  # noqa: BLE001 - it goes to whoever reads the queue
            results_queue.put((local_proc_idx, error))

    write_preloaded_data_proc = write_preloaded_data

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        """Refuse to write: this writer is driven by `get_save_function_and_args`.

        Args:
            plan: Not used.
            planner: Not used.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError("write_data: use save_state_dict_async_plan and a queue")

    def retrieve_write_results(self) -> list[WriteResult] | tuple[BaseException, Any]:
        """Return where the items of this rank are, or the exception and its traceback."""
        write = self._write
        if write is None:
            return []
        if write.failure is not None:
            text = f"Worker failure: {type(write.failure).__name__}: {write.failure}"
            return _wrap_exception(RuntimeError(text))
        if not write.done or write.results is None:
            text = "Worker failure: the save function has not been carried out by a queue"
            return _wrap_exception(RuntimeError(text))
        return write.results

    def rank_manifest(self) -> dict[str, Any] | None:
        """Return rank, length and checksum of the manifest that this rank's worker wrote."""
        manifest = None if self._write is None else self._write.manifest
        if manifest is None:
            return None
        # Not always the rank in the group: planners that need no coordinator use the global one.
        rank = int(os.path.basename(manifest.path).split(".")[2])
        return {"rank": rank, "bytes": manifest.nbytes, "crc32": manifest.crc}

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Create the checkpoint's directory; the worker does it when there is a staging directory.

        What is in the way is reported with the save: the worker tries it again.

        Args:
            plan: This rank's plan; it is returned unchanged.
        """
        if self.use_msc or self.staging_dir is not None:
            return plan
        with contextlib.suppress(OSError):
            os.makedirs(self.path, exist_ok=True)
        return plan

    def prepare_decentralized_global_plan(self, local_plan: SavePlan) -> SavePlan:
        """Return the plan with the prefix of this rank's files.

        Args:
            local_plan: This rank's plan, without a prefix.
        """
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        return dataclasses.replace(local_plan, storage_data=_StoragePrefix(f"__{rank}_"))

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Publish the checkpoint on the coordinator: its manifest first, `.metadata` last.

        Args:
            metadata: The global metadata; it is completed with where each item lies.
            results: For each rank the results of its writes.

        Raises:
            CheckpointWriteError: The manifest or `.metadata` cannot be written, or what a rank has
                written is gone.
        """
        metadata.version = CURRENT_DCP_VERSION
        metadata.storage_data = {r.index: r.storage_data for part in results for r in part}
        if hasattr(self, "storage_meta"):
            metadata.storage_meta = self.storage_meta()
        # Stock DCP ignores attributes that it does not know.
        metadata.nvrx_manifests = list(self.rank_manifests)  # type: ignore[attr-defined]
        data = pickle.dumps(metadata)
        if self.use_msc:
            with _msc().open(os.path.join(self.path, METADATA), "wb") as file:
                file.write(data)
            return
        from zlib import crc32

        for one in self.rank_manifests:
            _require_file(os.path.join(self.path, one["name"]), one["bytes"])
        about = {"bytes": len(data), "crc32": crc32(data)}
        content = {"kind": "dcp", "metadata": about, "ranks": self.rank_manifests}
        write_manifest(os.path.join(self.path, MANIFEST), content, sync=self.sync_files)
        write_small_file(os.path.join(self.path, METADATA), data, sync=self.sync_files)

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        """The directory of the checkpoint."""
        return self.path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether a checkpoint can be written there.

        Args:
            checkpoint_id: A directory, or an address that begins with `msc://`.
        """
        if os.fspath(checkpoint_id).startswith(_MSC):
            return True
        return bool(super().validate_checkpoint_id(checkpoint_id))

    @classmethod
    def cleanup_tensor_caches(cls) -> None:
        """Forget cached tensors; there are none, as data is staged by value."""
        cls._cached_identifiers.clear()
        cls._cached_tensor_data_ptrs.clear()
        cls._shm_tensor_cache.clear()

    @classmethod
    def register_shm_drain_callback(cls, fn: Callable[[], None]) -> None:
        """Accept a callback that is never needed: a buffer is not reused before it was written.

        Args:
            fn: Not called.
        """
        del fn

    def _options(self, prefix: str) -> WriteOptions:
        folder = os.fspath(self.path)
        rank = prefix.strip("_")
        own = self.open_file is open
        return WriteOptions(
            opener=None if own else self.open_file,
            renames=not self.use_msc,
            sync=self.sync_files,
            io_mode=self.io_mode,
            staging_dir=self.staging_dir,
            folder=folder,
            manifest_path=None if self.use_msc else os.path.join(folder, rank_manifest_name(rank)),
        )

    def _transformed(self, item: WriteItem, data: Any) -> tuple[Any, list[str]]:
        """Return the bytes of an item after DCP's stream transformations."""
        raw, _ = default_serialize(item, data)
        stream = io.BytesIO()
        transformed, descriptors = self.transforms.transform_save_stream(item, stream)
        transformed.write(raw)
        transformed.close()
        return stream.getbuffer(), list(descriptors)


def _require_file(path: str, nbytes: int) -> None:
    """Make sure that a rank's manifest, the last file that it writes, is there and no other one."""
    try:
        with open(path, "rb") as file:  # over NFS only opening asks the server
            found = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise CheckpointWriteError.from_os(error, path, 0, "find") from error
    if found != nbytes:
        raise CheckpointWriteError(errno.EBUSY, "another one is there", path, found, "find")


def _write_here(
    transform_list: Sequence[Any],
    use_msc: bool,
    open_file: Callable[..., Any],
    buckets: Sequence[WriteBucket],
    use_fsync: bool = True,
) -> dict[int, list[WriteResult]]:
    if transform_list and getattr(transform_list[0], "extensions", ()):
        raise NotImplementedError("stream transformations need the writer object")
    found = {}
    for index, bucket in enumerate(buckets):
        own = open_file is open and not use_msc
        options = WriteOptions(
            opener=None if own else open_file,
            renames=not use_msc,
            sync=use_fsync,
            io_mode="auto",
            staging_dir=None,
            folder=os.path.dirname(bucket[0]),
            manifest_path=None,
        )
        write = CheckpointWrite([bucket], options, None)
        write()
        if write.failure is not None:
            raise write.failure
        found[index] = write.results or []
    return found


def _process_memory() -> int:
    """Return the resident memory of this process in bytes."""
    with open("/proc/self/statm", encoding="ascii") as file:
        pages = int(file.read().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _msc() -> Any:
    try:
        import multistorageclient
    except ImportError as error:
        raise MissingExtraError("use_msc", "nvrx-ckpt[msc]", error) from error
    return multistorageclient
