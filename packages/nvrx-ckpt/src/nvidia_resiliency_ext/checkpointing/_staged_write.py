# SPDX-License-Identifier: Apache-2.0
"""Saves that only write bytes: what a queue can hand to a worker process without torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Protocol

from ._durable import FileSaver
from ._errors import AsyncSaveError
from ._locks import SaveLock
from ._manifest import write_rank_manifest
from ._staging import StagingBuffer

if TYPE_CHECKING:
    from collections.abc import Callable

    from ._write_plan import FileResult, WritePlan


class Publication(Protocol):
    """The step that makes a checkpoint of files that are durable on all ranks.

    Attributes:
        place: What is equal for saves to one directory: its path, or its address.
        begun: Whether `gather` was called.
    """

    place: str
    begun: bool

    def gather(self) -> bool:
        """Exchange data between ranks, which all call it. Return whether this rank publishes."""

    def write(self, is_dropped: Callable[[], bool] = lambda: False) -> None:
        """Publish, from any thread; a failure is kept for the finalize function."""


class NoArguments(list[Any]):
    """The empty arguments of a request that writes nothing on this rank.

    Who replaces them must not save to the directory of a pending save: the other ranks finalise
    that first, and this one does not know the directory.

    Args:
        publication: What this rank takes part in all the same; None for nothing.
    """

    def __init__(self, publication: Publication | None) -> None:
        super().__init__()
        self.publication = publication


class StagedWrite(ABC):
    """A save whose files are bytes that the trainer stages; used as `AsyncRequest.async_fn`.

    The queue asks for the size, lends a buffer, lets the trainer stage into it, and hands the plan
    to a worker process. One object is one save; called like a function, it saves at once.
    """

    opener: Callable[[str, str], Any] | None = None
    """Replaces the opening of files, as `opener(path, "wb")`; the worker then imports user code."""

    renames: bool = True
    """Whether files get a temporary name first; False for object stores."""

    pinned: bool = False
    """Whether data comes from a CUDA device, so that the buffer should be registered with it."""

    publication: Publication | None = None
    """What follows when all ranks have written, away from the training thread where possible."""

    @abstractmethod
    def staging_bytes(self) -> int:
        """Return how large the staging buffer must be; each file begins on a page of its own."""

    @abstractmethod
    def stage(self, buffer: StagingBuffer) -> WritePlan:
        """Copy everything into the buffer, wait for copies from devices, and return the plan."""

    @abstractmethod
    def written(self, manifest: FileResult | None) -> None:
        """Hear that all files are durable now; called on the trainer.

        Args:
            manifest: The manifest of this rank, where the plan has one.
        """

    def error(self, call_idx: int, rank: int, cause: str) -> AsyncSaveError:
        """Return the error that trainers raise when some rank wrote nothing."""
        return AsyncSaveError(call_idx, rank, cause)

    def __call__(self, *_args: object, **_kwargs: object) -> None:
        """Stage and write in this thread.

        Raises:
            CheckpointWriteError: A file cannot be written.
        """
        buffer = StagingBuffer(self.staging_bytes(), pinned=self.pinned)
        lock = None
        try:
            plan = self.stage(buffer)
            lock = None if plan.manifest is None else SaveLock(plan.manifest)
            saver = FileSaver(plan, buffer.view, opener=self.opener, renames=self.renames)
            manifest = write_rank_manifest(plan, saver.run())
        finally:
            if lock is not None:
                lock.close()
            buffer.close()
        self.written(manifest)
