# SPDX-License-Identifier: Apache-2.0
"""Fill in the checksums of a staged file while it is walked from start to end, once."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

from ._checksum import combine, crc32
from ._write_plan import PLAIN_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ._write_plan import FilePlan, ItemPlan, ZipShape

_MASK64 = (1 << 64) - 1
_DIGITS = 20


class FileChecksums:
    """The checksums of one staged file.

    Args:
        plan: The file.
        shapes: The shapes that its items refer to.
        image: Its bytes in the staging buffer, writable.

    Attributes:
        crc: CRC-32 of what was walked so far: of the file, in the end.
        item_crcs: Those of the items that are complete.
    """

    def __init__(self, plan: FilePlan, shapes: Sequence[ZipShape], image: memoryview) -> None:
        self._plan = plan
        self._shapes = shapes
        self._image = image
        self.crc = 0
        self.item_crcs: list[int] = []

    def walk(self, chunk_bytes: int) -> Iterator[int]:
        """Yield the position up to which the bytes are final, at most every `chunk_bytes`."""
        reported = 0
        for item in self._plan.items:
            for position in self._walk_item(item, chunk_bytes):
                while position - reported >= chunk_bytes:
                    reported += chunk_bytes
                    yield reported
            self.crc = combine(self.crc, self.item_crcs[-1], item.length)
        yield self._plan.length

    def _walk_item(self, item: ItemPlan, chunk_bytes: int) -> Iterator[int]:
        end = item.start + item.length
        shape = None if item.shape == PLAIN_BYTES else self._shapes[item.shape]
        records = [] if shape is None else shape.records
        total, position, found = 0, item.start, list[int]()
        for start, length, places in records:
            total = crc32(self._image[position : item.start + start], total)
            position = item.start + start
            crc = 0
            for piece in range(position, position + length, chunk_bytes):
                stop = min(piece + chunk_bytes, position + length)
                crc = crc32(self._image[piece:stop], crc)
                yield stop if stop < position + length else piece
            self._patch(item.start, places, crc)
            found.append(crc)
            total = combine(total, crc, length)
            position += length
        if shape is not None:
            self._write_identity(item.start, shape, found)
        for piece in range(position, end, chunk_bytes):
            stop = min(piece + chunk_bytes, end)
            total = crc32(self._image[piece:stop], total)
            yield stop
        self.item_crcs.append(total)

    def _write_identity(self, base: int, shape: ZipShape, found: Sequence[int]) -> None:
        if shape.identity is None:
            return
        digits_at, start, end, places = shape.identity
        # What torch calls a serialization id ends with a hash over the checksums of all records.
        combined = 0
        for term in shape.terms:
            value = term if term >= 0 else found[-1 - term]
            mixed = value + 0x9E3779B9 + ((combined << 6) & _MASK64) + (combined >> 2)
            combined ^= mixed & _MASK64
        digits = f"{combined:0{_DIGITS}d}".encode()
        self._image[base + digits_at : base + digits_at + _DIGITS] = digits
        self._patch(base, places, zlib.crc32(self._image[base + start : base + end]))

    def _patch(self, base: int, places: Sequence[int], crc: int) -> None:
        for place in places:
            self._image[base + place : base + place + 4] = crc.to_bytes(4, "little")
