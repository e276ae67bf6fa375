# SPDX-License-Identifier: Apache-2.0
"""Owns the kernel's messages about GPU errors (XIDs): finding and reading them.

They are evidence and never a verdict: many XIDs are faults of a program.
"""

from __future__ import annotations

import os
import re
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from .pci_address import normal_bus_id

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["KMSG", "Xid", "parse_kmsg", "recent_xids", "seconds_since_boot"]

KMSG = "/dev/kmsg"

_XID = re.compile(r"NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): (\d{1,5}),? ?(.*)")
_READ_BYTES = 8192
_LIMIT_BYTES = 16 << 20
_LIMIT_XIDS = 50
_TEXT_LENGTH = 200


@dataclass(frozen=True, slots=True)
class Xid:
    """One message: when (seconds since boot), which GPU, which number, the rest of the text."""

    at_s: float
    bus_id: str
    number: int
    text: str


def seconds_since_boot(wall_s: float | None) -> float:
    """Return a moment of the wall clock as the kernel's log counts; never below zero."""
    if wall_s is None:
        return 0.0
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - (time.time() - wall_s))


def parse_kmsg(lines: Iterable[str], since_s: float) -> Iterator[Xid]:
    """Yield the XIDs in records of the kernel's log, from a moment on."""
    for line in lines:
        head, separator, text = line.partition(";")
        fields = head.split(",")
        if not separator or len(fields) < 3 or not fields[2].isdigit():  # noqa: PLR2004
            continue
        match = _XID.search(text)
        at_s = int(fields[2][:18]) / 1e6
        if match is None or at_s < since_s:
            continue
        # The kernel's message leaves the function out.
        address = match[1] if "." in match[1] else f"{match[1]}.0"
        bus_id = normal_bus_id(address) or match[1]
        yield Xid(at_s, bus_id, int(match[2]), match[3][:_TEXT_LENGTH])


def recent_xids(since_s: float, path: str = KMSG) -> list[dict[str, Any]] | None:
    """Return the newest XIDs since a moment; `None` when the log may not be read."""
    try:
        lines = list(_lines(path))
    except OSError:
        return None
    return [asdict(xid) for xid in list(parse_kmsg(lines, since_s))[-_LIMIT_XIDS:]]


def _lines(path: str) -> Iterator[str]:
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    rest = b""
    read_bytes = 0
    try:
        while read_bytes < _LIMIT_BYTES:
            try:
                data = os.read(descriptor, _READ_BYTES)
            except BlockingIOError:
                break
            except BrokenPipeError:
                # The ring overwrote what came next; the following read goes on behind it.
                continue
            if not data:
                break
            read_bytes += len(data)
            *whole, rest = (rest + data).split(b"\n")
            yield from (line.decode("utf-8", "replace") for line in whole)
    finally:
        os.close(descriptor)
    if rest:
        yield rest.decode("utf-8", "replace")
