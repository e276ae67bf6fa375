# SPDX-License-Identifier: Apache-2.0
"""What the end of a call means for the next one; a table, no effects."""

from __future__ import annotations

import enum
from typing import NamedTuple

__all__ = ["Outcome", "Verdict", "judge"]


class Verdict(enum.Enum):
    """What to do next."""

    RETRY = "retry"
    """The server is away or went away."""
    FALL_BACK = "fall back"
    """The server does not know acknowledged streams."""
    RETRY_SLOWLY = "retry slowly"
    """Nothing helps but a person: a wrong token, or something that is no log server."""
    REFUSED = "refused"
    """The server will never take this target."""


class Outcome(NamedTuple):
    """How a call ended: the name of the gRPC status and what the server said."""

    code: str
    details: str

    def __str__(self) -> str:
        text = " ".join(self.details.split())[:300]
        return f"{self.code}: {text}" if text else self.code


def judge(outcome: Outcome, *, is_plain: bool) -> Verdict:
    """Return what to do after a call that ended like this.

    Args:
        outcome: Its status.
        is_plain: It was a stream without acknowledgements.
    """
    if outcome.code == "UNIMPLEMENTED":
        return Verdict.RETRY_SLOWLY if is_plain else Verdict.FALL_BACK
    if outcome.code in {"UNAUTHENTICATED", "PERMISSION_DENIED"}:
        return Verdict.RETRY_SLOWLY
    if outcome.code == "INVALID_ARGUMENT":
        return Verdict.REFUSED
    return Verdict.RETRY
