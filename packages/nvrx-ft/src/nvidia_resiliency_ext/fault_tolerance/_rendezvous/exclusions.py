# SPDX-License-Identifier: Apache-2.0
"""Hosts that somebody outside the job named as bad: they get no place while others are enough.

Names come from logs, so they may be short or whole; they are compared by their first part.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Mapping

__all__ = ["Exclusions", "is_named"]

logger = logging.getLogger("nvrx")


class Exclusions:
    """The named hosts of one job; any thread. They stay named until the job ends."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._why: Mapping[str, str] = {}

    @property
    def why(self) -> Mapping[str, str]:
        """Why each host is named."""
        return self._why

    def add(self, hosts: Iterable[str], why: str) -> None:
        """Name hosts; what is known already stays as it is."""
        with self._lock:
            new = [host for host in hosts if host not in self._why]
            # Replaced as a whole: who reads it holds one state.
            self._why = {**dict.fromkeys(new, why), **self._why}
        if new:
            text = "attribution names bad nodes, which get no place in the next round: %s: %s"
            logger.warning(text, ", ".join(new), why)


def is_named(host: str, addr: str, named: Iterable[str]) -> bool:
    """Return whether a node is one of those that are named."""
    own = {_key(host), _key(addr)}
    return any(_key(name) in own for name in named)


def _key(name: str) -> str:
    lowered = name.lower()
    is_address = ":" in lowered or lowered.replace(".", "").isdecimal()
    return lowered if is_address else lowered.partition(".")[0]
