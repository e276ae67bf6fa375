# SPDX-License-Identifier: Apache-2.0
"""One file for the lines of all workers that hold certain texts. It takes lines, and reads none."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

logger = logging.getLogger("nvrx")


class FilteredFile:
    """The lines that were wanted, of one stream of all workers of a cycle.

    A file that cannot be written costs its lines and one message, never the job.

    Args:
        path: The file; it is made anew, also when no line is wanted.
        texts: A line that holds one of them is wanted.
    """

    def __init__(self, path: str, texts: Sequence[str]) -> None:
        self._path = path
        self._texts = [text.encode(errors="surrogateescape") for text in texts]
        self._fd = -1
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC
        try:
            os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
            self._fd = os.open(path, flags, 0o644)
        except OSError as error:
            self._give_up(error)

    def wants(self, line: bytes) -> bool:
        """Return whether a line, without its prefix, belongs here."""
        return any(text in line for text in self._texts)

    def write(self, lines: bytes, _wait_s: float) -> int:
        """Write whole lines; return how many bytes are done with, which is all of them."""
        left = lines
        while left and self._fd >= 0:
            try:
                left = left[os.write(self._fd, left) :]
            except OSError as error:
                self._give_up(error)
        return len(lines)

    def close(self) -> None:
        """Let go of the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _give_up(self, error: OSError) -> None:
        logger.warning("%s is not written any more: %s", self._path, error.strerror or error)
        self.close()
