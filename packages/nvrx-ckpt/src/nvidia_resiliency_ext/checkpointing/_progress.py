# SPDX-License-Identifier: Apache-2.0
"""Show the progress of a long read in a terminal."""

from __future__ import annotations

import os
import sys
import threading
import time

from nvidia_resiliency_ext.shared_utils.console import write_err

LOAD_DELAY_S = 2.0
"""A load that takes no longer shows nothing."""

_CHARS = 30
_EVERY_S = 0.2
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_STEP = 1024


def size_text(nbytes: int) -> str:
    """Return a number of bytes for people.

    Example:
        >>> size_text(3 << 20)
        '3.0 MiB'
    """
    value, unit = float(nbytes), 0
    while value >= _STEP and unit < len(_UNITS) - 1:
        value, unit = value / _STEP, unit + 1
    return f"{value:.1f} {_UNITS[unit]}" if unit else f"{nbytes} B"


class ProgressBar:
    """How much is done, how fast, and how long it takes yet; a context manager, for any thread.

    Args:
        shown: Whether to show it at all.
        after_s: Seconds before it is shown first.
        total: Bytes in all, for `add`.
    """

    def __init__(self, *, shown: bool, after_s: float = _EVERY_S, total: int = 0) -> None:
        self._shown = shown
        self._begin = time.monotonic()
        self._next = self._begin + after_s
        self._lock = threading.Lock()
        self._total, self._done = total, 0

    @classmethod
    def of_load(cls, total: int = 0) -> ProgressBar:
        """Return the bar of a load: rank 0 shows it, in a terminal, when it takes long."""
        shown = (
            sys.stderr is not None and sys.stderr.isatty() and os.environ.get("RANK", "0") == "0"
        )
        return cls(shown=shown, after_s=LOAD_DELAY_S, total=total)

    def __enter__(self) -> ProgressBar:  # noqa: PYI034 - needs Python 3.11
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the line."""
        if self._shown:
            write_err("\r\x1b[K")

    def add(self, nbytes: int) -> None:
        """Count bytes that were read."""
        with self._lock:
            self._done += nbytes
            self.show(self._done, self._total)

    def show(self, done: int, total: int) -> None:
        """Show how many bytes are done, a few times a second at most."""
        now = time.monotonic()
        if not self._shown or now < self._next or not total:
            return
        self._next = now + _EVERY_S
        rate = done / max(now - self._begin, 1e-9)
        filled = min(_CHARS, _CHARS * done // total)
        bar = "#" * filled + "-" * (_CHARS - filled)
        left = (total - done) / rate if rate else 0.0
        sizes = f"{size_text(done)} of {size_text(total)}, {size_text(int(rate))}/s"
        write_err(f"\r[{bar}] {sizes}, {left:.0f} s left\x1b[K")
