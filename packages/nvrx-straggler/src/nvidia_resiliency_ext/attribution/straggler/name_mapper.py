# SPDX-License-Identifier: Apache-2.0
"""Numbers for names of kernels and sections, equal on all ranks; names travel once, as UTF-8.

Ranks first compare digests of their tables as they would be with their new names: where all
propose the same, no name travels. Otherwise each rank announces a digest of the names that it
cannot number yet; of every distinct digest only the lowest rank contributes its names.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from . import dist_utils
from ._errors import MalformedNamesError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["NameMapper"]

MAX_NAMES = 65_536
"""Numbers that are given out before the tables begin anew; bounds their memory."""
MAX_NAME_CHARACTERS = 4096
"""Length of the longest name that travels between ranks."""

_MAX_NAME_BYTES = 4 * MAX_NAME_CHARACTERS
_MAX_PAYLOAD_BYTES = 32 * 1024 * 1024
_MAX_EXCHANGE_BYTES = 256 * 1024 * 1024
_DIGEST_BYTES = 16
_COUNTS = struct.Struct("<II")
_LENGTH = struct.Struct("<I")


@dataclass(frozen=True)
class Proposal:
    """New names of a rank, in the order of the numbers that they would get.

    Attributes:
        kernels: New kernels.
        sections: New sections.
        digest: Digest of the tables with these names.
        begins_anew: The tables are full: these names would be all.
    """

    kernels: Sequence[str]
    sections: Sequence[str]
    digest: bytes
    begins_anew: bool = False


class NameMapper:
    """Two tables of names, one for kernels and one for sections.

    Numbers of each table are consecutive from 0, equal on all ranks, and do not change while the
    tables hold at most 65,536 names; beyond that, and when a rank has lost its tables, all ranks
    begin anew together. An object can be pickled; the copy has no process group.

    Example:
        >>> mapper = NameMapper()
        >>> mapper.gather_and_assign_ids(["gemm"], ["forward", "backward"])
        >>> mapper.get_section_id("backward"), mapper.get_kernel_name(0)
        (1, 'gemm')

    Args:
        pg: Ranks that share the tables; default: all ranks.

    Attributes:
        kernel_name_to_id: Number of each kernel.
        section_name_to_id: Number of each section.
        kernel_counter: How many kernels have a number.
        section_counter: How many sections have a number.
    """

    def __init__(self, pg: ProcessGroup | None = None) -> None:
        self.group = pg
        self.clear()

    def clear(self) -> None:
        """Forget all names on this rank."""
        self.kernel_name_to_id: dict[str, int] = {}
        self.id_to_kernel_name: dict[int, str] = {}
        self.section_name_to_id: dict[str, int] = {}
        self.id_to_section_name: dict[int, str] = {}
        self.kernel_counter = 0
        self.section_counter = 0
        self.digest = bytes(_DIGEST_BYTES)

    def propose(self, kernel_names: Sequence[str], section_names: Sequence[str]) -> Proposal:
        """Return the numbers that names without one would get if all ranks list the same names.

        Args:
            kernel_names: Distinct kernels, shortened.
            section_names: Distinct sections, shortened.
        """
        kernels = [name for name in kernel_names if name not in self.kernel_name_to_id]
        sections = [name for name in section_names if name not in self.section_name_to_id]
        if not kernels and not sections:
            return Proposal((), (), self.digest)
        begins_anew = self.kernel_counter + self.section_counter > MAX_NAMES
        if begins_anew:
            kernels, sections = list(kernel_names), list(section_names)
        if dist_utils.get_world_size(self.group) > 1:
            kernels.sort()
            sections.sort()
        base = bytes(_DIGEST_BYTES) if begins_anew else self.digest
        return Proposal(kernels, sections, _digest_of(base, kernels, sections), begins_anew)

    def accept(self, proposal: Proposal) -> None:
        """Assign the proposed numbers, once all ranks have proposed the same.

        Args:
            proposal: The names that get a number.
        """
        if proposal.begins_anew:
            self.clear()
        self._number(proposal.kernels, proposal.sections)
        self.digest = proposal.digest

    def gather_and_assign_ids(
        self, kernel_names: Sequence[str], section_names: Sequence[str]
    ) -> None:
        """Assign numbers to the names that any rank lists; a collective of all ranks of the group.

        Names of more than 4096 characters are shortened, see `shortened`.

        Args:
            kernel_names: Kernels that this rank has measured.
            section_names: Sections that this rank has measured.

        Raises:
            MalformedNamesError: A rank's message is broken, on all ranks alike.
        """
        kernels = dict.fromkeys(map(shortened, kernel_names))
        sections = dict.fromkeys(map(shortened, section_names))
        new_kernels = [n for n in kernels if n not in self.kernel_name_to_id]
        new_sections = [n for n in sections if n not in self.section_name_to_id]
        if dist_utils.get_world_size(self.group) == 1:
            self._assign(new_kernels, new_sections)
            return
        for part in _exchange(encode_names(new_kernels, new_sections), self.group):
            self._assign(*decode_names(part))

    def get_kernel_id(self, name: str) -> int:
        """Return the number of a kernel.

        Args:
            name: The kernel.

        Raises:
            KeyError: It has none.
        """
        return self.kernel_name_to_id[shortened(name)]

    def get_kernel_name(self, kernel_id: int) -> str:
        """Return the name of a kernel.

        Args:
            kernel_id: The number of the kernel.

        Raises:
            KeyError: The number was not given out.
        """
        return self.id_to_kernel_name[kernel_id]

    def get_section_id(self, name: str) -> int:
        """Return the number of a section.

        Args:
            name: The section.

        Raises:
            KeyError: It has none.
        """
        return self.section_name_to_id[shortened(name)]

    def get_section_name(self, section_id: int) -> str:
        """Return the name of a section.

        Args:
            section_id: The number of the section.

        Raises:
            KeyError: The number was not given out.
        """
        return self.id_to_section_name[section_id]

    def _assign(self, kernel_names: Iterable[str], section_names: Iterable[str]) -> None:
        kernels = [n for n in dict.fromkeys(kernel_names) if n not in self.kernel_name_to_id]
        sections = [n for n in dict.fromkeys(section_names) if n not in self.section_name_to_id]
        if kernels or sections:
            self._number(kernels, sections)
            self.digest = _digest_of(self.digest, kernels, sections)

    def _number(self, kernels: Sequence[str], sections: Sequence[str]) -> None:
        """Give the next numbers to names that have none."""
        for new, name_to_id, id_to_name in (
            (kernels, self.kernel_name_to_id, self.id_to_kernel_name),
            (sections, self.section_name_to_id, self.id_to_section_name),
        ):
            ids = range(len(name_to_id), len(name_to_id) + len(new))
            name_to_id.update(zip(new, ids, strict=True))
            id_to_name.update(zip(ids, new, strict=True))
        self.kernel_counter = len(self.kernel_name_to_id)
        self.section_counter = len(self.section_name_to_id)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "group": None}


def shortened(name: str) -> str:
    """Return the name under which a name is numbered: itself, up to 4096 characters.

    Of a longer name the beginning and a digest remain, 4096 characters in all.

    Example:
        >>> shortened("gemm"), len(shortened("k" * 20_000))
        ('gemm', 4096)
    """
    if len(name) <= MAX_NAME_CHARACTERS:
        return name
    mark = f"...{digest_of_message(name.encode('utf-8', 'surrogatepass')).hex()}"
    return name[: MAX_NAME_CHARACTERS - len(mark)] + mark


def encode_names(kernel_names: Sequence[str], section_names: Sequence[str]) -> bytes:
    """Return two lists of names as counts and length-prefixed UTF-8; nothing for two empty lists.

    Raises:
        ValueError: A name has more than 16,384 bytes.
    """
    if not kernel_names and not section_names:
        return b""
    parts = [_COUNTS.pack(len(kernel_names), len(section_names))]
    for name in (*kernel_names, *section_names):
        data = name.encode("utf-8", "surrogatepass")
        if len(data) > _MAX_NAME_BYTES:
            raise ValueError(f"a name of {len(data)} bytes is over {_MAX_NAME_BYTES}: {name[:80]}")
        parts += [_LENGTH.pack(len(data)), data]
    return b"".join(parts)


def decode_names(data: bytes) -> tuple[list[str], list[str]]:
    """Return the two lists of names that `encode_names` was given.

    Raises:
        MalformedNamesError: The bytes are no such message.
    """
    try:
        kernels, sections = _COUNTS.unpack_from(data)
        names = []
        position = _COUNTS.size
        for _ in range(kernels + sections):
            (size,) = _LENGTH.unpack_from(data, position)
            position += _LENGTH.size
            if size > min(_MAX_NAME_BYTES, len(data) - position):
                raise MalformedNamesError(f"a name of {size} bytes at byte {position} of a message")
            names.append(data[position : position + size].decode("utf-8", "surrogatepass"))
            position += size
    except (struct.error, UnicodeDecodeError) as error:
        raise MalformedNamesError(f"a message of {len(data)} bytes is cut: {error}") from error
    if position != len(data):
        raise MalformedNamesError(f"{len(data) - position} bytes follow the names of a message")
    return names[:kernels], names[kernels:]


def _exchange(payload: bytes, group: ProcessGroup | None) -> list[bytes]:
    """Return each distinct non-empty payload of all ranks once, ordered by its lowest rank."""
    device = dist_utils.get_device_for_backend(group)
    world_size, rank = dist_utils.get_world_size(group), dist_utils.get_rank(group)
    packed = zlib.compress(payload, 1) if payload else b""
    own = np.zeros(3, dtype=np.int64)
    own[:2] = np.frombuffer(digest_of_message(packed), dtype=np.int64)
    own[2] = len(packed)
    announced = dist_utils.all_gather_rows(torch.from_numpy(own).to(device), group)
    table = announced.cpu().numpy().reshape(world_size, 3)
    _, lowest = np.unique(table, axis=0, return_index=True)
    sources = [int(source) for source in sorted(lowest) if table[source, 2] != 0]
    sizes = [int(table[source, 2]) for source in sources]
    if any(size < 0 for size in sizes) or sum(sizes) > _MAX_EXCHANGE_BYTES:
        raise MalformedNamesError(f"ranks announce {sum(sizes)} bytes of names")
    if not sources:
        return []
    shared = np.zeros(sum(sizes), dtype=np.uint8)
    ends = np.cumsum(sizes)
    if rank in sources:
        end = int(ends[sources.index(rank)])
        shared[end - len(packed) : end] = np.frombuffer(packed, dtype=np.uint8)
    # One contributor per byte, so the sum over ranks is a concatenation.
    summed = torch.from_numpy(shared).to(device)
    dist_utils.all_reduce(summed, group=group)
    data = summed.cpu().numpy().tobytes()
    parts = []
    for source, size, end in zip(sources, sizes, ends.tolist(), strict=True):
        part = data[end - size : end]
        if digest_of_message(part) != table[source, :2].tobytes():
            raise MalformedNamesError(f"the names of rank {source} do not fit their digest")
        parts.append(_decompress(part, source))
    return parts


def _decompress(data: bytes, source: int) -> bytes:
    reader = zlib.decompressobj()
    try:
        plain = reader.decompress(data, _MAX_PAYLOAD_BYTES)
    except zlib.error as error:
        raise MalformedNamesError(f"the names of rank {source} are broken: {error}") from error
    if not reader.eof:
        raise MalformedNamesError(f"the names of rank {source} are over {_MAX_PAYLOAD_BYTES} bytes")
    return plain


def _digest_of(base: bytes, kernels: Sequence[str], sections: Sequence[str]) -> bytes:
    """Return the digest of tables with digest `base` after these names were added."""
    counts = _COUNTS.pack(len(kernels), len(sections))
    names = "\0".join((*kernels, *sections)).encode("utf-8", "surrogatepass")
    return digest_of_message(base + counts + names)


def digest_of_message(data: bytes) -> bytes:
    """Return 16 bytes that tell messages apart."""
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()
