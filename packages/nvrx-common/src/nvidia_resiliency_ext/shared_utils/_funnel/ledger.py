# SPDX-License-Identifier: Apache-2.0
"""Owns what stands in the file beside a log: which chunks it holds, written before they are.

Pure: bytes in, bytes out. A record is one line of JSON, `{"start", "end", "seqs": {stream: seq}}`,
and says: once the log is `end` bytes long, it holds all chunks of these streams up to these
numbers. It is in place before the first byte behind `start` is written. A server that was killed in
between therefore knows from the log's size alone whether its last batch is in there whole.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "MAX_BYTES", "Ledger", "encode", "encode_all", "is_ledger_name", "ledger_name", "merge",
    "read_ledger",
]  # fmt: skip

MAX_BYTES = 64 << 20
_MOST_RECORD_BYTES = MAX_BYTES // 8
_MAX_SEQ = (1 << 64) - 1
_SUFFIX = ".nvrx-acks"


@dataclass(slots=True)
class Ledger:
    """What a ledger says about its log.

    Attributes:
        seqs: The last number of each stream that is in the log.
        cut_log_to: Size to cut the log back to: it ends inside a batch.
        cut_ledger_to: Size to cut the ledger back to, after the log.
        last_stream: Who wrote the log's last bytes, where that is known.
    """

    seqs: dict[str, int] = field(default_factory=dict)
    cut_log_to: int | None = None
    cut_ledger_to: int | None = None
    last_stream: str | None = None


def ledger_name(log_name: str) -> str:
    """Return the name of the ledger beside a log; hidden, so that a listing shows logs only."""
    return f".{log_name}{_SUFFIX}"


def is_ledger_name(name: str) -> bool:
    """Tell whether a file of that name is a ledger, which no sender may write to."""
    return name.startswith(".") and name.endswith(_SUFFIX)


def encode(start: int, end: int, seqs: Mapping[str, int]) -> bytes:
    """Return the record of a batch that fills the log from `start` to `end`.

    The stream that writes last comes last.
    """
    record = {"start": start, "end": end, "seqs": dict(seqs)}
    return json.dumps(record, separators=(",", ":")).encode() + b"\n"


def merge(seqs: dict[str, int], newer: Mapping[str, int]) -> None:
    """Take over newer numbers; the stream that was silent for longest stands first."""
    for stream_id, seq in newer.items():
        seqs.pop(stream_id, None)
        seqs[stream_id] = seq


def encode_all(size: int, seqs: dict[str, int]) -> bytes:
    """Return the one record that says what a log of that size holds.

    Streams that were silent for longest are forgotten where they are too many for a ledger.
    """
    while len(record := encode(size, size, seqs)) > _MOST_RECORD_BYTES:
        for stream_id in list(seqs)[: (len(seqs) + 1) // 2]:
            del seqs[stream_id]
    return record


def read_ledger(data: bytes, log_size: int) -> Ledger:
    """Return what a ledger says about a log of that size.

    Lines that are no records are passed over: a record counts only once it is whole, and its batch
    is written only after that.
    """
    found = Ledger()
    last: tuple[int, int, int, dict[str, int]] | None = None
    position = 0
    for line in data.splitlines(keepends=True):
        record = _record(line)
        if record is not None:
            if last is not None:
                merge(found.seqs, last[3])
            last = (position, *record)
        position += len(line)
    whole = data.rfind(b"\n") + 1
    if whole != len(data):
        found.cut_ledger_to = whole
    if last is None:
        return found
    offset, start, end, seqs = last
    if start <= log_size < end:
        found.cut_log_to, found.cut_ledger_to = start, offset
        return found
    merge(found.seqs, seqs)
    if log_size == end and seqs:
        found.last_stream = next(reversed(seqs))
    return found


def _record(line: bytes) -> tuple[int, int, dict[str, int]] | None:
    if not line.endswith(b"\n"):
        return None
    try:
        record = json.loads(line)
        start, end, seqs = record["start"], record["end"], record["seqs"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    if not (_is_number(start) and _is_number(end) and isinstance(seqs, dict) and start <= end):
        return None
    if not all(_is_number(seq) for seq in seqs.values()):
        return None
    return start, end, seqs


def _is_number(value: object) -> bool:
    return type(value) is int and 0 <= value <= _MAX_SEQ
