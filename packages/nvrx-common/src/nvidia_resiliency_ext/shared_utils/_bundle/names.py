# SPDX-License-Identifier: Apache-2.0
"""Owns which names say that what they name is secret; pure."""

from __future__ import annotations

import re
from functools import lru_cache

__all__ = ["is_secret_name"]

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
    """Say whether something of this name may be a secret."""
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
