# SPDX-License-Identifier: Apache-2.0
"""Lay out the bytes of a shard file; pure functions that need no torch.

A shard is a zip file as `torch.save` makes it: `torch.load` reads it, and so do zip tools::

    archive/data.pkl           the state without the bytes of its tensors
    archive/byteorder
    archive/data/0 ...         the bytes of the tensors' storages, each at a multiple of 64
    archive/version
    archive/nvrx_manifest.json identity, and offset, length and CRC-32 of each record above
    central directory of the zip, its end record with a comment of fixed length: the footer

The footer ends the file. It says how long the file is and where the manifest lies, so a cut file
is noticed by its last bytes. All bytes that belong to no record follow from the manifest, so a
reader compares them, and no bit of a shard can change unnoticed.
"""

from __future__ import annotations

import json
import struct
import zlib
from dataclasses import asdict, dataclass, field
from typing import Any

MANIFEST_NAME = "nvrx_manifest.json"
MANIFEST_LIMIT_BYTES = 256 << 20
_FORMAT = "nvrx-local-shard"
_VERSION = 1
_ALIGNMENT = 64
_ROOT = "archive/"
_UTF8_FLAG = 0x0800
_DOS_DATE = 33  # the 1st of January 1980: the same state always gives the same bytes
_LIMIT_32 = 0xFFFFFFFF
_LIMIT_16 = 0xFFFF
_NAME_LIMIT_BYTES = 1000
_LOCAL = struct.Struct("<4sHHHHHIIIHH")
_CENTRAL = struct.Struct("<4sHHHHHHIIIHHHHHII")
_END_64 = struct.Struct("<4sQHHIIQQQQ")
_LOCATOR_64 = struct.Struct("<4sIQI")
_END = struct.Struct("<4sHHHHIIH")
_FOOTER = struct.Struct("<8sQQQI")
_FOOTER_MAGIC = b"NVRXSHD1"
FOOTER_BYTES = _FOOTER.size


class ShardFormatError(ValueError):
    """A file is no whole shard of this format; the message says what is wrong with it."""


@dataclass(frozen=True)
class ShardIdentity:
    """Which part of which checkpoint a shard is.

    Attributes:
        iteration: Training iteration that was saved.
        owner: Global rank whose state it is; a replica names the rank that it was copied from.
        session_id: Session of the manager, as text.
        world_size: How many ranks saved together.
        jump: Distance of the ranks that hold copies of each other; 0 without replication.
        factor: How many copies there are in all; 1 without replication.
    """

    iteration: int
    owner: int
    session_id: str
    world_size: int
    jump: int = 0
    factor: int = 1


@dataclass(frozen=True)
class Record:
    """One record of the zip file.

    Attributes:
        name: Name below `archive/`.
        offset: Position of its first byte in the file.
        nbytes: Its length.
        crc32: Checksum of its bytes.
        tensor: What the bytes are in the state, as far as it is known.
    """

    name: str
    offset: int
    nbytes: int
    crc32: int = 0
    tensor: str = ""


@dataclass(frozen=True)
class Footer:
    """The end of the file: where the manifest lies, and how long the whole file is."""

    file_bytes: int
    manifest_offset: int
    manifest_bytes: int
    manifest_crc32: int

    @classmethod
    def parse(cls, data: bytes) -> Footer:
        """Read the last `FOOTER_BYTES` bytes of a file.

        Raises:
            ShardFormatError: They are no footer.
        """
        if len(data) != FOOTER_BYTES:
            raise ShardFormatError("the file is too short to be a shard")
        magic, *numbers = _FOOTER.unpack(data)
        if magic != _FOOTER_MAGIC:
            raise ShardFormatError("the file does not end as a shard does: cut, or something else")
        return cls(*numbers)


@dataclass(frozen=True)
class Manifest:
    """A shard's description of itself.

    Attributes:
        identity: Which part of which checkpoint it is.
        state_class: Module and name of the class of the state.
        records: All records but the manifest, in the order of the file.
    """

    identity: ShardIdentity
    state_class: str
    records: tuple[Record, ...] = field(default_factory=tuple)

    def encode(self) -> bytes:
        """Return the manifest as JSON; equal manifests give equal bytes."""
        records = [
            [record.name, record.offset, record.nbytes, f"{record.crc32:08x}", record.tensor]
            for record in self.records
        ]
        data = {
            "format": _FORMAT,
            "version": _VERSION,
            "algorithm": "crc32",
            "identity": asdict(self.identity),
            "state_class": self.state_class,
            "records": records,
        }
        return json.dumps(data, separators=(",", ":")).encode()

    @classmethod
    def parse(cls, data: bytes) -> Manifest:
        """Read JSON from a file that anybody may have written.

        Raises:
            ShardFormatError: It is no manifest of this version.
        """
        try:
            found = json.loads(data)
            _require_version(found["format"], found["version"])
            identity = _typed_identity(found["identity"])
            records = tuple(_typed_record(item) for item in found["records"])
            return cls(identity, str(found["state_class"]), records)
        except ShardFormatError:
            raise
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise ShardFormatError(f"the manifest cannot be read: {error!r}"[:200]) from error


def _require_version(name: object, version: object) -> None:
    if (name, version) != (_FORMAT, _VERSION):
        raise ShardFormatError(f"this is format {name!r} {version!r}, known is {_VERSION}")


