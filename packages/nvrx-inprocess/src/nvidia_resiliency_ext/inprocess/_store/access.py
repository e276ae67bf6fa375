# SPDX-License-Identifier: Apache-2.0
"""Single operations on any torch Store, as text, with typed errors and a count; no protocol.

torch's stores differ: what a missing key gives, whether they can append, which error means that
time is over. All of that is known here and nowhere else.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

from nvidia_resiliency_ext.inprocess.utils import torch_older_than
from nvidia_resiliency_ext.shared_utils.store_client import StoreLostError, WaitExpiredError

from .endpoint import ForeignValueError, first_line, is_listening

MAX_VALUE_BYTES = 1 << 24

# As the expected value of `compare_set` it changes nothing and gives what is there, or this: the
# one way to read a key without waiting for it. Nobody else knows it.
_NOTHING = "-" + os.urandom(16).hex()
_SHORTEST_WAIT_S = 0.001
# How much earlier than asked a wait may end, and how much later it is no end of that wait.
_EARLY_S = 0.01
_LATE_S = 2.0
_CLONE_S = 10.0

_Answer = TypeVar("_Answer")


class StoreAccess:
    """Operations of one thread on a store.

    After a `StoreLostError` it sends nothing more: a late answer would be taken for the next one.
    """

    def __init__(self, store: Any) -> None:
        self._store = store
        self._is_extended = _is_extended(store)
        self._lost: str | None = None
        self.operations = 0

    def add(self, key: str, step: int) -> int:
        """Add to a counter and return its new value; a ForeignValueError if it is no number."""
        try:
            return int(self._call(lambda: self._store.add(key, step)))
        except ValueError:
            # Stores in memory and in files say it themselves.
            raise ForeignValueError(key, self.peek(key) or "") from None
        except StoreLostError as error:
            if "timeout" not in str(error).lower():
                self._explain_counter(key)
            raise

    def append(self, key: str, text: str) -> None:
        """Append to a value; in stores that cannot, the same text twice in a row may stand once."""
        if self._is_extended:
            self._call(lambda: self._store.append(key, text))
            return
        standing = ""
        while (found := self.swap(key, standing, standing + text)) != standing + text:
            standing = found

    def settle(self, key: str, value: str) -> str:
        """Set a missing key, once for all ranks, and return its value then.

        torch's server without libuv wakes nobody for a swap, but for a value that is set.
        """
        standing = self.swap(key, "", value)
        if standing == value:
            self.set(key, value)
        return standing

    def swap(self, key: str, expected: str, wanted: str) -> str:
        """Set a key whose value is `expected`, or missing if that is ""; return its value then."""
        return self._text(key, self._call(lambda: self._store.compare_set(key, expected, wanted)))

    def set(self, key: str, text: str) -> None:
        self._call(lambda: self._store.set(key, text))

    def delete(self, key: str) -> None:
        self._call(lambda: self._store.delete_key(key))

    def check(self, key: str) -> bool:
        return bool(self._call(lambda: self._store.check([key])))

    def peek(self, key: str) -> str | None:
        """Return the value of a key for which nobody waits, or None; it never waits.

        TCPStore takes it for a change of a missing key: those who wait for it get an empty value.
        """
        text = self.swap(key, _NOTHING, _NOTHING)
        return None if text == _NOTHING else text

    def get(self, key: str, timeout_s: float) -> str | None:
        """Wait in the store for a value; None after `timeout_s`, or earlier by mistake."""
        if not self._is_extended:
            # FileStore waits twice as long in `get`.
            if not self.wait(key, timeout_s):
                return None
            return self._text(key, self._call(lambda: self._store.get(key)))
        found = self._limited(timeout_s, lambda: self._store.get(key))
        # Nobody sets an empty value: that is a wait which was ended in vain.
        return self._text(key, found) if found else None

    def wait(self, key: str, timeout_s: float) -> bool:
        """Wait in the store until a key has a value; False after `timeout_s`."""
        limit_s = max(_SHORTEST_WAIT_S, timeout_s)
        limit = timedelta(seconds=limit_s)
        try:
            self._call(lambda: self._store.wait([key], limit), limit_s)
        except TimeoutError:
            return False
        return True

    def get_all(self, keys: Sequence[str], timeout_s: float) -> list[str | None]:
        """Return values of keys; None for those that are not there after `timeout_s`."""
        if not keys:
            return []
        found = self._limited(timeout_s, lambda: self._store.multi_get(list(keys)))
        if found is None:
            return [self.peek(key) for key in keys]
        return [self._text(key, value) for key, value in zip(keys, found, strict=True)]

    def _limited(self, timeout_s: float, function: Callable[[], _Answer]) -> _Answer | None:
        limit_s = max(_SHORTEST_WAIT_S, timeout_s)
        usual = self._store.timeout
        self._store.set_timeout(timedelta(seconds=limit_s))
        try:
            return self._call(function, limit_s)
        except TimeoutError:
            return None
        finally:
            self._store.set_timeout(usual)

    def _text(self, key: str, raw: bytes) -> str:
        if len(raw) > MAX_VALUE_BYTES:
            raise ForeignValueError(key, f"{len(raw)} bytes, of which at most 16 MiB are read")
        try:
            return raw.decode("ascii")
        except UnicodeDecodeError:
            raise ForeignValueError(key, repr(raw[:200])) from None

    def _explain_counter(self, key: str) -> None:
        """Find out whether `add` failed as the value is no number: TCPStore then disconnects."""
        if not is_listening(self._store):
            return
        try:
            usual = self._store.timeout
            # So long does torch try to connect to a store that has just gone.
            self._store.set_timeout(timedelta(seconds=_CLONE_S))
            clone = self._store.clone()
            clone.set_timeout(usual)
        except (AttributeError, RuntimeError, StoreLostError):
            return
        self._store, self._lost = clone, None
        text = self.peek(key) or "0"
        digits = text.removeprefix("-")
        if not (digits.isascii() and digits.isdigit() and len(digits) < 19):  # noqa: PLR2004
            raise ForeignValueError(key, text)

    def _call(self, function: Callable[[], _Answer], limit_s: float | None = None) -> _Answer:
        if self._lost is not None:
            raise StoreLostError(self._lost)
        self.operations += 1
        began = time.monotonic()
        try:
            return function()
        except (RuntimeError, OSError) as error:
            # torch: DistNetworkError, DistStoreError and others, all of them RuntimeError.
            elapsed_s = time.monotonic() - began
            if limit_s is not None and is_expiry(error, elapsed_s, limit_s):
                raise TimeoutError from None
            self._lost = f"the store does not answer: {first_line(error)}"
            raise StoreLostError(self._lost) from None


def is_expiry(error: BaseException, elapsed_s: float, limit_s: float) -> bool:
    """Return whether a wait expired; the network's own timeouts use the same words."""
    if isinstance(error, (WaitExpiredError, ConnectionError)):
        return isinstance(error, WaitExpiredError)
    name = type(error).__name__
    if name == "DistStoreError" or (name == "DistNetworkError" and not torch_older_than("2.5")):
        return name == "DistStoreError"
    text = str(error).lower()
    is_timeout = "timeout" in text or "timed out" in text
    return is_timeout and limit_s - _EARLY_S <= elapsed_s <= limit_s + _LATE_S


def _is_extended(store: Any) -> bool:
    """Return whether a store appends by itself and heeds its timeout in `get`."""
    try:
        return bool(store.has_extended_api())
    except (AttributeError, RuntimeError, NotImplementedError):
        return False
