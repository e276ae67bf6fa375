# SPDX-License-Identifier: Apache-2.0
"""Read and check shards from a file or from another rank; nothing is unpickled here."""

from __future__ import annotations

import contextlib
import os
import stat
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from nvidia_resiliency_ext.checkpointing._checksum import crc32
from nvidia_resiliency_ext.checkpointing._errors import DamagedCheckpointError
from nvidia_resiliency_ext.checkpointing._shard.layout import (
    FOOTER_BYTES,
    MANIFEST_LIMIT_BYTES,
    Footer,
    Manifest,
    Record,
    ShardFormatError,
)
from nvidia_resiliency_ext.checkpointing._shard.write import frames

_CHUNK_BYTES = 8 << 20


class ShardSource(Protocol):
    """Where the bytes of a shard come from.

    Attributes:
        name: What to call it in messages.
        nbytes: Length of the shard.
    """

    name: str
    nbytes: int

    def read_into(self, position: int, target: memoryview) -> None:
        """Fill the target with the bytes at a position.

        Raises:
            OSError: They cannot be had.
        """

    def close(self) -> None:
        """Give the source back."""


class FileSource:
    """A shard in a file of ours.

    Args:
        path: The file.
        directory_fd: Descriptor of the directory that `path` is relative to.
        any_owner: Accept a file that others own or may write to: nothing of it is loaded.

    Raises:
        OSError: It is missing, a symbolic link, not a regular file, belongs to somebody else, or
            others may write to it.
    """

    def __init__(
        self, path: str, directory_fd: int | None = None, *, any_owner: bool = False
    ) -> None:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        self._fd = os.open(path, flags, dir_fd=directory_fd)
        status = os.fstat(self._fd)
        problem = ""
        if not stat.S_ISREG(status.st_mode):
            problem = "not a regular file"
        elif not any_owner and status.st_uid != os.geteuid():
            problem = f"the file belongs to uid {status.st_uid}"
        elif not any_owner and status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            problem = "others may write to the file"
        if problem:
            os.close(self._fd)
            raise PermissionError(1, problem, path)
        self.name = path
        self.nbytes = status.st_size

    def read_into(self, position: int, target: memoryview) -> None:
        """Fill the target with the bytes at a position."""
        while target:
            count = os.preadv(self._fd, [target[:_CHUNK_BYTES]], position)
            if count == 0:
                raise OSError(5, "the file is shorter than it was", self.name)
            position, target = position + count, target[count:]

    def fileno(self) -> int:
        """Return the descriptor; it stays the source's."""
        return self._fd

    def close(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def read_manifest(source: ShardSource) -> Manifest:
    """Return the manifest of a shard, after checking the shard's length.

    This reads the end of the shard only, whatever its size.

    Raises:
        DamagedCheckpointError: The shard is cut, or no shard, or its manifest has changed.
        OSError: It cannot be read.
    """
    try:
        return _parse_end(source)
    except ShardFormatError as error:
        raise DamagedCheckpointError(source.name, str(error)) from error


def _parse_end(source: ShardSource) -> Manifest:
    footer = Footer.parse(_read(source, source.nbytes - FOOTER_BYTES, FOOTER_BYTES))
    if footer.file_bytes != source.nbytes:
        problem = f"{source.nbytes} bytes long, {footer.file_bytes} were written"
        raise ShardFormatError(problem)
    end = footer.manifest_offset + footer.manifest_bytes
    if footer.manifest_bytes > MANIFEST_LIMIT_BYTES or end > source.nbytes:
        raise ShardFormatError("the footer is damaged")
    encoded = _read(source, footer.manifest_offset, footer.manifest_bytes)
    if zlib.crc32(encoded) != footer.manifest_crc32:
        raise ShardFormatError("the manifest has changed since it was written")
    manifest = Manifest.parse(encoded)
    limit = 0
    for record in manifest.records:
        if record.offset < limit:
            raise ShardFormatError("records overlap")
        limit = record.offset + record.nbytes
    if not manifest.records or limit > footer.manifest_offset:
        raise ShardFormatError("records lie outside of the file")
    return manifest


def read_record(
    source: ShardSource,
    record: Record,
    target: memoryview,
    *,
    verify: bool = True,
    on_progress: Callable[[int], None] = lambda _: None,
) -> None:
    """Fill the target with the bytes of a record and, unless told not to, compare the checksum.

    Raises:
        DamagedCheckpointError: The bytes have changed since they were written.
        OSError: They cannot be read.
    """
    whole = target[: record.nbytes]
    pieces = (
        whole[start : start + _CHUNK_BYTES] for start in range(0, record.nbytes, _CHUNK_BYTES)
    )
    _read_pieces(source, record, pieces, verify=verify, on_progress=on_progress)


def _read_pieces(
    source: ShardSource,
    record: Record,
    pieces: Iterable[memoryview],
    *,
    verify: bool,
    on_progress: Callable[[int], None],
) -> None:
    """Fill pieces, which together are as long as a record, and compare its checksum."""
    position, value = record.offset, 0
    for piece in pieces:
        source.read_into(position, piece)
        position += piece.nbytes
        value = crc32(piece, value) if verify else 0
        on_progress(piece.nbytes)
    if verify and value != record.crc32:
        title = f"{record.tensor} ({record.name})" if record.tensor else f"record {record.name}"
        raise DamagedCheckpointError(source.name, f"{title} has changed: wrong checksum")


def damage_of(
    source: ShardSource, manifest: Manifest, on_progress: Callable[[int], None] = lambda _: None
) -> Iterator[str]:
    """Yield the problems of a shard, record by record; every byte is checked.

    Args:
        source: The shard.
        manifest: What it says about itself.
        on_progress: Called with the length of each piece that was read.
    """
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    for record in manifest.records:
        lefts = range(record.nbytes, 0, -_CHUNK_BYTES)
        pieces = (buffer[:left] for left in lefts)  # one after the other, in the same memory
        try:
            _read_pieces(source, record, pieces, verify=True, on_progress=on_progress)
        except DamagedCheckpointError as error:
            yield error.problem
    with contextlib.suppress(ShardFormatError):
        for position, frame in frames(manifest):
            if (
                position + len(frame) > source.nbytes
                or _read(source, position, len(frame)) != frame
            ):
                yield f"bytes between the records, at {position}, have changed"
        return
    yield "the records do not lie as they should"


def _read(source: ShardSource, position: int, nbytes: int) -> bytes:
    if position < 0:
        raise ShardFormatError(f"{source.nbytes} bytes are too few for a shard")
    data = bytearray(nbytes)
    source.read_into(position, memoryview(data))
    return bytes(data)
