# SPDX-License-Identifier: Apache-2.0
"""Owns the form of a record in a file that others merge: no text of it can pass for another one."""

from __future__ import annotations

__all__ = ["guarded"]

_LINE_BREAKS = (0x2028, 0x2029)  # some programs end a line there
_CONTROLS = (*range(0x20), *range(0x7F, 0xA0), *_LINE_BREAKS)
_ESCAPES: dict[int, str] = {code: ascii(chr(code))[1:-1] for code in _CONTROLS}
_ESCAPES[ord("\t")] = "\t"
# A record's further lines begin with a tab, and a line that begins a record never does.
_ESCAPES[ord("\n")] = "\n\t"


def guarded(text: str) -> str:
    """Return the text of a record with its line breaks marked and control characters escaped."""
    return text if text.isprintable() else text.translate(_ESCAPES)
