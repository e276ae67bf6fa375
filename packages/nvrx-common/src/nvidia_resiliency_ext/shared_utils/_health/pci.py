# SPDX-License-Identifier: Apache-2.0
"""Devices on the PCI bus and the network adapters, as /sys and topology files show them."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from nvidia_resiliency_ext.shared_utils.errors import NvrxError
from nvidia_resiliency_ext.shared_utils.os_utils import read_regular_file

_BUS_ID = re.compile(r"(?:([0-9a-f]{1,8}):)?([0-9a-f]{2}):([0-9a-f]{2})\.([0-7])")
_LIMIT_BYTES = 8 << 20
_LIMIT_DEPTH = 100
_LIMIT_DEVICES = 10000
_NIC_PORTS_LIMIT_BYTES = 4096
_LONGEST_COUNT = 20  # digits of 64 bits
_ADAPTER = re.compile(r"\{nic\}|\{dev_name\}")
_PORT = re.escape("{port}")
_COUNTER_FOLDERS = ("counters", "hw_counters")


def normal_bus_id(text: str) -> str | None:
    """Return an address, however long its domain, as `0000:3b:00.0`; `None` if it is none."""
    match = _BUS_ID.fullmatch(text.strip().lower())
    if match is None:
        return None
    domain, bus, device, function = match.groups()
    return f"{int(domain or '0', 16):04x}:{bus}:{device}.{function}"


def natural_key(name: str) -> list[tuple[int, int, str]]:
    """Return a key that sorts `mlx5_2` before `mlx5_10`."""
    return [
        (0, int(part), "") if part.isascii() and part.isdigit() else (1, 0, part)
        for part in re.split(r"([0-9]+)", name)
        if part
    ]


def adapters(sysfs_root: str) -> list[str]:
    """Return the names of the InfiniBand, RoCE and EFA adapters."""
    return _listed(f"{sysfs_root}/class/infiniband")


def _listed(folder: str) -> list[str]:
    """Return the sorted names in a folder; none where it cannot be read."""
    try:
        return sorted(os.listdir(folder), key=natural_key)
    except OSError:
        return []


class PciMixin:
    """Look up the node's PCI devices, for health checks."""

    _sysfs_root = "/sys"

    def get_pci_ancestor(self, bus_id: str) -> list[str]:
        """Return the PCI devices above `bus_id` (such as `0000:3b:00.0`), nearest first."""
        device = f"{self._sysfs_root}/bus/pci/devices/{normal_bus_id(bus_id)}"
        if not os.path.islink(device):
            return []
        above = [normal_bus_id(part) for part in os.path.realpath(device).split("/")[:-1]]
        return [part for part in reversed(above) if part is not None]

    def get_ib_pci_mapping(self) -> dict[str, str]:
        """Return the PCI address of each InfiniBand, RoCE and EFA adapter."""
        mapping = {}
        for name in adapters(self._sysfs_root):
            device = os.path.realpath(f"{self._sysfs_root}/class/infiniband/{name}/device")
            bus_id = normal_bus_id(os.path.basename(device))
            if bus_id is not None:
                mapping[name] = bus_id
        return mapping


class TopologyError(NvrxError):
    """The topology file cannot be used; the message says why."""


def read_topology(path: str) -> dict[str, list[str]]:
    try:
        data = read_regular_file(path, _LIMIT_BYTES + 1, follows_symlink=True)
    except (OSError, ValueError) as error:
        raise TopologyError(f"{path} cannot be read: {error}") from error
    try:
        return parse_topology(data)
    except TopologyError as error:
        raise TopologyError(f"{path}: {error}") from error


