# SPDX-License-Identifier: Apache-2.0
"""The identity of one launcher in the job, as values and as text."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

__all__ = ["NodeIdentity"]

_TEXT: Final = re.compile(r"(.{1,255})_([0-9]{1,10})_([0-9]{1,10})")


class NodeIdentity(NamedTuple):
    """Which launcher, ordered by address, then process, then number.

    Attributes:
        addr: Name or address of its node.
        pid: Number of the launcher's process.
        number: Counts the identities that this process has had.
    """

    addr: str
    pid: int
    number: int

    def __str__(self) -> str:
        """Return the text form, such as `node001_4242_0`."""
        return f"{self.addr}_{self.pid}_{self.number}"

    @classmethod
    def parse(cls, text: str) -> NodeIdentity:
        """Return the identity that a text names; the address may itself contain underscores.

        Raises:
            ValueError: It is no identity.
        """
        match = _TEXT.fullmatch(text)
        if match is None or not text.isprintable():
            raise ValueError(f"{text[:300]!r} is no identity such as 'node001_4242_0'")
        addr, pid, number = match.groups()
        return cls(addr, int(pid), int(number))
