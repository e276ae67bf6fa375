# SPDX-License-Identifier: Apache-2.0
"""Owns the reading of /proc/self/mountinfo; pure but for `read_mounts`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

__all__ = ["MOUNTINFO", "Mount", "parse_mounts", "read_mounts"]

MOUNTINFO = "/proc/self/mountinfo"

_OCTAL = re.compile(r"\\([0-7]{3})")
_FIELDS_BEFORE = 6
_FIELDS_BEHIND = 3


@dataclass(frozen=True, slots=True)
class Mount:
    """One mounted file system.

    Attributes:
        path: Where it is mounted.
        kind: Its type, such as `nfs4`.
        source: What is mounted.
        is_read_only: Whether writing is impossible, by the mount or the file system itself.
    """

    path: str
    kind: str
    source: str
    is_read_only: bool


def parse_mounts(text: str, kinds: Collection[str]) -> list[Mount]:
    """Return the mounts of these types; of several at one place the last, which hides the others.

    Lines that make no sense are passed over.
    """
    found: dict[str, Mount] = {}
    # Not `splitlines`: a path may hold the other characters that end lines of a text.
    for line in text.split("\n"):
        head, separator, tail = line.partition(" - ")
        before, behind = head.split(" "), tail.split(" ")
        if not separator or len(before) < _FIELDS_BEFORE or len(behind) < _FIELDS_BEHIND:
            continue
        path = _unescape(before[4])
        found.pop(path, None)
        if behind[0] in kinds:
            options = {*before[5].split(","), *behind[2].split(",")}
            found[path] = Mount(path, behind[0], _unescape(behind[1]), "ro" in options)
    return list(found.values())


def read_mounts(kinds: Collection[str], path: str = MOUNTINFO) -> list[Mount]:
    """Return the mounts of these types in our namespace; it touches none of them.

    Raises:
        OSError: The list cannot be read.
    """
    with open(path, encoding="utf-8", errors="surrogateescape", newline="\n") as file:
        return parse_mounts(file.read(), kinds)


def _unescape(text: str) -> str:
    return _OCTAL.sub(lambda match: chr(int(match[1], 8)), text)
