# SPDX-License-Identifier: Apache-2.0
"""Owns what counts as a secret in a text and what stands there instead; reads nothing.

It errs on the side of taking away too much. Names of hosts, users, files and jobs stay: without
them nobody could follow what happened.
"""

from __future__ import annotations

import json
import re

__all__ = ["REDACTED", "is_secret_name", "redact"]

REDACTED = "[redacted]"

_PARTS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|[0-9]+")
_SECRET_ENDS = (
    "token", "tokens", "secret", "secrets", "password", "passwords", "passwd", "passphrase", "pwd",
    "credential", "credentials", "authorization", "apikey", "cookie", "cookies", "webhook",
)  # fmt: skip
_SECRET_PARTS = frozenset({"auth", "bearer", "dsn", "sas", "signature", "pat"})
_SECRET_LAST = frozenset({"key", "keys"})
_WHOLE_LINE = frozenset({"cookie", "authorization"})
_LONGEST_VALUE = 8192

# A name and what may stand between it and its value. A blank is enough after `--name` only.
_NAMED = re.compile(
    r"(?<![A-Za-z0-9_.-])(?P<name>[A-Za-z0-9_.-]{1,200})"
    r"(?:(?:\\{0,8}[\"'])?[ \t]{0,8}[=:][ \t]{0,8}"
    r"|(?<=[A-Za-z0-9])(?P<gap>(?:\\{0,8}[\"'],?)?[ \t]{1,8}))"
)
_QUOTE = re.compile(r"\\{0,8}[\"']")
_SCHEME = re.compile(r"(?:bearer|basic|digest|token)[ \t]+(?=[^\s])", re.IGNORECASE)
_BARE = re.compile(r"\[redacted\]|[^\s\"'\\,;&)}\]]{1,8192}")
_IN_URL = re.compile(r"([a-z][a-z0-9+.-]{0,20}://)(?!\[redacted\])[^\s/@\"']{1,1024}(?=@)", re.I)  # noqa: FURB167 - fits the line
_IN_QUERY = re.compile(r"([?&](?:sig|code|x-amz-[a-z-]{1,40})=)(?!\[redacted\])[^&\s\"']{1,8192}")
_KNOWN = re.compile(
    r"\b()(?:hf_[A-Za-z0-9]{16,}|nvapi-[\w-]{16,}|sk-[\w-]{16,}|gh[opsur]_[A-Za-z0-9]{16,}"
    r"|github_pat_\w{16,}|glpat-[\w-]{16,}|xox[a-z]-[\w-]{10,}|A[KS]IA[0-9A-Z]{12,}"
    r"|AIza[\w-]{30,}|eyJ[\w-]{8,}\.[\w-]{8,}(?:\.[\w-]*)?)"
)
_KEY_BLOCK = re.compile(
    r"()-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY-----.*?"
    r"(?:-----END [A-Z0-9 ]{0,40}PRIVATE KEY-----|\Z)",
    re.DOTALL,
)
_HARMLESS = frozenset({"", "null", "none", "true", "false", "yes", "no"})


def is_secret_name(name: str) -> bool:
    """Say whether something of this name may be a secret."""
    parts = [part.lower() for part in _PARTS.findall(name)]
    return bool(parts) and (
        parts[-1] in _SECRET_LAST
        or not _SECRET_PARTS.isdisjoint(parts)
        or any(part.endswith(_SECRET_ENDS) for part in parts)
    )


def redact(text: str) -> tuple[str, int]:
    """Return the text without its secrets, and how many there were.

    Text or lines that are JSON stay JSON.
    """
    found = _Redaction()
    if text.startswith("{") and (whole := found.document(text)) is not None:
        return whole, found.count
    blocks = found.blocks(text)
    return "\n".join(found.line(line) for line in blocks.split("\n")), found.count


class _Redaction:
    """Counts the secrets that it takes away."""

    def __init__(self) -> None:
        self.count = 0

    def document(self, text: str) -> str | None:
        """Redact a JSON object; None when it is none."""
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return None
        if not isinstance(value, dict):
            return None
        before = self.count
        kept = self.value(value)
        if self.count == before:
            return text
        return json.dumps(kept, separators=(",", ":")) + ("\n" if text.endswith("\n") else "")

    def line(self, line: str) -> str:
        if line.startswith("{") and (kept := self.document(line)) is not None:
            return kept
        return self.text(line)

    def value(self, value: object) -> object:
        """Redact a JSON value."""
        if isinstance(value, str):
            return self.text(self.blocks(value))
        if isinstance(value, dict):
            return {name: self.member(str(name), each) for name, each in value.items()}
        if isinstance(value, list):
            kept = []
            name = ""
            for each in value:
                kept.append(self.member(name, each))
                is_flag = isinstance(each, str) and each.startswith("-") and "=" not in each
                name = each if is_flag else ""
            return kept
        return value

    def member(self, name: str, value: object) -> object:
        """Redact what has a name; all that lies within a secret is secret."""
        if not is_secret_name(name) or value is None or isinstance(value, bool):
            return self.value(value)
        if isinstance(value, dict):
            return {inner: self.member(name, each) for inner, each in value.items()}
        if isinstance(value, list):
            return [self.member(name, each) for each in value]
        return REDACTED if self.is_secret(name, str(value)) else value

    def is_secret(self, name: str, value: str) -> bool:
        """Say whether the value of a secret name is one, and count it."""
        is_count = "tokens" in name.lower() and value.replace(".", "", 1).isdigit()
        if value.lower() in _HARMLESS or value == REDACTED or is_count:
            return False
        self.count += 1
        return True

    def blocks(self, text: str) -> str:
        return self.replace(_KEY_BLOCK, text)

    def text(self, text: str) -> str:
        """Redact a line of text."""
        text = self.replace(_IN_URL, text)
        kept: list[str] = []
        at = 0
        for match in _NAMED.finditer(text):
            name = match["name"]
            is_flag = name.startswith("-")
            if match.start() < at or (match["gap"] and not is_flag) or not is_secret_name(name):
                continue
            start, end = _value_at(text, match.end(), name.lower())
            if end > start and self.is_secret(name, text[start:end]):
                kept += [text[at:start], REDACTED]
                at = end
        text = "".join([*kept, text[at:]])
        return self.replace(_KNOWN, self.replace(_IN_QUERY, text))

    def replace(self, pattern: re.Pattern[str], text: str) -> str:
        text, count = pattern.subn(rf"\g<1>{REDACTED}", text)
        self.count += count
        return text


def _value_at(text: str, start: int, name: str) -> tuple[int, int]:
    """Return where the value that begins at ``start`` begins and ends, quotes aside."""
    quote = _QUOTE.match(text, start)
    if quote is not None:
        end = text.find(quote[0], quote.end(), quote.end() + _LONGEST_VALUE)
        return quote.end(), end if end >= 0 else min(len(text), quote.end() + _LONGEST_VALUE)
    if name in _WHOLE_LINE:
        ends = [at for at in (text.find(char, start) for char in "\"'") if at >= 0]
        return start, min([*ends, len(text)])
    scheme = _SCHEME.match(text, start)
    bare = _BARE.match(text, scheme.end() if scheme else start)
    return start, bare.end() if bare else start
