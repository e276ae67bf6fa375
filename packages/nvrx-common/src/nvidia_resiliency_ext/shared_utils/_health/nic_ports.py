# SPDX-License-Identifier: Apache-2.0
"""Reads state and counters of network adapters' ports from files; the root may be another folder.

Templates of paths name the adapter with ``{nic}`` (or ``{dev_name}``) and may name ``{port}``.
"""

from __future__ import annotations

import os
import re

from .pci import adapters
from .pci_address import natural_key

__all__ = [
    "carriers",
    "expand",
    "link_downed_template",
    "names",
    "read_count",
    "read_counters",
    "read_first",
]

_LIMIT_BYTES = 4096
_LONGEST_COUNT = 20  # digits of 64 bits
_ADAPTER = re.compile(r"\{nic\}|\{dev_name\}")
_PORT = re.escape("{port}")
_COUNTER_FOLDERS = ("counters", "hw_counters")


def link_downed_template(sysfs_root: str) -> str:
    """Return where the kernel counts how often a link went down."""
    return f"{sysfs_root}/class/infiniband/{{nic}}/ports/{{port}}/counters/link_downed"


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
    """Return what is there between `head` and the next part of a path, by a pattern."""
    before, after = re.escape(os.path.basename(head)), re.escape(tail.partition("/")[0])
    name = re.compile(f"{before}({wanted}){after.replace(_PORT, '[0-9]+')}")
    try:
        matches = map(name.fullmatch, os.listdir(os.path.dirname(head) or "."))
    except OSError:
        return []
    return sorted((match[1] for match in matches if match), key=natural_key)


def read_first(path: str) -> str:
    """Return the content of a small file without the blanks around it.

    Raises:
        OSError: It cannot be read.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        return os.read(descriptor, _LIMIT_BYTES).decode("utf-8", "replace").strip()
    finally:
        os.close(descriptor)


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
    try:
        devices = os.listdir(folder)
    except OSError:
        return {}
    for device in sorted(devices, key=natural_key):
        try:
            found[device] = read_first(f"{folder}/{device}/carrier") == "1"
        except OSError:
            # The kernel refuses to tell for a device that is switched off.
            found[device] = False
    return found
