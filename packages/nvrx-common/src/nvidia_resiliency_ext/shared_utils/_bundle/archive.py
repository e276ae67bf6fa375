# SPDX-License-Identifier: Apache-2.0
"""Owns the archive: a new file of ours, with plain files under one directory, bounded in size."""

from __future__ import annotations

import io
import os
import tarfile
import time

__all__ = ["Archive"]

_LONGEST_NAME = 80


class Archive:
    """Collects texts and writes them at the end.

    Args:
        top: Name of the directory that everything lies in.
        max_bytes: How much text it takes.
    """

    def __init__(self, top: str, max_bytes: int) -> None:
        self._top = _safe_part(top)
        self._entries: dict[str, bytes] = {}
        self.left_bytes = max_bytes

    def add(self, name: str, text: str) -> bool:
        """Take a text if there is room for it, and say whether there was."""
        data = text.encode("utf-8", "backslashreplace")
        if len(data) > self.left_bytes:
            return False
        self.left_bytes -= len(data)
        path = "/".join(_safe_part(part) for part in name.split("/") if part not in {"", "."})
        number = 1
        unique = path
        while unique in self._entries:
            number += 1
            unique = f"{path}-{number}"
        self._entries[unique] = data
        return True

    def write(self, path: str) -> int:
        """Write the archive to a new file, readable by its owner only; return its size.

        Raises:
            FileExistsError: There is something of that name.
            OSError: It cannot be written; then there is no such file.
        """
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(path, flags, 0o600)
        try:
            with open(descriptor, "wb") as file:
                self._write_to(file)
                file.flush()
                return os.fstat(file.fileno()).st_size
        except BaseException:
            os.unlink(path)
            raise

    def _write_to(self, file: io.BufferedWriter) -> None:
        with tarfile.open(fileobj=file, mode="w:gz", format=tarfile.PAX_FORMAT) as tar:
            for name, data in self._entries.items():
                entry = tarfile.TarInfo(f"{self._top}/{name}")
                entry.size = len(data)
                entry.mode = 0o600
                entry.mtime = int(time.time())
                tar.addfile(entry, io.BytesIO(data))


def _safe_part(part: str) -> str:
    """Return a part of a path that means the same everywhere: no separators, not hidden, short."""
    kept = "".join(
        char if char.isascii() and (char.isalnum() or char in "._-=@") else "_" for char in part
    )
    return kept.lstrip(".-")[-_LONGEST_NAME:] or "_"
