# SPDX-License-Identifier: Apache-2.0
"""Write files to a node-local directory first, then copy them to the durable directory.

The second step may take long, or hang with its file system, while later saves go on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import shutil
import threading
from typing import TYPE_CHECKING

from nvidia_resiliency_ext.shared_utils.os_utils import lock_file

from ._durable import CHUNK_BYTES, FileSaver, SaveCancelledError, publish_files, temporary_name
from ._errors import CheckpointWriteError
from ._locks import open_locked

if TYPE_CHECKING:
    from collections.abc import Callable

    from ._write_plan import FilePlan, FileResult, WritePlan


_PREFIX = "nvrx-ckpt-"
_LOCK_WAIT_S = 60.0  # others look whether a directory is left over, for moments


class LocalCopy:
    """The files of one plan in a node-local directory.

    Args:
        plan: The plan; its `staging_dir` is where the files go first.
        view: The staging buffer; not needed any more when `write` has returned.
        on_progress: Called with the number of bytes of each chunk written to the local directory.

    Attributes:
        stopped: Set by `cancel`.
    """

    def __init__(
        self, plan: WritePlan, view: memoryview, on_progress: Callable[[int], None]
    ) -> None:
        self.plan = plan
        self.stopped = threading.Event()
        self._tag = secrets.token_hex(8)
        self._folder = os.path.join(plan.staging_dir or "", f"{_PREFIX}{self._tag}")
        self._lock = -1
        files = [
            dataclasses.replace(file, path=self._local(number))
            for number, file in enumerate(plan.files)
        ]
        local = dataclasses.replace(plan, files=files, remove_first=[], sync=False)
        self._saver = FileSaver(local, view, on_progress=on_progress)
        self.results: list[FileResult] = []

    def write(self) -> None:
        """Write the files to the local directory.

        Raises:
            CheckpointWriteError: One cannot be written; nothing is left there.
        """
        try:
            self._lock = open_locked(self._make, self._folder, _LOCK_WAIT_S)
            _remove_leftovers(os.path.dirname(self._folder))
        except OSError as error:
            self.remove()
            raise CheckpointWriteError.from_os(error, self._folder, 0, "create") from error
        try:
            found = self._saver.run()
        except BaseException:
            self.remove()
            raise
        rows = zip(self.plan.files, found, strict=True)
        self.results = [dataclasses.replace(result, path=file.path) for file, result in rows]

    def flush(self) -> list[FileResult]:
        """Copy the files to where they belong and give them their names.

        Raises:
            CheckpointWriteError: One cannot be written; the local files stay for another attempt.
            SaveCancelledError: `cancel` was called.
        """
        names = [temporary_name(file.path, self._tag) for file in self.plan.files]
        try:
            for number, file in enumerate(self.plan.files):
                self._copy(self._local(number), names[number], file)
            publish_files(self.plan, names)
        except BaseException:
            for name in names:
                with contextlib.suppress(OSError):
                    os.unlink(name)
            raise
        return self.results

    def cancel(self) -> None:
        """Let running writes end soon, with an error."""
        self.stopped.set()
        self._saver.cancel()

    def remove(self) -> None:
        """Remove the local files."""
        shutil.rmtree(self._folder, ignore_errors=True)
        lock, self._lock = self._lock, -1
        if lock >= 0:
            os.close(lock)

    def _make(self) -> int:
        os.makedirs(self._folder, mode=0o700, exist_ok=True)
        return os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def _local(self, number: int) -> str:
        return os.path.join(self._folder, str(number))

    def _copy(self, source: str, target: str, file: FilePlan) -> None:
        done, action = 0, "create"
        try:
            with open(source, "rb", buffering=0) as reader, open(target, "wb", buffering=0) as out:
                action = "write"
                while data := reader.read(CHUNK_BYTES):
                    if self.stopped.is_set():
                        raise SaveCancelledError
                    view = memoryview(data)
                    while view:
                        count = out.write(view)
                        done, view = done + count, view[count:]
                action = "fsync"
                if self.plan.sync:
                    os.fsync(out.fileno())
        except OSError as error:
            raise CheckpointWriteError.from_os(error, file.path, done, action) from error


def _remove_leftovers(staging_dir: str) -> None:
    """Remove the directories of workers that are gone; a living one has locked its own."""
    for entry in os.scandir(staging_dir):
        if not entry.name.startswith(_PREFIX) or not entry.is_dir(follow_symlinks=False):
            continue
        with contextlib.suppress(OSError):  # another worker was faster, or it is another user's
            folder = os.open(entry.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                lock_file(folder)
                shutil.rmtree(entry.path, ignore_errors=True)
            finally:
                os.close(folder)
