# SPDX-License-Identifier: Apache-2.0
"""Find the checksums in a zip file that `torch.save` has written."""

from __future__ import annotations

import struct
import zlib
from typing import TYPE_CHECKING

from ._write_plan import ZipShape

if TYPE_CHECKING:
    from collections.abc import Iterator

_LARGE = 4096  # the writer sums up records from this size on; smaller ones are summed up here
_ENTRY = struct.Struct("<4s6H3L5H2L")
_ENTRY_CRC_AT = 16
_LOCAL_BYTES = 30
_LOCAL_CRC_AT = 14
_LOCAL_NAME_AT = 26
_DESCRIPTOR = b"PK\x07\x08"
_DESCRIPTOR_CRC_AT = 4
_END_BYTES = 22
_LOCATOR_BYTES = 20
_END64 = struct.Struct("<4sQ2H2L4Q")
_UNKNOWN = 0xFFFFFFFF
_HAS_DESCRIPTOR = 8
_IDENTITY = b".data/serialization_id"
_DIGITS = 20


class ZipImage:
    """A zip file in memory, perhaps without the data of one record.

    Args:
        head: Its bytes up to the data that is left out; all of them if none is.
        nbytes: Length of that data.
        tail: The bytes behind it.
    """

    def __init__(
        self, head: bytearray | memoryview, nbytes: int = 0, tail: bytearray | None = None
    ) -> None:
        self.head = head
        self.tail = bytearray() if tail is None else tail
        self._tail_at = len(head) + nbytes
        self.length = self._tail_at + len(self.tail)

    def get(self, start: int, count: int) -> bytes:
        """Return bytes of it."""
        part, start = self._part(start)
        return bytes(part[start : start + count])

    def put(self, start: int, data: bytes) -> None:
        """Change bytes of it."""
        part, start = self._part(start)
        part[start : start + len(data)] = data

    def is_absent(self, start: int) -> bool:
        """Return whether the data that begins there is left out."""
        return len(self.head) <= start < self._tail_at

    def _part(self, start: int) -> tuple[bytearray | memoryview, int]:
        if start < self._tail_at:
            return self.head, start
        return self.tail, start - self._tail_at


class _Record:
    """One record of the file: its name, where its data is, and where its checksum stands."""

    def __init__(self, image: ZipImage, entry_at: int) -> None:
        fields = _ENTRY.unpack(image.get(entry_at, _ENTRY.size))
        flags = fields[3]
        compressed, plain, name_bytes, extra_bytes, comment_bytes = fields[8:13]
        local_at = fields[16]
        name_at = entry_at + _ENTRY.size
        self.name = image.get(name_at, name_bytes)
        self.next_at = name_at + name_bytes + extra_bytes + comment_bytes
        extra = image.get(name_at + name_bytes, extra_bytes)
        sizes = iter(_sizes64(extra))
        if plain == _UNKNOWN:
            next(sizes)
        self.nbytes = next(sizes) if compressed == _UNKNOWN else compressed
        local_at = next(sizes) if local_at == _UNKNOWN else local_at
        name, more = struct.unpack("<2H", image.get(local_at + _LOCAL_NAME_AT, 4))
        self.start = local_at + _LOCAL_BYTES + name + more
        self.places = [entry_at + _ENTRY_CRC_AT]
        end = self.start + self.nbytes
        if flags & _HAS_DESCRIPTOR:
            signed = image.get(end, len(_DESCRIPTOR)) == _DESCRIPTOR
            self.places.append(end + (_DESCRIPTOR_CRC_AT if signed else 0))
        else:
            self.places.append(local_at + _LOCAL_CRC_AT)
        self.end = end


def shape_of(image: ZipImage) -> ZipShape | None:
    """Return where the checksums go; those of small records are put in at once.

    Returns:
        None when it is no zip file of the kind that torch writes.
    """
    records: list[tuple[int, int, list[int]]] = []
    terms: list[int] = []
    identity = None
    for record in _records(image):
        if record.name.endswith(_IDENTITY):
            digits_at = record.end - _DIGITS
            identity = (digits_at, record.start, record.end, record.places)
        elif record.nbytes == 0:
            continue  # its checksum is 0, and torch leaves it out of the digits
        elif image.is_absent(record.start) or record.nbytes >= _LARGE:
            terms.append(-1 - len(records))
            records.append((record.start, record.nbytes, record.places))
        else:
            crc = zlib.crc32(image.get(record.start, record.nbytes))
            for place in record.places:
                image.put(place, crc.to_bytes(4, "little"))
            terms.append(crc)
    if not terms:
        return None
    if any(place < start for start, _, places in records for place in places):
        return None  # a checksum in front of its data cannot be filled in on the way
    return ZipShape(records, identity, terms)


def _records(image: ZipImage) -> Iterator[_Record]:
    end_at = image.length - _END_BYTES
    end64_at = end_at - _LOCATOR_BYTES - _END64.size
    if end64_at < 0:
        return
    signature, *_, count, _, position = _END64.unpack(image.get(end64_at, _END64.size))
    if signature != b"PK\x06\x06" or image.get(end_at, 4) != b"PK\x05\x06":
        return
    for _ in range(count):
        record = _Record(image, position)
        yield record
        position = record.next_at


def _sizes64(extra: bytes) -> tuple[int, ...]:
    """Return the 64-bit numbers of the extra field that has them."""
    position = 0
    while position + 4 <= len(extra):
        kind, size = struct.unpack_from("<2H", extra, position)
        if kind == 1:
            return struct.unpack_from(f"<{size // 8}Q", extra, position + 4)
        position += 4 + size
    return ()
