# SPDX-License-Identifier: Apache-2.0
"""Owns how a PCI address is written; reads nothing."""

from __future__ import annotations

import re

__all__ = ["natural_key", "normal_bus_id"]

_BUS_ID = re.compile(r"(?:([0-9a-f]{1,8}):)?([0-9a-f]{2}):([0-9a-f]{2})\.([0-7])")


def normal_bus_id(text: str) -> str | None:
    """Return an address as /sys names it, such as `0000:3b:00.0`; `None` if it is none.

    The driver writes the domain with eight digits, topology files may leave it out.
    """
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
