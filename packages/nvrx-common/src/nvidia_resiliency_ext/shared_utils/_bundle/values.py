# SPDX-License-Identifier: Apache-2.0
"""Owns where the value of a name ends: on its line, at a bracket or quote, or lines later; pure.

A text may be YAML, TOML, JSON, a command line, or a log with any of these in it. Where that leaves
a doubt, the longer value is taken.
"""

from __future__ import annotations

import re

__all__ = ["value_span"]

_LONGEST = 8192
_QUOTED_LINES = 20
_WHOLE_LINE = frozenset({"cookie", "authorization"})
_QUOTE = re.compile(r"\\{0,8}(?:\"{3}|'{3}|[\"'])")
_BRACKET_OR_QUOTE = re.compile(r"[\[({\])}]|\\{0,8}[\"']")
_SCHEME = re.compile(r"(?:bearer|basic|digest|token)[ \t]+(?=[^\s])", re.IGNORECASE)
_BARE = re.compile(r"\[redacted\]|[^\s\"'\\,;&)}\]]{1,8192}")
# `b'...'`, `SecretStr('...')`
_BEFORE_QUOTE = re.compile(r"(?:[A-Za-z_][\w.]{0,60}\(|[bBuUrRfF]{1,2})(?=\\{0,8}[\"'])")
_YAML_MARKS = re.compile(r"(?:[&!][\w!./-]*[ \t]+){1,2}")
_YAML_BLOCK = re.compile(r"[|>][+-]?\d?[+-]?[ \t]*(?:#[^\n]*)?\r?(?=\n|\Z)")
# What stands before the name of a setting that may go on in the next lines.
_FIRST_ON_LINE = re.compile(r"(?P<indent>[ \t]*(?:-[ \t]+)*)(?:export[ \t]+)?[\"']?")


def value_span(text: str, name_at: int, start: int, name: str) -> tuple[int, int]:
    """Return where the value that begins at ``start`` begins and ends, quotes aside.

    Args:
        text: Any number of lines.
        name_at: Where the name begins.
        start: Where its value may begin.
        name: The name in small letters.
    """
    marks = _YAML_MARKS.match(text, start)
    start = marks.end() if marks else start
    prefix = _BEFORE_QUOTE.match(text, start)
    start = prefix.end() if prefix else start
    begin, end = _on_line(text, start, name)
    return begin, max(end, _end_of_block(text, name_at, start))


def _on_line(text: str, start: int, name: str) -> tuple[int, int]:
    line_end = _line_end(text, start)
    block = _YAML_BLOCK.match(text, start)
    if block is not None:
        return start, block.end()
    quote = _QUOTE.match(text, start)
    if quote is not None:
        return quote.end(), _end_of_quoted(text, quote[0], quote.end())
    if name in _WHOLE_LINE:
        ends = [at for at in (text.find(char, start, line_end) for char in "\"'") if at >= 0]
        return start, min([*ends, line_end])
    if text.startswith(("{", "[", "("), start) and not text.startswith("[redacted]", start):
        return start, _end_of_bracket(text, start) or line_end
    scheme = _SCHEME.match(text, start)
    bare = _BARE.match(text, scheme.end() if scheme else start)
    return start, bare.end() if bare else start


def _end_of_quoted(text: str, quote: str, start: int) -> int:
    """Return where the quote closes; without an end in sight, all of the line is quoted."""
    end = _closing(text, quote, start, start + _LONGEST)
    if end is not None and text.count("\n", start, end) <= _QUOTED_LINES:
        return end
    return min(_line_end(text, start), start + _LONGEST)


def _end_of_bracket(text: str, start: int) -> int | None:
    """Return the place behind the bracket that closes the one at ``start``."""
    limit = min(len(text), start + _LONGEST)
    depth, at = 0, start
    while (found := _BRACKET_OR_QUOTE.search(text, at, limit)) is not None:
        at = found.end()
        if found[0] in "[({":
            depth += 1
        elif found[0] in "])}":
            depth -= 1
            if depth == 0:
                return at
        else:
            closing = _closing(text, found[0], at, limit)
            if closing is None:
                return None
            at = closing + len(found[0])
    return None


def _closing(text: str, quote: str, start: int, limit: int) -> int | None:
    # A backslash more than the opening quote had is part of the value, as is YAML's double quote.
    twice = r"''(?=\w)|" if quote == "'" else ""
    for found in re.compile(rf"(?<!\\)(?:{twice}{re.escape(quote)})").finditer(text, start, limit):
        if found[0] == quote:
            return found.start()
    return None


def _end_of_block(text: str, name_at: int, start: int) -> int:
    """Return the end of the lines that belong to a name by their indentation, 0 without any."""
    line_start = text.rfind("\n", 0, name_at) + 1
    before = _FIRST_ON_LINE.fullmatch(text, line_start, name_at)
    if before is None:
        return 0
    column = before.end("indent") - line_start
    at = _line_end(text, start)
    # YAML allows the items of a list to stand below the first letter of its name.
    may_be_items = not text[start:at].strip()
    end = 0
    while at < len(text):
        line_start, at = at + 1, _line_end(text, at + 1)
        line = text[line_start:at]
        content = line.lstrip(" \t")
        indent = len(line) - len(content)
        is_item = may_be_items and indent == column and content.startswith("- ")
        if indent > column or is_item:
            end = at if content.strip() else end
        elif content.strip():
            break
    return end


def _line_end(text: str, at: int) -> int:
    end = text.find("\n", at)
    return len(text) if end < 0 else end
