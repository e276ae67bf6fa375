# SPDX-License-Identifier: Apache-2.0
"""Owns the reading of one line of the text log format."""

from __future__ import annotations

import re
import time
from typing import ClassVar

__all__ = ["LINE_HEAD", "LogMessage"]

# Everything of a line before its message, as a regular expression with named groups.
LINE_HEAD = (
    r"(?: *(?:\d+|\?): )?"
    r"(?P<asctime>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3})"
    r" \[(?P<levelname>[^\]\s]+(?: \d+)?)\]"
    r" \[(?P<hostname>[^\]\n]*)\]"
    r" \[workload:(?P<workload_rank>\d+|\?)\((?P<workload_local_rank>\d+|\?)\)"
    r" infra:(?P<infra_rank>\d+|\?)\((?P<infra_local_rank>\d+|\?)\)\]"
    r" (?P<filename>[^:\n]+):(?P<lineno>\d+) "
)
_RANGES = ((1, 12), (1, 31), (0, 23), (0, 59), (0, 60))  # month, day, hour, minute, second


class LogMessage:
    """A line of a log taken apart.

    Attributes:
        log_message: The line as given.
        log_message_valid: Whether it has the form of the nvrx log.
        hash_table: The named groups of ``log_pattern``, with ``asctime`` in milliseconds since
            the epoch; empty when the line is not valid.

    Example:
        >>> line = "2026-01-02 03:04:05,678 [INFO] [n1] [workload:0(0) infra:?(?)] a.py:1 hello"
        >>> LogMessage(line).hash_table["message"]
        'hello'
    """

    log_pattern: ClassVar[re.Pattern[str]] = re.compile(LINE_HEAD + r"(?P<message>.*)", re.DOTALL)

    def __init__(self, log_message: str) -> None:
        self.log_message = log_message
        self.hash_table: dict[str, str | int] = {}
        match = self.log_pattern.match(log_message)
        self.log_message_valid = False
        if match is None:
            return
        timestamp_ms = _milliseconds(match["asctime"])
        if timestamp_ms is not None:
            self.hash_table = {**match.groupdict(), "asctime": timestamp_ms}
            self.log_message_valid = True

    def getts(self) -> int:
        """Return the time in milliseconds since the epoch, 0 when the line is not valid."""
        return int(self.hash_table.get("asctime", 0))

    def __str__(self) -> str:
        """Return the line as given."""
        return self.log_message


def _milliseconds(asctime: str) -> int | None:
    """Return local time ``YYYY-MM-DD HH:MM:SS,mmm`` as milliseconds since the epoch."""
    year, month, day = int(asctime[:4]), int(asctime[5:7]), int(asctime[8:10])
    hour, minute, second = int(asctime[11:13]), int(asctime[14:16]), int(asctime[17:19])
    given = (month, day, hour, minute, second)
    if not all(low <= part <= high for part, (low, high) in zip(given, _RANGES, strict=True)):
        return None
    try:
        seconds = time.mktime((year, month, day, hour, minute, second, 0, 0, -1))
    except (OverflowError, ValueError):
        return None
    return int(seconds) * 1000 + int(asctime[20:23])
