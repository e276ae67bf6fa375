# SPDX-License-Identifier: Apache-2.0
"""Owns what counts as a secret in a text and what stands there instead; reads nothing.

It errs on the side of taking away too much. Names of hosts, users, files and jobs stay: without
them nobody could follow what happened.
"""

from __future__ import annotations

import json
import re

from .names import is_secret_name
from .values import value_span

__all__ = ["REDACTED", "redact"]

REDACTED = "[redacted]"

# A name and what may stand between it and its value. A blank is enough after `--name` only.
_NAMED = re.compile(
    r"(?<![A-Za-z0-9_.-])(?P<at>)(?P<name>[A-Za-z0-9_.-]{1,200})"
    r"(?:(?:\\{0,8}[\"'])?[ \t]{0,8}(?:=>|[=:])[ \t]{0,8}"
    r"|(?<=[A-Za-z0-9])(?P<gap>\\{0,8}[\"'],[ \t]{0,8}|(?:\\{0,8}[\"'])?[ \t]{1,8}))"
)
# As in Kubernetes' `name: HF_TOKEN`, `value: ...`: the name is itself a value.
_PAIR = re.compile(
    r"(?<![A-Za-z0-9_.-])(?:name|key)(?:\\{0,8}[\"'])?[ \t]{0,8}[=:][ \t]{0,8}(?:\\{0,8}[\"'])?"
    r"(?P<name>[A-Za-z0-9_.-]{1,200})(?:\\{0,8}[\"'])?,?\s{1,80}(?:\\{0,8}[\"'])?"
    r"(?P<at>)value(?P<gap>)(?:\\{0,8}[\"'])?[ \t]{0,8}[=:][ \t]{0,8}",
    re.IGNORECASE,
)
_FIRST_OF_TUPLE = re.compile(r"\([bu]?\\{0,8}[\"']")
# A password may hold `@`, and many are written with a `/` that should have been escaped.
_IN_URL = re.compile(
    r"([a-z][a-z0-9+.-]{0,20}://)(?!\[redacted\])"
    r"(?:[^\s/\"']{1,1024}|[^\s/@:\"']{0,200}:(?!\d{1,5}\b)[^\s@\"']{1,256})(?=@)",
    re.IGNORECASE,
)
_IN_QUERY = re.compile(r"([?&](?:sig|code|x-amz-[a-z-]{1,40})=)(?!\[redacted\])[^&\s\"']{1,8192}")
_USER_AND_PASSWORD = re.compile(
    r"((?:^|\s)(?:-u[ =]?|--user[ =]|--proxy-user[ =])[\"']?[^\s:\"']{1,200}:)"
    r"(?!\[redacted\]|\d+\b)"
    r"[^\s\"']{1,1024}",
    re.MULTILINE,
)
_NETRC = re.compile(
    r"(\blogin\s{1,8}\S{1,200}\s{1,8}password\s{1,8})(?!\[redacted\])\S{1,1024}", re.IGNORECASE
)
_KNOWN = re.compile(
    r"\b()(?:hf_[A-Za-z0-9]{16,}|nvapi-[\w-]{16,}|sk-[\w-]{16,}|gh[opsur]_[A-Za-z0-9]{16,}"
    r"|github_pat_\w{16,}|glpat-[\w-]{16,}|xox[a-z]-[\w-]{10,}|A[KS]IA[0-9A-Z]{12,}"
    r"|npm_[A-Za-z0-9]{30,}|pypi-[\w-]{40,}|SG\.[\w-]{16,}\.[\w-]{16,}|ya29\.[\w-]{20,}"
    r"|[Bb]earer[ \t]{1,8}[\w.~+/-]{16,}=*"
    r"|hooks\.slack\.com/services/[\w/-]{10,}|AIza[\w-]{30,}|eyJ[\w-]{8,}\.[\w-]{8,}(?:\.[\w-]*)?)"
)
# `invalid token abc123...` in an error message: a word with letters and digits after the name.
_IN_PROSE = re.compile(
    r"(\b(?:token|password|passwd|secret)[ \t]{1,8})(?!\[redacted\])"
    r"(?=[A-Za-z0-9+/._~-]{0,200}[A-Za-z])(?=[A-Za-z0-9+/._~-]{0,200}\d)[A-Za-z0-9+/._~-]{8,}=*",
    re.IGNORECASE,
)
_KEY_BLOCK = re.compile(
    r"()-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----.*?"
    r"(?:-----END [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----|\Z)",
    re.DOTALL,
)
_KEY_END = re.compile(r"-----END [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----")
_KEY_LINE = re.compile(r"(?:^|[\s\"'])([A-Za-z0-9+/=]{1,128})\s{0,8}$")
_KEY_LINE_CHARS = 60
_HARMLESS = frozenset({"", "null", "none", "true", "false", "yes", "no"})


