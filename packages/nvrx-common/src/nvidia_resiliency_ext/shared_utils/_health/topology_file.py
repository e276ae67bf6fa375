# SPDX-License-Identifier: Apache-2.0
"""Reads which PCI devices sit below which from a topology file (`<pci busid=...>`, nested).

The file is foreign: size and nesting are limited, and a document type, with which an XML file can
name entities that expand without end or read other files, is refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nvidia_resiliency_ext.shared_utils.errors import NvrxError
from nvidia_resiliency_ext.shared_utils.os_utils import read_regular_file

from .pci_address import normal_bus_id

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["TopologyError", "parse_topology", "read_topology"]

_LIMIT_BYTES = 8 << 20
_LIMIT_DEPTH = 100
_LIMIT_DEVICES = 10000


class TopologyError(NvrxError):
    """The topology file cannot be used; the message says why."""


def read_topology(path: str) -> dict[str, list[str]]:
    """Return what `parse_topology` makes of a file.

    Raises:
        TopologyError: It cannot be read or used.
    """
    try:
        data = read_regular_file(path, _LIMIT_BYTES + 1, follows_symlink=True)
    except (OSError, ValueError) as error:
        raise TopologyError(f"{path} cannot be read: {error}") from error
    try:
        return parse_topology(data)
    except TopologyError as error:
        raise TopologyError(f"{path}: {error}") from error


def parse_topology(data: bytes) -> dict[str, list[str]]:
    """Return, of each PCI address, the addresses above it, nearest first.

    Raises:
        TopologyError: It is too large, no XML, or declares a document type.
    """
    if len(data) > _LIMIT_BYTES:
        raise TopologyError(f"larger than {_LIMIT_BYTES} bytes")
    from xml.parsers import expat

    reader = _Reader()
    parser = expat.ParserCreate()
    parser.StartElementHandler = reader.start
    parser.EndElementHandler = reader.end
    parser.StartDoctypeDeclHandler = _refuse
    parser.EntityDeclHandler = _refuse
    try:
        parser.Parse(data, True)
    except expat.ExpatError as error:
        raise TopologyError(f"no XML: {error}") from error
    return reader.above


def _refuse(*_: Any) -> None:
    raise TopologyError("it declares a document type or entities")


class _Reader:
    """Follows the nesting of elements."""

    def __init__(self) -> None:
        self.above: dict[str, list[str]] = {}
        self._open: list[str | None] = []

    def start(self, name: str, attributes: Mapping[str, str]) -> None:
        if len(self._open) >= _LIMIT_DEPTH:
            raise TopologyError(f"nested deeper than {_LIMIT_DEPTH}")
        bus_id = normal_bus_id(attributes.get("busid", "")) if name == "pci" else None
        if bus_id is not None:
            if len(self.above) >= _LIMIT_DEVICES:
                raise TopologyError(f"more than {_LIMIT_DEVICES} devices")
            self.above[bus_id] = [each for each in reversed(self._open) if each is not None]
        self._open.append(bus_id)

    def end(self, _name: str) -> None:
        self._open.pop()
