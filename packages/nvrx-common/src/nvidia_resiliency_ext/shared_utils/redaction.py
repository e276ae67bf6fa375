# SPDX-License-Identifier: Apache-2.0
"""Take secrets out of text: values under secret names, and tokens of known forms. Pure.

It recognises common forms only. A text that must hold no secret at all is not to be sent.
"""

from __future__ import annotations

import json
import re
from functools import lru_cache

__all__ = ["REDACTED", "redact"]

_PARTS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|[0-9]+")
_SECRET_ENDS = (
    "token", "tokens", "secret", "secrets", "password", "passwords", "passwd", "passphrase", "pwd",
    "credential", "credentials", "authorization", "apikey", "cookie", "cookies", "webhook",
)  # fmt: skip
_SECRET_PARTS = frozenset({"auth", "bearer", "dsn", "sas", "signature", "pat"})
_WITH_PASS = frozenset(
    {"admin", "db", "http", "mail", "mysql", "pg", "proxy", "redis", "smtp", "ssh", "user"}
)
_SECRET_LAST = frozenset({"key", "keys"})
_KEYS = re.compile(r"(?:api|access|account|private|secret|encryption|signing)[_.-]?keys?(?![a-z])")


@lru_cache(maxsize=4096)  # a record has few names and very many lines
def is_secret_name(name: str) -> bool:
    """Return whether a value of this name may be a secret."""
    parts = [part.lower() for part in _PARTS.findall(name)]
    return bool(parts) and (
        parts[-1] in _SECRET_LAST
        or not _SECRET_PARTS.isdisjoint(parts)
        or any(part.endswith(_SECRET_ENDS) for part in parts)
        or _KEYS.search("_".join(parts)) is not None
        # Not `forward_pass`: the word has other meanings where it is not a variable's.
        or parts == ["pass"]
        or (parts[-1] == "pass" and (name.isupper() or parts[-2] in _WITH_PASS))
    )


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
    """Return where the value behind ``name``, in small letters, begins and ends, quotes aside."""
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
        begin = quote.end()
        end = _closing(text, quote[0], begin, begin + _LONGEST)
        if end is None or text.count("\n", begin, end) > _QUOTED_LINES:
            # Without an end in sight, all of the line is quoted.
            end = min(line_end, begin + _LONGEST)
        return begin, end
    if name in _WHOLE_LINE:
        ends = [at for at in (text.find(char, start, line_end) for char in "\"'") if at >= 0]
        return start, min([*ends, line_end])
    if text.startswith(("{", "[", "("), start) and not text.startswith("[redacted]", start):
        return start, _end_of_bracket(text, start) or line_end
    scheme = _SCHEME.match(text, start)
    bare = _BARE.match(text, scheme.end() if scheme else start)
    return start, bare.end() if bare else start


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
    """Return `text` without the secrets that are recognised, and how many there were.

    Text or lines that are JSON stay JSON.

    Example:
        >>> redact("HF_TOKEN=hunter2 lr=0.1")
        ('HF_TOKEN=[redacted] lr=0.1', 1)
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
        """Redact a named value; all values within a secret one are secret."""
        if not is_secret_name(name) or value is None or isinstance(value, bool):
            return self.value(value)
        if isinstance(value, dict):
            return {inner: self.member(name, each) for inner, each in value.items()}
        if isinstance(value, list):
            return [self.member(name, each) for each in value]
        return REDACTED if self.is_secret(name, str(value)) else value

    def is_secret(self, name: str, value: str) -> bool:
        """Return whether the value of a secret name is one, and count it."""
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
        """Redact the remaining lines of keys whose first lines are missing."""
        kept: list[str] = []
        for line in text.split("\n"):
            ended, count = _KEY_END.subn(REDACTED, line)
            self.count += count
            least = 1  # only the last line of a key is short
            while count and kept:
                key = _KEY_LINE.search(kept[-1][-160:])
                if key is None or len(key[1]) < least:
                    break
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
