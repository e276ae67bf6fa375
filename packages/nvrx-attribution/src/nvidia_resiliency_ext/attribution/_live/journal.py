# SPDX-License-Identifier: Apache-2.0
"""Accepted submissions in a file, so that a killed service knows them when it starts again."""

from __future__ import annotations

import errno
import json
import logging
import os
from typing import TYPE_CHECKING, Any

from nvidia_resiliency_ext.shared_utils.os_utils import atomic_write, read_regular_file

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["SubmissionJournal"]

logger = logging.getLogger("nvrx")

_LIMIT_BYTES = 64 << 20
_REWRITE_BYTES = 16 << 20  # at least what is left out then
_MOST_KEPT = 3000


class SubmissionJournal:
    """Append each submission before it is answered; drop ended ones when the file is large.

    A file that takes no more, as on a full disk, keeps no submission from its verdict.

    Args:
        path: JSON-lines file; its directory must exist.

    Attributes:
        problem: Why the last line could not be written; empty: it was.

    Raises:
        OSError: It cannot be read or written.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._open = self._read()
        self._file = -1
        self.problem = ""
        self._rewrite()

    @property
    def open_submissions(self) -> list[dict[str, Any]]:
        """The submissions without an end, oldest first."""
        return list(self._open.values())

    def add(self, submission: Mapping[str, Any]) -> None:
        """Write a submission; `log_path` names it."""
        self._open[submission["log_path"]] = dict(submission)
        self._append({"submitted": dict(submission)})

    def end(self, log_path: str) -> None:
        """Write that a log's analysis has ended."""
        self._open.pop(log_path, None)
        self._append({"ended": log_path})

    def close(self) -> None:
        """Close the file; harmless when repeated."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _rewrite(self) -> None:
        """Replace the file by one that has the open submissions alone."""
        lines = [json.dumps({"submitted": value}) + "\n" for value in self._open.values()]
        try:
            atomic_write(self._path, "".join(lines).encode())
        except OSError as error:
            self._report(error)
        self.close()
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._file = os.open(self._path, flags, 0o600)
        large = 2 * os.fstat(self._file).st_size + _REWRITE_BYTES
        self._large_bytes = min(large, _LIMIT_BYTES - _REWRITE_BYTES)  # a larger one is not read

    def _append(self, value: dict[str, Any]) -> None:
        try:
            self._write(json.dumps(value).encode() + b"\n")
            if os.fstat(self._file).st_size > self._large_bytes:
                self._rewrite()
        except OSError as error:
            self._report(error)
        else:
            self.problem = ""

    def _write(self, line: bytes) -> None:
        end = os.fstat(self._file).st_size
        # One call: a kill between two would leave half a line.
        if os.write(self._file, line) < len(line):
            os.ftruncate(self._file, end)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _report(self, error: OSError) -> None:
        said, self.problem = self.problem, f"the journal {self._path} cannot be written: {error}"
        if not said:
            logger.error("%s", self.problem)

    def _read(self) -> dict[str, dict[str, Any]]:
        if not os.path.exists(self._path):
            return {}
        found: dict[str, dict[str, Any]] = {}
        for line in read_regular_file(self._path, _LIMIT_BYTES).splitlines():
            try:
                value = json.loads(line)
                if "ended" in value:
                    found.pop(value["ended"], None)
                else:
                    found[value["submitted"]["log_path"]] = value["submitted"]
            except (ValueError, TypeError, KeyError):
                logger.warning("a line of the journal %s is damaged and left out", self._path)
        return dict(list(found.items())[-_MOST_KEPT:])
