# SPDX-License-Identifier: Apache-2.0
"""Owns the four timeout rules and the time of the next look; reads nothing and signals nobody.

Rules, evaluated only while a session is open (a timeout of None never expires):

1. `initial_heartbeat`: no heartbeat yet since the session began;
2. `heartbeat`: the last heartbeat is too old;
3. `section`: an open section is too old; each one is judged on its own. During the first
   iterations a timeout named `warmup` stands in for the one of `step`;
4. `out_of_section`: no section open for too long. Off while section timeouts are configured, none
   is called `warmup`, and `step` was not opened yet: start-up is then not limited.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .slot import STEP

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from .slot import SlotView


WARMUP = "warmup"
MIN_SLEEP_S = 0.01
"""Shortest pause between two looks, so that a timeout of zero cannot spin the monitor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """The limits in force for one rank, in seconds; None means no limit."""

    initial_heartbeat_s: float | None
    heartbeat_s: float | None
    sections_s: Mapping[str, float | None]
    out_of_section_s: float | None
    num_warmup_iterations: int

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Timeouts:
        """Take the limits out of a configuration in its plain form."""
        return cls(
            initial_heartbeat_s=config["initial_rank_heartbeat_timeout"],
            heartbeat_s=config["rank_heartbeat_timeout"],
            sections_s=dict(config["rank_section_timeouts"]),
            out_of_section_s=config["rank_out_of_section_timeout"],
            num_warmup_iterations=int(config["num_warmup_iterations"]),
        )

    def smallest(self) -> float | None:
        """The shortest limit of all, or None when there is none."""
        limits = [self.initial_heartbeat_s, self.heartbeat_s, self.out_of_section_s]
        limits.extend(self.sections_s.values())
        return min((limit for limit in limits if limit is not None), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A rule that a rank broke, and since when; `reason` is what a health check said."""

    rule: str
    section: str | None
    since: float
    limit_s: float
    iteration: int | None
    reason: str = ""

    @property
    def deadline(self) -> float:
        """When the rule was broken, on the monotonic clock."""
        return self.since + self.limit_s


def evaluate(
    view: SlotView, timeouts: Timeouts, session_start: float, now: float
) -> Verdict | None:
    """Return the rule whose deadline passed first, or None while the rank keeps all of them."""
    broken = [v for v in _running(view, timeouts, session_start) if now > v.deadline]
    return min(broken, key=lambda v: v.deadline, default=None)


def next_look(
    view: SlotView, timeouts: Timeouts, session_start: float, now: float, longest_s: float
) -> float:
    """Return when to look again at the latest, on the monotonic clock.

    That is the earliest deadline known now, and no later than the shortest limit from now: what
    the rank begins after this look cannot expire before.
    """
    shortest = timeouts.smallest()
    at = now + (longest_s if shortest is None else min(longest_s, shortest))
    for running in _running(view, timeouts, session_start):
        at = min(at, running.deadline)
    return max(at, now + MIN_SLEEP_S)


def _running(view: SlotView, timeouts: Timeouts, session_start: float) -> Iterator[Verdict]:
    """Yield every limit that is running now, as the verdict it will be when it expires."""
    start = view.session_start or session_start

    def running(rule: str, since: float, limit_s: float, section: str | None = None) -> Verdict:
        return Verdict(
            rule=rule, section=section, since=since, limit_s=limit_s, iteration=view.iteration
        )

    if view.heartbeat_last is None:
        if timeouts.initial_heartbeat_s is not None:
            yield running("initial_heartbeat", start, timeouts.initial_heartbeat_s)
    elif timeouts.heartbeat_s is not None:
        yield running("heartbeat", view.heartbeat_last, timeouts.heartbeat_s)
    for section, since in view.open_sections.items():
        limit_s = timeouts.sections_s.get(section)
        if section == STEP and _is_warming_up(view, timeouts):
            limit_s = timeouts.sections_s[WARMUP]
        if limit_s is not None:
            yield running("section", since, limit_s, section)
    if (
        timeouts.out_of_section_s is not None
        and not view.open_sections
        and _limits_outside(view, timeouts)
    ):
        since = view.out_of_section_since or start
        yield running("out_of_section", since, timeouts.out_of_section_s)


def _is_warming_up(view: SlotView, timeouts: Timeouts) -> bool:
    if WARMUP not in timeouts.sections_s or view.iteration is None or view.first_iteration is None:
        return False
    return view.iteration - view.first_iteration < timeouts.num_warmup_iterations


def _limits_outside(view: SlotView, timeouts: Timeouts) -> bool:
    starts_free = bool(timeouts.sections_s) and WARMUP not in timeouts.sections_s
    return not starts_free or view.step_first_open is not None
