# SPDX-License-Identifier: Apache-2.0
"""Take secrets out of text: values under secret names, and tokens of known forms. Pure.

It recognises common forms only. A text that must hold no secret at all is not to be sent.
"""

from __future__ import annotations

import json
import re
from functools import lru_cache

__all__ = ["REDACTED", "redact"]

REDACTED = "[redacted]"

_PARTS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|[0-9]+")
_SECRET_ENDS = (
    "token", "tokens", "secret", "secrets", "password", "passwords", "passwd", "passphrase", "pwd",
    "credential", "credentials", "authorization", "apikey", "cookie", "cookies", "webhook",
)  # fmt: skip
_SECRET_PARTS = frozenset({"auth", "bearer", "dsn", "sas", "signature", "pat"})
_KEYS = re.compile(r"(?:api|access|account|private|secret|encryption|signing)[_.-]?keys?(?![a-z])")


@lru_cache(maxsize=4096)  # a record has few names and very many lines
def is_secret_name(name: str) -> bool:
    """Say whether something of this name may be a secret."""
    parts = [part.lower() for part in _PARTS.findall(name)]
    return bool(parts) and (
        parts[-1] in {"key", "keys"}
        or not _SECRET_PARTS.isdisjoint(parts)
        or any(part.endswith(_SECRET_ENDS) for part in parts)
        or _KEYS.search("_".join(parts)) is not None
        # Not `forward_pass`: the word has other meanings where it is not a variable's.
        or parts == ["pass"]
        or (parts[-1] == "pass" and (name.isupper() or parts[-2] in {"db", "user", "smtp", "ssh"}))
    )


# A name and what may stand between it and its value. A blank is enough after `--name` only.
_NAMED = re.compile(
    r"(?<![A-Za-z0-9_.-])(?P<name>[A-Za-z0-9_.-]{1,200})"
    r"(?:(?:\\{0,8}[\"'])?[ \t]{0,8}(?:=>|[=:])[ \t]{0,8}"
    r"|(?P<blank>(?:\\{0,8}[\"'])?,?[ \t]{1,8}))"
)
# Before it may stand what `b'...'` and `SecretStr('...')` begin with.
_QUOTE = re.compile(r"(?:[A-Za-z_][\w.]{0,60}\(|[bBuU])?(\\{0,8}(?:\"{3}|'{3}|[\"']))")
_BARE = re.compile(
    r"(?:(?:bearer|basic|digest|token)[ \t]+(?=\S))?(?:\[redacted\]|[^\s\"'\\,;&)}\]]{1,8192})",
    re.IGNORECASE,
)
_UP_TO_QUOTE, _REST_OF_LINE = re.compile(r"[^\n\"']*"), re.compile(r".*")
_LONGEST_QUOTED = 8192
_FIRST_ON_LINE = re.compile(r"(?P<indent>[ \t]*(?:-[ \t]+)*)(?:export[ \t]+)?[\"']?")
_HARMLESS = frozenset({"", "null", "none", "true", "false", "yes", "no"})

# The first group stays. A password may hold `@`, or a `/` that should have been escaped.
_FORMS = (
    re.compile(
        r"([a-z][a-z0-9+.-]{0,20}://)(?!\[redacted\])"
        r"(?:[^\s/\"']{1,1024}|[^\s/@:\"']{0,200}:(?!\d{1,5}\b)[^\s@\"']{1,256})(?=@)",
        re.IGNORECASE,
    ),
    re.compile(
        r"([?&](?:sig|code|x-amz-[a-z-]{1,40})=)(?!\[redacted\])[^&\s\"']{1,8192}", re.IGNORECASE
    ),
    re.compile(
        r"((?:^|\s)(?:-u[ =]?|--user[ =]|--proxy-user[ =])[\"']?[^\s:\"']{1,200}:)"
        r"(?!\[redacted\]|\d+\b)[^\s\"']{1,1024}",
        re.MULTILINE,
    ),
    # As in Kubernetes' `name: HF_TOKEN`, `value: ...`, and headers in a log: ('x-api-key', '...').
    re.compile(
        r"(\b(?:name|key)[\"']?[ \t]{0,8}[=:][ \t]{0,8}[\"']?"
        r"[\w.-]{0,200}(?:token|secret|password|credentials?|key)[\"']?,?\s{1,80}[\"']?"
        r"value[\"']?[ \t]{0,8}[=:][ \t]{0,8}[\"']?)(?!\[redacted\])[^\s\"']{1,8192}",
        re.IGNORECASE,
    ),
    re.compile(
        r"(\([bu]?[\"'](?:authorization|cookie|[\w-]{0,200}(?:token|key|secret))[\"'],[ \t]{0,8}"
        r"[bu]?[\"'])(?!\[redacted\])[^\"'\n]{1,8192}",
        re.IGNORECASE,
    ),
    re.compile(
        r"\b()(?:hf_[A-Za-z0-9]{16,}|nvapi-[\w-]{16,}|sk-[\w-]{16,}|gh[opsur]_[A-Za-z0-9]{16,}"
        r"|github_pat_\w{16,}|glpat-[\w-]{16,}|xox[a-z]-[\w-]{10,}|A[KS]IA[0-9A-Z]{12,}"
        r"|npm_[A-Za-z0-9]{30,}|pypi-[\w-]{40,}|SG\.[\w-]{16,}\.[\w-]{16,}|ya29\.[\w-]{20,}"
        r"|[Bb]earer[ \t]{1,8}[\w.~+/-]{16,}=*|hooks\.slack\.com/services/[\w/-]{10,}"
        r"|AIza[\w-]{30,}|eyJ[\w-]{8,}\.[\w-]{8,}(?:\.[\w-]*)?)"
    ),
    # `invalid token abc123...` in an error message: letters and digits after the name.
    re.compile(
        r"(\b(?:token|password|passwd|secret)[ \t]{1,8})(?!\[redacted\])"
        r"(?=[\w+/.~-]{0,200}[A-Za-z])(?=[\w+/.~-]{0,200}\d)[\w+/.~-]{8,}=*",
        re.IGNORECASE,
    ),
)
_KEY_BLOCK = re.compile(
    r"()-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----.*?"
    r"(?:-----END [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----|\Z)",
    re.DOTALL,
)


