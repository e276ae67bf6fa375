# SPDX-License-Identifier: Apache-2.0
"""Describe which bytes of a staging buffer become which files; plain data that fits into JSON.

A plan says which ranges of a staging buffer become which files. The buffer holds the files as they
will be, byte for byte, except for checksums inside them, which the writer fills in: a `ZipShape`
says where.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field

PLAIN_BYTES = -1
"""Value of `ItemPlan.shape` for bytes without checksums to fill in."""


@dataclass(frozen=True, slots=True)
class ZipShape:
    """Where the checksums of a file made by `torch.save` stand; positions count from its start.

    Attributes:
        records: For each large record its start, its length, and where its CRC-32 goes.
        identity: Where the 20 digits go that torch derives from all checksums, where the record
            that holds them starts and ends, and where its CRC-32 goes; None for none.
        terms: What the digits are derived from, in order: a checksum, or `-1 - k` for record k.
    """

    records: list[tuple[int, int, list[int]]]
    identity: tuple[int, int, int, list[int]] | None = None
    terms: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ItemPlan:
    """A tensor or object in a file.

    Attributes:
        name: Its name in messages and in the manifest.
        start: Offset in the file, in bytes.
        length: Its length in bytes.
        shape: Index of its `ZipShape`, or `PLAIN_BYTES`.
    """

    name: str
    start: int
    length: int
    shape: int = PLAIN_BYTES


@dataclass(frozen=True, slots=True)
class FilePlan:
    """A file to be written; its items cover it without gaps, in order.

    Attributes:
        path: Final path.
        start: Offset of its first byte in the staging buffer, a multiple of the page size.
        length: Its length in bytes. The buffer must have room up to the next page.
        items: What is in it.
    """

    path: str
    start: int
    length: int
    items: list[ItemPlan]


@dataclass(frozen=True, slots=True)
class WritePlan:
    """All files of one save on one rank.

    Attributes:
        files: The files.
        shapes: The shapes that their items refer to.
        remove_first: Files that must be gone before the first new one gets its name.
        manifest: Path of the manifest that the rank writes beside its files; None for none.
        threads: How many files are written at a time.
        io_mode: "auto", "buffered" or "direct".
        sync: Whether files and directories are synced to the device.
        staging_dir: A node-local directory that the files are written to first; None for none.
    """

    files: list[FilePlan]
    shapes: list[ZipShape] = field(default_factory=list)
    remove_first: list[str] = field(default_factory=list)
    manifest: str | None = None
    threads: int = 1
    io_mode: str = "auto"
    sync: bool = True
    staging_dir: str | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(file.length for file in self.files)

    def to_json(self) -> bytes:
        """Return the plan as JSON."""
        return json.dumps(asdict(self), separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, data: bytes) -> WritePlan:
        """Return the plan that `to_json` wrote, for a process that trusts the writer."""
        values = json.loads(data)
        values["files"] = [
            FilePlan(**{**file, "items": [ItemPlan(**item) for item in file["items"]]})
            for file in values["files"]
        ]
        values["shapes"] = [ZipShape(**shape) for shape in values["shapes"]]
        return cls(**values)


@dataclass(frozen=True, slots=True)
class FileResult:
    """A file that was written.

    Attributes:
        path: Its path.
        nbytes: Its length in bytes.
        crc: CRC-32 of all of it.
        item_crcs: CRC-32 of each item.
    """

    path: str
    nbytes: int
    crc: int
    item_crcs: list[int]
