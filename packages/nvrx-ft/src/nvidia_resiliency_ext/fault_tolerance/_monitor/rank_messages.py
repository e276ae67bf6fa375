# SPDX-License-Identifier: Apache-2.0
"""Owns the messages between a rank and its monitor; it moves no bytes.

A rank never sends what happens in a step (that is in its slot), only what happens once in a
session. Apart from the launcher's messages, because every worker pays for loading this.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nvidia_resiliency_ext.shared_utils.wire import MessageSet

__all__ = [
    "RANK_MESSAGES",
    "Accepted",
    "Answer",
    "Ask",
    "FirstActivity",
    "HeldForSave",
    "Hello",
    "Refused",
    "SetTimeouts",
    "StepBegun",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """Rank to monitor: opens the session; a slot's descriptor comes with it after a reconnect.

    `pid` counts only where the kernel cannot tell it (another pid namespace).
    """

    rank: int
    pid: int
    num_warmup_iters: int | None = None
    dump_signal: int = 0
    hands_back_slot: bool = False


@dataclass(frozen=True, slots=True)
class Accepted:
    """Monitor to rank: the session is open; slot and dump pipe are attached, in this order."""

    session_id: int
    config: dict[str, Any]
    sections: list[str]


@dataclass(frozen=True, slots=True)
class Refused:
    """Monitor to rank: no session, and why."""

    reason: str


@dataclass(frozen=True, slots=True)
class SetTimeouts:
    """Rank to monitor: keys of the configuration that change for this rank; answered."""

    request: int
    config: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Ask:
    """Rank to monitor, only when calls are answered: look at my slot now; answered."""

    request: int


@dataclass(frozen=True, slots=True)
class HeldForSave:
    """Rank to monitor: waits in `should_checkpoint`; answered when it is agreed where to save."""

    request: int


@dataclass(frozen=True, slots=True)
class Answer:
    """Monitor to rank: the request was carried out, or why not."""

    request: int
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class FirstActivity:
    """Rank to monitor: first heartbeat or section of the session; not answered."""


@dataclass(frozen=True, slots=True)
class StepBegun:
    """Rank to monitor: first heartbeat or first finished step of the session; not answered."""

    t: float


RANK_MESSAGES = MessageSet(
    Hello,
    Accepted,
    Refused,
    SetTimeouts,
    Ask,
    HeldForSave,
    Answer,
    FirstActivity,
    StepBegun,
)
