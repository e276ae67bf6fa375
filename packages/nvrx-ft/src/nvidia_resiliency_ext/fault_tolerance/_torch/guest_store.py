# SPDX-License-Identifier: Apache-2.0
"""The job's keys in a store that the caller brings: a TCPStore, or PrefixStores over one.

The launcher silences torch's C++ log before it loads torch; here torch is loaded already and warns
on stderr about every wait that times out. So waits of these stores do not time out.
"""

from __future__ import annotations

import contextlib
import threading
import time
from datetime import timedelta
from typing import Any, TypeVar

from nvidia_resiliency_ext.fault_tolerance._rendezvous import keys
from nvidia_resiliency_ext.fault_tolerance._rendezvous.store import (
    CALL_TIMEOUT_S,
    JobStore,
    StoreLostError,
    agree_on_secret,
    another_client,
)
from nvidia_resiliency_ext.fault_tolerance._rendezvous.threads import WATCH_WAIT_S

_A_DAY_S = 24 * 3600.0


class GuestStore(JobStore):
    """Keys of one job in a caller's store."""

    def wait_until_set(self, key: str, timeout_s: float) -> bool:
        """Wait for `key`; where the caller would only wait anew, for a day at a time."""
        return super().wait_until_set(key, _A_DAY_S if timeout_s >= WATCH_WAIT_S else timeout_s)


_Store = TypeVar("_Store", bound=JobStore)


def connect_guest(kind: type[_Store], client: Any, prefix: str, secret: bytes | None) -> _Store:
    """Return the job's keys in the store of `client`, over a connection of their own.

    Args:
        kind: What to return.
        client: The caller's store; it stays theirs.
        prefix: Before all keys of the job.
        secret: Key of the digests; None takes the one that the first node left in the store.

    Raises:
        StoreLostError: the store is gone, or not what this needs.
    """
    own, link = another_client(client)
    with contextlib.suppress(AttributeError):
        own.set_timeout(timedelta(seconds=CALL_TIMEOUT_S))
    key = agree_on_secret(own, prefix) if secret is None else secret
    return kind(own, prefix, key, link)


class BellStore(GuestStore):
    """Keys for the store host: when a wait for the bell is over, a thread rings it."""

    _ringer: _Ringer | None = None

    def wait_until_set(self, key: str, timeout_s: float) -> bool:
        """Wait for `key`; for the bell it is always true."""
        if key != keys.BELL:
            return super().wait_until_set(key, timeout_s)
        if self._ringer is None:
            self._ringer = _Ringer(self)
        self._ringer.ring_in(timeout_s)
        try:
            return super().wait_until_set(key, _A_DAY_S)
        finally:
            self._ringer.ring_in(None)

    def close(self) -> None:
        """End the thread that rings."""
        if self._ringer is not None:
            self._ringer.close()


class _Ringer(threading.Thread):
    def __init__(self, store: JobStore) -> None:
        super().__init__(name="nvrx-store-host-bell", daemon=True)
        self._store = store.another()
        self._changed = threading.Condition()
        self._at: float | None = None
        self._is_closed = False
        self.start()

    def ring_in(self, seconds: float | None) -> None:
        with self._changed:
            self._at = None if seconds is None else time.monotonic() + seconds
            self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self.join()

    def run(self) -> None:
        # A store that is gone is the host's to tell: its own wait fails, too.
        with contextlib.suppress(StoreLostError):
            while self._wait():
                self._store.put(keys.BELL, "1")

    def _wait(self) -> bool:
        """Wait until it is time to ring; False when this is over."""
        with self._changed:
            while not self._is_closed:
                left_s = None if self._at is None else self._at - time.monotonic()
                if left_s is not None and left_s <= 0:
                    self._at = None
                    return True
                self._changed.wait(left_s)
            return False
