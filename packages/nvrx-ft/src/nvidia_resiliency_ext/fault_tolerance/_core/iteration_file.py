# SPDX-License-Identifier: Apache-2.0
"""Reading the file that names the last saved iteration, within a bounded time.

A dead network file system blocks open and read without end and cannot be interrupted. The read
therefore runs in a daemon thread; when the time is up the thread is left behind, and no second one
is started until it has come back.
"""

import logging
import os
import threading

__all__ = ["IterationFile"]

logger = logging.getLogger("nvrx")

_READ_LIMIT_BYTES = 4096


class IterationFile:
    """One file that holds one integer, read by at most one helper thread at a time.

    `read` is called from one thread; `close` waits for the helper only for the time given.
    """

    def __init__(self, path: str, timeout_s: float = 2.0) -> None:
        """Remember `path`; nothing is read yet."""
        self.path = path
        self.timeout_s = timeout_s
        self._thread: threading.Thread | None = None
        self._is_missed = False

    def read(self) -> int | None:
        """Return the integer; None when the file is absent, unreadable, empty or too slow."""
        if self._thread is not None and self._thread.is_alive():
            logger.warning("%s: an earlier read has still not come back, skipped", self.path)
            return None
        answer: list[str | OSError] = []
        thread = threading.Thread(
            target=_read_into, args=(self.path, answer), name="nvrx-iteration-file", daemon=True
        )
        try:
            thread.start()
        except RuntimeError as error:  # the limit of threads
            logger.warning("%s: %s, skipped", self.path, error)
            return None
        self._thread = thread
        thread.join(self.timeout_s)
        if not answer:
            logger.warning("%s: not readable within %.1f s, skipped", self.path, self.timeout_s)
            return None
        return self._parse(answer[0])

    def close(self, timeout_s: float = 0.0) -> bool:
        """Wait for the helper thread; return whether it has ended."""
        if self._thread is None:
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _parse(self, answer: str | OSError) -> int | None:
        if isinstance(answer, FileNotFoundError):
            if not self._is_missed:
                self._is_missed = True
                logger.warning("%s does not exist (yet): it is read in each cycle", self.path)
            return None
        self._is_missed = False
        if isinstance(answer, OSError):
            logger.warning("%s: %s, skipped", self.path, answer)
            return None
        try:
            return int(answer)
        except ValueError:
            logger.warning("%s: holds %.40r, not one integer, skipped", self.path, answer)
            return None


def _read_into(path: str, answer: list[str | OSError]) -> None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            data = os.read(descriptor, _READ_LIMIT_BYTES)
        finally:
            os.close(descriptor)
    except OSError as error:
        answer.append(error)
    else:
        answer.append(data.decode("ascii", "replace").strip())
