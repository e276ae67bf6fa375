# SPDX-License-Identifier: Apache-2.0
"""Verify that a checkpoint is whole, by its manifests and checksums; nothing is unpickled."""

from __future__ import annotations

import contextlib
import glob
import os
import re
import stat
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ._checksum import combine, crc32
from ._errors import DamagedCheckpointError
from ._manifest import MANIFEST, METADATA, read_manifest
from ._shard.layout import Manifest as ShardManifest
from ._shard.read import FileSource, damage_of
from ._shard.read import read_manifest as read_shard_manifest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_SHARD = re.compile(r"iter_\d{7,}_\d+_local\.pt")
_READ_BYTES = 4 << 20
_MAX_DEPTH = 3
_LIMIT = 1 << 62


@dataclass
class VerifyReport:
    """Result of the verification of a checkpoint.

    Attributes:
        path: Its directory.
        has_manifest: Whether it says what it must consist of; without one nothing can be told.
        problems: What is wrong, one line each, naming file and tensor.
        files: How many files were read.
        nbytes: How many bytes.
        items: How many tensors and objects are in them.
    """

    path: str
    has_manifest: bool = True
    problems: list[str] = field(default_factory=list)
    files: int = 0
    nbytes: int = 0
    items: int = 0

    @property
    def whole(self) -> bool:
        """Whether the checkpoint is known to be complete and unchanged."""
        return self.has_manifest and not self.problems


def verify_checkpoint(
    path: str | os.PathLike[str], *, on_progress: Callable[[int, int], None] = lambda *_: None
) -> VerifyReport:
    """Compare each file of a checkpoint with its checksums.

    Args:
        path: Directory of a DCP checkpoint that was saved asynchronously, or one with shards of
            local checkpoints in it or below it.
        on_progress: Called with the bytes read so far and their total.

    Returns:
        What was found.

    Raises:
        NotADirectoryError: There is no such directory.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     verify_checkpoint(folder).has_manifest
        False
    """
    folder = os.fspath(path)
    if not os.path.isdir(folder):
        raise NotADirectoryError(f"there is no directory {folder}")
    report = VerifyReport(folder)
    if os.path.lexists(os.path.join(folder, MANIFEST)):
        try:
            files = _files(folder)
        except (DamagedCheckpointError, OSError) as error:
            report.problems.append(str(error))
            return report
        _check_files(report, files, on_progress)
    elif _has_lost_its_manifest(folder):
        report.problems.append(f"{MANIFEST}: it is missing")
    elif shards := _shards(folder):
        _check_shards(report, shards, on_progress)
    else:
        report.has_manifest = False
    return report


@dataclass(frozen=True)
class CheckpointItem:
    """A tensor or object in a checkpoint.

    Attributes:
        name: Its name, with offsets where it is a part of a larger tensor.
        file: The file that it is in.
        start: Offset in the file, in bytes.
        length: Its length in bytes.
        crc32: Checksum of these bytes.
    """

    name: str
    file: str
    start: int
    length: int
    crc32: int


def checkpoint_items(path: str | os.PathLike[str]) -> list[CheckpointItem] | None:
    """Return the items of a checkpoint according to its manifests; the data is not read.

    Returns:
        The items by file; None without a manifest.

    Raises:
        NotADirectoryError: There is no such directory.
        DamagedCheckpointError: A manifest is damaged.
        OSError: A manifest cannot be read.
    """
    folder = os.fspath(path)
    if not os.path.isdir(folder):
        raise NotADirectoryError(f"there is no directory {folder}")
    if os.path.lexists(os.path.join(folder, MANIFEST)):
        files = [file for file in _files(folder) if file.in_rank_manifest]
        return [
            CheckpointItem(name, file.name, start, length, crc)
            for file in files
            for name, start, length, crc in file.items
        ]
    found = []
    for file in _shards(folder):
        with _shard(os.path.join(folder, file)) as (_, manifest):
            found += [
                CheckpointItem(r.tensor or r.name, file, r.offset, r.nbytes, r.crc32)
                for r in manifest.records
            ]
    return found or None


def require_whole(path: str, *, on_progress: Callable[[int, int], None] = lambda *_: None) -> None:
    """Raise unless a checkpoint is whole, or has no manifest to tell.

    Raises:
        DamagedCheckpointError: It is not whole; all problems are named.
    """
    report = verify_checkpoint(path, on_progress=on_progress)
    if report.problems:
        raise DamagedCheckpointError(path, "; ".join(report.problems))