def parse_topology(data: bytes) -> dict[str, list[str]]:
    """Return, of each PCI address, the addresses above it, nearest first."""
    if len(data) > _LIMIT_BYTES:
        raise TopologyError(f"larger than {_LIMIT_BYTES} bytes")
    from xml.parsers import expat

    above: dict[str, list[str]] = {}
    elements: list[str | None] = []  # the open ones; of devices the address

    def start(name: str, attributes: Mapping[str, str]) -> None:
        if len(elements) >= _LIMIT_DEPTH:
            raise TopologyError(f"nested deeper than {_LIMIT_DEPTH}")
        bus_id = normal_bus_id(attributes.get("busid", "")) if name == "pci" else None
        if bus_id is not None:
            if len(above) >= _LIMIT_DEVICES:
                raise TopologyError(f"more than {_LIMIT_DEVICES} devices")
            above[bus_id] = [each for each in reversed(elements) if each is not None]
        elements.append(bus_id)

    def refuse(*_: Any) -> None:
        raise TopologyError("it declares a document type or entities")

    parser = expat.ParserCreate()
    parser.StartElementHandler = start
    parser.EndElementHandler = lambda _: elements.pop()
    parser.StartDoctypeDeclHandler = refuse
    parser.EntityDeclHandler = refuse
    try:
        parser.Parse(data, True)
    except expat.ExpatError as error:
        raise TopologyError(f"no XML: {error}") from error
    return above


def names(template: str, sysfs_root: str) -> list[str]:
    """Return the adapters that a template means: those that lie where it names them."""
    head, *tail = _ADAPTER.split(template, maxsplit=1)
    found = _found(head, ".+", tail[0]) if tail and os.path.dirname(head) else []
    return list(dict.fromkeys(found)) or adapters(sysfs_root)


def expand(template: str, nic: str) -> dict[str, str]:
    """Return the path of each port of an adapter; one without number where none is asked for."""
    path = _ADAPTER.sub(lambda _: nic, template)
    head, separator, tail = path.partition("{port}")
    if not separator:
        return {"": path}
    return {port: f"{head}{port}{tail}" for port in _found(head, "[0-9]+", tail)}


def _found(head: str, wanted: str, tail: str) -> list[str]:
    """Return the texts between `head` and `tail` that match `wanted`, in a folder's names."""
    before, after = re.escape(os.path.basename(head)), re.escape(tail.partition("/")[0])
    name = re.compile(f"{before}({wanted}){after.replace(_PORT, '[0-9]+')}")
    matches = map(name.fullmatch, _listed(os.path.dirname(head) or "."))
    return sorted((match[1] for match in matches if match), key=natural_key)


def read_first(path: str) -> str:
    """Return the content of a small file without the blanks around it."""
    data = read_regular_file(path, _NIC_PORTS_LIMIT_BYTES, follows_symlink=True)
    return data.decode("utf-8", "replace").strip()


def read_count(path: str) -> int | None:
    """Return the number in a counter's file; `None` when there is none."""
    try:
        text = read_first(path)
    except OSError:
        return None
    is_count = text.isascii() and text.isdigit() and len(text) <= _LONGEST_COUNT
    return int(text) if is_count else None


def read_counters(sysfs_root: str, nic: str, wanted: list[str]) -> dict[str, int]:
    """Return the counters of these names of all ports that have them, as `port/name`."""
    found = {}
    for folder in _COUNTER_FOLDERS:
        template = f"{sysfs_root}/class/infiniband/{{nic}}/ports/{{port}}/{folder}"
        for port, path in expand(template, nic).items():
            for name in wanted:
                count = read_count(f"{path}/{name}")
                if count is not None:
                    found[f"{port}/{name}"] = count
    return found


def carriers(sysfs_root: str, nic: str) -> dict[str, bool]:
    """Return whether the network devices of an adapter have a carrier."""
    folder = f"{sysfs_root}/class/infiniband/{nic}/device/net"
    found = {}
    for device in _listed(folder):
        try:
            found[device] = read_first(f"{folder}/{device}/carrier") == "1"
        except OSError:
            # The kernel refuses to tell for a device that is switched off.
            found[device] = False
    return found