def redact(text: str) -> tuple[str, int]:
    """Return a text without its secrets, and how many there were.

    Text or lines that are JSON stay JSON.

    Args:
        text: The text.
    """
    found = _Redaction()
    if text.startswith(("{", "[")) and (whole := found.document(text)) is not None:
        return whole, found.count
    kept: list[str] = []
    others: list[str] = []  # lines that are no JSON; a value may go on from one to the next
    for line in [*found.blocks(text).split("\n"), None]:
        document = found.document(line) if line is not None and line.startswith("{") else None
        if document is None and line is not None:
            others.append(line)
            continue
        if others:
            kept.append(found.text("\n".join(others)))
            others.clear()
        if document is not None:
            kept.append(document)
    return "\n".join(kept), found.count


class _Redaction:
    """Counts the secrets that it takes away."""

    def __init__(self) -> None:
        self.count = 0

    def document(self, text: str) -> str | None:
        """Redact a JSON object or list; None when it is neither."""
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return None
        if not isinstance(value, (dict, list)):
            return None
        before = self.count
        kept = self.value(value)
        if self.count == before:
            return text
        return json.dumps(kept, separators=(",", ":")) + ("\n" if text.endswith("\n") else "")

    def value(self, value: object) -> object:
        """Redact a JSON value."""
        if isinstance(value, str):
            return self.text(self.blocks(value))
        if isinstance(value, dict):
            pair = value.get("name", value.get("key"))
            return {
                name: self.member(pair if name == "value" and isinstance(pair, str) else name, each)
                for name, each in value.items()
            }
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
        may_count = "tokens" in name.lower() or name.lower() == "pass"
        is_count = may_count and value.replace(".", "", 1).isdigit()
        if value.lower() in _HARMLESS or value == REDACTED or is_count:
            return False
        self.count += 1
        return True

    def blocks(self, text: str) -> str:
        text = self.replace(_KEY_BLOCK, text)
        return self.cut_off_keys(text) if _KEY_END.search(text) else text

    def cut_off_keys(self, text: str) -> str:
        """Redact what is left of keys whose first lines are not there."""
        kept: list[str] = []
        for line in text.split("\n"):
            ended, count = _KEY_END.subn(REDACTED, line)
            self.count += count
            least = 1  # only the last line of a key is short
            while count and kept and _key_bytes(kept[-1]) >= least:
                kept.pop()
                least = _KEY_LINE_CHARS
            kept.append(ended)
        return "\n".join(kept)

    def text(self, text: str) -> str:
        """Redact text of any number of lines that is no JSON."""
        for pattern in (_IN_URL, _USER_AND_PASSWORD, _NETRC):
            text = self.replace(pattern, text)
        for pattern in (_PAIR, _NAMED):
            text = self.named(pattern, text)
        for pattern in (_IN_QUERY, _IN_PROSE, _KNOWN):
            text = self.replace(pattern, text)
        return text

    def named(self, pattern: re.Pattern[str], text: str) -> str:
        """Redact the values of secret names."""
        kept: list[str] = []
        at = 0
        for match in pattern.finditer(text):
            name = match["name"]
            if match.start() < at or not is_secret_name(name):
                continue
            if match["gap"] and not name.startswith("-") and not _is_in_tuple(match):
                continue
            start, end = value_span(text, match.start("at"), match.end(), name.lower())
            if end > start and self.is_secret(name, text[start:end]):
                gap = " " if text[start - 1] == ":" and text[start] in "\r\n" else ""
                kept += [text[at:start], gap, REDACTED]
                at = end
        return "".join([*kept, text[at:]])

    def replace(self, pattern: re.Pattern[str], text: str) -> str:
        text, count = pattern.subn(rf"\g<1>{REDACTED}", text)
        self.count += count
        return text


def _is_in_tuple(match: re.Match[str]) -> bool:
    """Say whether a name and what follows are a pair, as headers are in a log: ``('a', 'b')``."""
    before = match.string[max(0, match.start() - 12) : match.start()]
    return "," in match["gap"] and any(
        each.end() == len(before) for each in _FIRST_OF_TUPLE.finditer(before)
    )


def _key_bytes(line: str) -> int:
    """Return how many characters at the end of a line may be of a key."""
    found = _KEY_LINE.search(line[-160:])
    return len(found[1]) if found else 0
