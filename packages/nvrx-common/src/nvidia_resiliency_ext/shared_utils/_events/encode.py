# SPDX-License-Identifier: Apache-2.0
"""Owns how an event becomes one line of JSON, at most ``LINE_LIMIT`` bytes long; writes nothing."""

from __future__ import annotations

import json
from math import isfinite

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["LINE_LIMIT", "encode_line"]

LINE_LIMIT = 4096  # the size up to which an append is one piece on every file system we know
_SHORTEST_CUT = 16
_DEEPEST = 6


def encode_line(fields: Mapping[str, object]) -> bytes:
    """Return ``fields`` as one line, cut where it is longer than the limit.

    Values that JSON does not know (numbers of array libraries, exceptions, NaN) become numbers or
    text: an event is never lost because of what somebody put into it.
    """
    try:
        line = _ENCODER.encode(fields)
    except (ValueError, TypeError, RecursionError):
        line = _ENCODER.encode({str(name): _plain(value, 0) for name, value in fields.items()})
    if len(line) < LINE_LIMIT:
        return line.encode("ascii") + b"\n"
    return _cut_line(fields)


def _cut_line(fields: Mapping[str, object]) -> bytes:
    """Halve the longest value until the line fits; numbers and short values stay whole."""
    sized = {str(name): _plain(value, 0) for name, value in fields.items()}
    while True:
        line = _ENCODER.encode(sized)
        if len(line) < LINE_LIMIT:
            return line.encode("ascii") + b"\n"
        longest = max(sized, key=lambda name: len(_ENCODER.encode(sized[name])))
        sized[longest] = _halved(sized[longest])


def _halved(value: object) -> object:
    """Return about half of ``value`` with a marker that says that something is missing."""
    if isinstance(value, str):
        kept, _, cut = value.rpartition(" ...[cut ")
        already = int(cut[:-1]) if kept and cut[:-1].isdigit() else 0
        text = kept if already else value
        keep = len(text) // 2
        if keep < _SHORTEST_CUT:
            return "...[cut]"
        return f"{text[:keep]} ...[cut {len(text) - keep + already}]"
    if isinstance(value, list) and len(value) > 1:
        kept_items = value[: len(value) // 2]
        return [item for item in kept_items if item != "...[cut]"] + ["...[cut]"]
    if isinstance(value, dict) and len(value) > 1:
        names = [name for name in value if name != "...[cut]"]
        return {**{name: value[name] for name in names[: len(names) // 2]}, "...[cut]": True}
    return "...[cut]"


def _plain(value: object, depth: int) -> object:
    """Return ``value`` made of JSON's own types only."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if isfinite(value) else str(value)
    if depth >= _DEEPEST:
        return "...[cut]"
    if isinstance(value, dict):
        return {str(name): _plain(item, depth + 1) for name, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item, depth + 1) for item in value]
    return _foreign(value)


def _foreign(value: object) -> object:
    """Return a number where ``value`` is one (of numpy, of torch), else its text."""
    if hasattr(value, "__index__"):
        return int(value.__index__())
    if hasattr(value, "__float__"):
        number = float(value.__float__())
        return number if isfinite(number) else str(number)
    return str(value)


_ENCODER = json.JSONEncoder(
    separators=(",", ":"), allow_nan=False, check_circular=False, default=_foreign
)
