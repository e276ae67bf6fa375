# SPDX-License-Identifier: Apache-2.0
"""Owns the shape of an aggregator's position and its text form; it opens no file.

Before a batch is written, the position says where each file is read to before and after it, where
the output ends, and what the batch's bytes are (length and checksum). Whoever finds the position
later can tell from the output whether the batch is in it, and can make the same bytes again.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from zlib import crc32

__all__ = ["STATE_NAME", "Batch", "FilePosition", "Position", "decode", "encode"]

STATE_NAME = ".nvrx_log_aggregator.state"
FRESH_S = 60.0
_VERSION = 1
_FILE_FIELDS = 5


@dataclass(frozen=True, slots=True)
class FilePosition:
    """How far a file is read. Its first bytes tell it from a later file with its inode number.

    Attributes:
        inode: Number of the file.
        done: Offset up to which the merged file has everything.
        after: Offset after the present batch; ``done`` without one.
        head_bytes: How many first bytes are known.
        head_crc: Their checksum.
    """

    inode: int
    done: int
    after: int
    head_bytes: int
    head_crc: int

    def is_of(self, descriptor: int) -> bool:
        """Say whether an open file of this inode is the file that was meant."""
        if os.fstat(descriptor).st_size < self.done:
            return False
        return crc32(os.pread(descriptor, self.head_bytes, 0)) == self.head_crc


@dataclass(frozen=True, slots=True)
class Batch:
    """Bytes that are being appended to the output."""

    length: int
    crc: int
    is_ordered: bool


@dataclass(frozen=True, slots=True)
class Position:
    """Everything that an aggregator must know when it starts again.

    Attributes:
        output_inode: The merged file.
        output_bytes: Its size before the batch.
        files: What is known of each file, in the order of a batch.
        batch: What may or may not be in the output; None when nothing is under way.
        boot_id: The boot that ``monotonic_s`` belongs to.
        monotonic_s: When this was written.
    """

    output_inode: int
    output_bytes: int
    files: tuple[FilePosition, ...]
    batch: Batch | None
    boot_id: str
    monotonic_s: float

    def done_of(self, descriptor: int) -> int:
        """Return how far an open file is surely read; 0 when it is not known."""
        inode = os.fstat(descriptor).st_ino
        known = (each for each in self.files if each.inode == inode and each.is_of(descriptor))
        return next((each.done for each in known), 0)

    def is_fresh(self, monotonic_s: float) -> bool:
        """Say whether the aggregator that wrote this is alive, or may be back any moment."""
        return 0.0 <= monotonic_s - self.monotonic_s < FRESH_S


def encode(position: Position, number: int) -> bytes:
    """Return a position as text with a checksum; the higher the number, the later it is."""
    batch = position.batch
    fields = {
        "version": _VERSION,
        "number": number,
        "output": [position.output_inode, position.output_bytes],
        "batch": None if batch is None else [batch.length, batch.crc, batch.is_ordered],
        "boot_id": position.boot_id,
        "monotonic_s": position.monotonic_s,
        "files": [
            [each.inode, each.done, each.after, each.head_bytes, each.head_crc]
            for each in position.files
        ],
    }
    text = json.dumps(fields, separators=(",", ":")).encode()
    return b"%08x %08x %s\n" % (crc32(text), len(text), text)


def decode(data: bytes) -> tuple[int, Position] | None:
    """Return number and position in the text form, None where there is none that is whole."""
    try:
        crc, length = int(data[:8], 16), int(data[9:17], 16)
        text = data[18 : 18 + length]
        if len(text) != length or crc32(text) != crc:
            return None
        fields = json.loads(text)
        return _position(fields)
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


def _position(fields: dict[str, object]) -> tuple[int, Position]:
    """Check every field.

    Raises:
        ValueError, TypeError, KeyError: It is not what ``encode`` makes.
    """
    if fields["version"] != _VERSION:
        raise ValueError("another version")
    output_inode, output_bytes = _naturals(fields["output"], 2)
    files = fields["files"]
    if not isinstance(files, list):
        raise TypeError("no list of files")
    monotonic_s = fields["monotonic_s"]
    if not isinstance(monotonic_s, (int, float)):
        raise TypeError("no time")
    position = Position(
        output_inode=output_inode,
        output_bytes=output_bytes,
        files=tuple(FilePosition(*_naturals(each, _FILE_FIELDS)) for each in files),
        batch=_batch(fields["batch"]),
        boot_id=str(fields["boot_id"]),
        monotonic_s=float(monotonic_s),
    )
    return _naturals([fields["number"]], 1)[0], position


def _batch(value: object) -> Batch | None:
    if value is None:
        return None
    length, crc, is_ordered = _naturals(value, 3)
    return Batch(length, crc, bool(is_ordered))


def _naturals(value: object, count: int) -> list[int]:
    if not isinstance(value, list) or len(value) != count:
        raise TypeError("not a list of that length")
    if not all(isinstance(each, int) and each >= 0 for each in value):
        raise ValueError("not all numbers of 0 or more")
    return [int(each) for each in value]