@dataclass(frozen=True)
class _File:
    """A file that a checkpoint must have.

    Attributes:
        name: Its name.
        nbytes: Its length in bytes.
        crc32: Checksum of all of it.
        items: Name, start, length and checksum of what is in it; they cover it without gaps.
        in_rank_manifest: Whether it holds data of a rank.
    """

    name: str
    nbytes: int
    crc32: int
    items: list[tuple[str, int, int, int]]
    in_rank_manifest: bool

    @classmethod
    def parse(cls, name: Any, about: Any, *, in_rank_manifest: bool = False) -> _File:
        """Parse a manifest's entry for a file.

        Raises:
            KeyError, TypeError, ValueError: It says nothing that makes sense.
        """
        nbytes, crc = about["bytes"], about["crc32"]
        rows = about.get("items") or [[name, 0, nbytes, crc]]
        items = [(text, start, length, number) for text, start, length, number in rows]
        numbers = [nbytes, crc, *(number for _, *rest in items for number in rest)]
        texts = [name, *(text for text, *_ in items)]
        if any(type(number) is not int or not 0 <= number < _LIMIT for number in numbers):
            raise TypeError(f"{name!r} has a number that is none")
        if any(type(text) is not str for text in texts):
            raise TypeError(f"{name!r} has a name that is no text")
        end = 0
        for _, start, length, _ in items:
            if start != end:
                raise ValueError(f"the items of {name!r} leave a gap")
            end = start + length
        if end != nbytes:
            raise ValueError(f"the items of {name!r} do not cover it")
        return cls(name, nbytes, crc, items, in_rank_manifest)


def _files(folder: str) -> list[_File]:
    """Return the files that a checkpoint must have, with their items and checksums."""
    try:
        manifest = read_manifest(os.path.join(folder, MANIFEST))
        files = [_File.parse(METADATA, manifest["metadata"])]
        for rank in manifest["ranks"]:
            files.append(_File.parse(rank["name"], rank))
            content = read_manifest(_inside(folder, rank["name"]))["files"]
            files += [_File.parse(*one, in_rank_manifest=True) for one in content.items()]
    except DamagedCheckpointError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DamagedCheckpointError(folder, f"a field of a manifest is wrong: {error}") from None
    return files


def _shards(folder: str) -> list[str]:
    """Return the shards of local checkpoints in a directory, or in directories in it."""
    found = []
    for path, folders, names in os.walk(folder):
        shards = [os.path.join(path, name) for name in names if _SHARD.fullmatch(name)]
        found += [os.path.relpath(shard, folder) for shard in shards]
        if path.count(os.sep) - folder.rstrip(os.sep).count(os.sep) >= _MAX_DEPTH:
            folders.clear()
    return sorted(found)


@contextlib.contextmanager
def _shard(path: str) -> Iterator[tuple[FileSource, ShardManifest]]:
    source = FileSource(path, any_owner=True)
    try:
        yield source, read_shard_manifest(source)
    finally:
        source.close()


def _check_shards(
    report: VerifyReport, shards: Sequence[str], on_progress: Callable[[int, int], None]
) -> None:
    sizes = dict.fromkeys(shards, 0)
    for name in shards:
        with contextlib.suppress(OSError):  # it is gone by now: a problem below
            sizes[name] = os.lstat(os.path.join(report.path, name)).st_size
    total = sum(sizes.values())
    done = end = 0

    def count(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        on_progress(done, total)

    for name in shards:
        try:
            with _shard(os.path.join(report.path, name)) as (source, manifest):
                found = damage_of(source, manifest, count)
                report.problems += [f"{name}: {damage}" for damage in found]
                report.items += len(manifest.records)
                report.nbytes += source.nbytes
        except (OSError, DamagedCheckpointError) as error:
            report.problems.append(f"{name}: {error}")
        report.files += 1
        end += sizes[name]
        count(end - done)  # what is no record, or has not been read


def _has_lost_its_manifest(folder: str) -> bool:
    # One without content is what a save that was killed has locked; it has replaced nothing yet.
    ours = glob.glob(os.path.join(glob.escape(folder), ".nvrx_manifest.*"))
    return os.path.lexists(os.path.join(folder, METADATA)) and any(
        os.lstat(path).st_size for path in ours
    )


def _inside(folder: str, name: str) -> str:
    if os.path.basename(name) != name or name in ("", ".", "..") or b"\0" in os.fsencode(name):
        raise DamagedCheckpointError(folder, f"{name!r} is no name of a file in it")
    return os.path.join(folder, name)


def _check_files(
    report: VerifyReport, files: Sequence[_File], on_progress: Callable[[int, int], None]
) -> None:
    total = sum(file.nbytes for file in files)
    for file in files:
        try:
            for nbytes in _check_file(report, file):
                report.nbytes += nbytes
                on_progress(report.nbytes, total)
        except (OSError, ValueError) as error:  # also a name that no file can have
            report.problems.append(f"{file.name}: {error}")
        report.files += 1


def _check_file(report: VerifyReport, file: _File) -> Iterator[int]:
    name = file.name
    # Not blocking: opening a pipe would wait until somebody writes to it.
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    fd = os.open(_inside(report.path, name), flags)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            report.problems.append(f"{name}: it is not a regular file")
            return
        if status.st_size != file.nbytes:
            report.problems.append(f"{name}: {status.st_size} bytes instead of {file.nbytes}")
        total = 0
        for item, start, length, expected in file.items:
            crc, position = 0, start
            while position < start + length:
                data = os.pread(fd, min(_READ_BYTES, start + length - position), position)
                if not data:
                    break
                crc = crc32(data, crc)
                position += len(data)
                yield len(data)
            report.items += 1
            if crc != expected or position != start + length:
                report.problems.append(f"{name}: {item!r} is not what was written")
            total = combine(total, crc, length)
        if total != file.crc32:
            report.problems.append(f"{name}: the checksum of the file is wrong")
    finally:
        os.close(fd)
