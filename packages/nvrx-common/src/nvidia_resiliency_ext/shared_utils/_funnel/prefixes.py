# SPDX-License-Identifier: Apache-2.0
"""Owns whose lines a chunk may hold: in a file, a rank's prefix is of the node that used it first.

Pure; the prefix is what the launcher puts before each line: the global rank, right-aligned, and a
colon.
"""

from __future__ import annotations

import re

__all__ = ["claim"]

_PREFIX = re.compile(rb"^ *(\d{1,9}): ", re.MULTILINE)


def claim(data: memoryview, node_id: str, owners: dict[bytes, str]) -> tuple[str, str] | None:
    """Note a node's prefixes, unless one is another node's.

    Args:
        data: Whole lines.
        node_id: Who sends them.
        owners: Whose each prefix of this file is; changed only when all are the node's own.

    Returns:
        The prefix of another node and that node, or `None`.
    """
    found = set(_PREFIX.findall(data))
    for prefix in found:
        owner = owners.get(prefix, node_id)
        if owner != node_id:
            return prefix.decode(), owner
    owners.update(dict.fromkeys(found, node_id))
    return None
