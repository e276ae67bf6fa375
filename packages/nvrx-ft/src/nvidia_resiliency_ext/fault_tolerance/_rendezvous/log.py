# SPDX-License-Identifier: Apache-2.0
"""The log of decisions: each is written once, everybody reads them in order.

A decision is never taken back. A foreign value at its place is replaced by compare-and-set against
exactly that value: to delete it could delete the decision that another node has just put there.
"""

from __future__ import annotations

from . import keys
from .records import Entry, ForeignValueError, decode, encode
from .store import JobStore

MAX_DIGITS = 18


class DecisionLog:
    """The decisions of one job, over a connection of the calling thread."""

    def __init__(self, store: JobStore) -> None:
        self._store = store
        self._was_vain = False

    def add(self, entry: Entry) -> Entry:
        """Write a decision, and return the one that stands at its place then.

        Raises:
            StoreLostError: somebody else writes there all the time.
        """
        return self._store.settle(
            keys.log(entry.seq), encode(entry), lambda text: self._decoded(entry.seq, text)
        )

    def wait_for(self, seq: int, timeout_s: float) -> Entry | None:
        """Wait for a decision; None after `timeout_s`, or earlier when something else woke this.

        Raises:
            ForeignValueError: something else stands there.
        """
        key = keys.log(seq)
        if not self._store.wait_until_set(key, timeout_s):
            return None
        # Whoever reads a missing key wakes all who wait for it, and if each of them read it again
        # that would never end.
        if self._was_vain and not self._store.has(key):
            return None
        text = self._store.peek(key)
        self._was_vain = text is None
        return None if text is None else self._decoded(seq, text)

    def next_after(self, seq: int) -> Entry | None:
        """Return the decision after `seq`, if there is one; it never waits.

        Raises:
            ForeignValueError: something else stands there.
        """
        # Asked first: to read a missing key would wake in vain all who wait for it.
        text = self._store.peek(keys.log(seq + 1)) if self._store.has(keys.log(seq + 1)) else None
        return None if text is None else self._decoded(seq + 1, text)

    def last_known(self) -> Entry | None:
        """Return the decision that was last announced; the others follow from it.

        Raises:
            ForeignValueError: somebody else has written over the announcement.
        """
        head = self._store.peek(keys.HEAD)
        if head is None:
            return None
        if not head.isdecimal() or len(head) > MAX_DIGITS:
            raise ForeignValueError(f"{keys.HEAD}: {head[:20]!r} is no number")
        return self.next_after(int(head) - 1)

    def announce(self, seq: int) -> None:
        """Say which decision is the last; the host alone does this."""
        self._store.put(keys.HEAD, str(seq))

    def forget(self, seq: int) -> None:
        """Remove a decision that everybody has read; the host alone does this."""
        self._store.delete(keys.log(seq))

    @staticmethod
    def _decoded(seq: int, text: str) -> Entry:
        entry = decode(Entry, text)
        if entry.seq != seq:
            raise ForeignValueError(f"decision {entry.seq} stands at the place of {seq}")
        return entry