def redact(text: str) -> tuple[str, int]:
    """Return a text without the secrets that are recognised, and how many there were.

    Text or lines that are JSON stay JSON.

    Args:
        text: The text.
    """
    found = _Redaction()
    if text.startswith(("{", "[")) and (whole := found.document(text)) is not None:
        return whole, found.count
    kept: list[str] = []
    others: list[str] = []  # lines that are no JSON; a value may go on from one to the next
    for line in [*found.replace(_KEY_BLOCK, text).split("\n"), None]:
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

    def value(self, value: object, name: str = "") -> object:
        """Redact a JSON value; all that lies within one of a secret name is secret."""
        is_secret = is_secret_name(name)
        if isinstance(value, dict):
            pair = str(value.get("name", ""))  # {"name": "HF_TOKEN", "value": "..."}
            names = {key: pair if key == "value" and pair else key for key in value}
            return {k: self.value(v, name if is_secret else names[k]) for k, v in value.items()}
        if isinstance(value, list):
            flags = ["", *(each if _is_flag(each) else "" for each in value)]
            pairs = zip(value, flags, strict=False)
            return [self.value(each, name if is_secret else flag) for each, flag in pairs]
        if is_secret and value is not None and not isinstance(value, bool):
            return REDACTED if self.is_secret(name, str(value)) else value
        return self.text(self.replace(_KEY_BLOCK, value)) if isinstance(value, str) else value

    def is_secret(self, name: str, value: str) -> bool:
        """Say whether the value of a secret name is one, and count it."""
        may_count = "tokens" in name.lower() or name.lower() == "pass"
        is_count = may_count and value.replace(".", "", 1).isdigit()
        if value.lower() in _HARMLESS or value == REDACTED or is_count:
            return False
        self.count += 1
        return True

    def text(self, text: str) -> str:
        """Redact text of any number of lines that is no JSON."""
        for form in _FORMS[:5]:
            text = self.replace(form, text)
        kept: list[str] = []
        at = 0
        for match in _NAMED.finditer(text):
            name = match["name"]
            is_before = match.start() < at or (match["blank"] and not name.startswith("-"))
            if is_before or not is_secret_name(name):
                continue
            start, end = _value_span(text, match)
            if end > start and self.is_secret(name, text[start:end]):
                gap = " " if text[start - 1] == ":" and text[start] in "\r\n" else ""
                kept += [text[at:start], gap, REDACTED]
                at = end
        text = "".join([*kept, text[at:]])
        for form in _FORMS[5:]:
            text = self.replace(form, text)
        return text

    def replace(self, pattern: re.Pattern[str], text: str) -> str:
        text, count = pattern.subn(rf"\g<1>{REDACTED}", text)
        self.count += count
        return text


def _is_flag(value: object) -> bool:
    return isinstance(value, str) and value.startswith("-") and "=" not in value


def _value_span(text: str, match: re.Match[str]) -> tuple[int, int]:
    """Return where the value of a name begins and ends: on its line, and in indented lines."""
    start = match.end()
    first = text[start : start + 1]
    quote = _QUOTE.match(text, start)
    if quote is not None:
        start = quote.end()
        end = _end_of_quoted(text, quote[1], start)
    else:
        pattern = _BARE
        if match["name"].lower() in {"cookie", "authorization"}:
            pattern = _UP_TO_QUOTE
        elif first in "{[(|>" and not text.startswith(REDACTED, start):
            pattern = _REST_OF_LINE
        found = pattern.match(text, start)
        end = found.end() if found else start
    return start, max(end, _end_of_block(text, match.start(), match.end()))


def _end_of_quoted(text: str, quote: str, start: int) -> int:
    """Return where the quote closes; without an end in sight, all of the line is quoted."""
    # A backslash more than the opening quote had, and a doubled quote, are part of the value.
    twice = r"(?!'\w)(?<!\w'')" if quote == "'" else ""
    closing = re.compile(rf"(?<!\\){re.escape(quote)}{twice}")
    found = closing.search(text, start, start + _LONGEST_QUOTED)
    return found.start() if found else _line_end(text, start)


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