def _typed_identity(found: dict[str, Any]) -> ShardIdentity:
    identity = ShardIdentity(**found)
    numbers = (identity.iteration, identity.owner, identity.world_size, identity.jump)
    if not all(type(number) is int for number in (*numbers, identity.factor)):
        raise ShardFormatError("a number of the identity is none")
    if not isinstance(identity.session_id, str):
        raise ShardFormatError("the session of the identity is no text")
    return identity


def _typed_record(item: list[Any]) -> Record:
    name, offset, nbytes, crc32, tensor = item
    record = Record(str(name), offset, nbytes, int(crc32, 16), str(tensor))
    if type(offset) is not int or type(nbytes) is not int or min(offset, nbytes) < 0:
        raise ShardFormatError("offset or length of a record is no number")
    if not 0 <= record.crc32 <= _LIMIT_32 or len(record.name.encode()) > _NAME_LIMIT_BYTES:
        raise ShardFormatError("checksum or name of a record is none")
    return record


def place_records(sizes: list[tuple[str, int, str]]) -> tuple[Record, ...]:
    """Return where records of these names, lengths and meanings lie, one behind the other."""
    records = []
    position = 0
    for name, nbytes, tensor in sizes:
        bare = _LOCAL.size + len(_ROOT) + len(name.encode()) + _extra_64_bytes(nbytes)
        # 4 bytes at least for the head of the padding field.
        offset = -(-(position + bare + 4) // _ALIGNMENT) * _ALIGNMENT
        records.append(Record(name, offset, nbytes, 0, tensor))
        position = offset + nbytes
    return tuple(records)


def frame_before(record: Record, begin: int) -> bytes:
    """Return the bytes from `begin`, the end of the record before, to the record's own."""
    name = (_ROOT + record.name).encode()
    extra = b""
    size = record.nbytes
    if _extra_64_bytes(size):
        extra = struct.pack("<HHQQ", 1, 16, size, size)
        size = _LIMIT_32
    padding = record.offset - begin - _LOCAL.size - len(name) - len(extra) - 4
    if not 0 <= padding < 2 * _ALIGNMENT:
        raise ShardFormatError(f"record {record.name!r} lies where it cannot")
    extra += struct.pack("<2sH", b"FB", padding) + b"Z" * padding
    head = _LOCAL.pack(
        b"PK\x03\x04", 45 if size == _LIMIT_32 else 20, _UTF8_FLAG, 0, 0, _DOS_DATE,
        record.crc32, size, size, len(name), len(extra),
    )  # fmt: skip
    return head + name + extra


def frame_after(records: tuple[Record, ...]) -> bytes:
    """Return the bytes behind the last record, the manifest: central directory and footer."""
    directory = b"".join(_central_entry(record, begin) for record, begin in _with_begin(records))
    last = records[-1]
    start = last.offset + last.nbytes
    count = len(records)
    end = b""
    if count >= _LIMIT_16 or start + len(directory) >= _LIMIT_32:
        end += _END_64.pack(b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, len(directory), start)
        end += _LOCATOR_64.pack(b"PK\x06\x07", 0, start + len(directory), 1)
    short_count = min(count, _LIMIT_16)
    end += _END.pack(
        b"PK\x05\x06", 0, 0, short_count, short_count,
        min(len(directory), _LIMIT_32), min(start, _LIMIT_32), FOOTER_BYTES,
    )  # fmt: skip
    total = start + len(directory) + len(end) + FOOTER_BYTES
    footer = _FOOTER.pack(_FOOTER_MAGIC, total, last.offset, last.nbytes, last.crc32)
    return directory + end + footer


def manifest_record(manifest: Manifest, encoded: bytes) -> Record:
    """Return the record of the manifest itself, which lies behind all others."""
    last = manifest.records[-1]
    begin = last.offset + last.nbytes
    bare = _LOCAL.size + len(_ROOT) + len(MANIFEST_NAME) + _extra_64_bytes(len(encoded))
    offset = -(-(begin + bare + 4) // _ALIGNMENT) * _ALIGNMENT
    return Record(MANIFEST_NAME, offset, len(encoded), zlib.crc32(encoded))


def _with_begin(records: tuple[Record, ...]) -> list[tuple[Record, int]]:
    begins = [0, *(record.offset + record.nbytes for record in records[:-1])]
    return list(zip(records, begins, strict=True))


def _central_entry(record: Record, begin: int) -> bytes:
    name = (_ROOT + record.name).encode()
    size, offset, extra = record.nbytes, begin, b""
    if size >= _LIMIT_32:
        extra += struct.pack("<QQ", size, size)
        size = _LIMIT_32
    if offset >= _LIMIT_32:
        extra += struct.pack("<Q", offset)
        offset = _LIMIT_32
    if extra:
        extra = struct.pack("<HH", 1, len(extra)) + extra
    return (
        _CENTRAL.pack(
            b"PK\x01\x02", 45, 45 if extra else 20, _UTF8_FLAG, 0, 0, _DOS_DATE,
            record.crc32, size, size, len(name), len(extra), 0, 0, 0, 0, offset,
        )
        + name
        + extra
    )  # fmt: skip


def _extra_64_bytes(nbytes: int) -> int:
    return 20 if nbytes >= _LIMIT_32 else 0
