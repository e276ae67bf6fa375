# SPDX-License-Identifier: Apache-2.0
"""The four timeout rules and the time of the next look. Pure.

Limits are those of a configuration in its plain form; one of None never expires. Rules, evaluated
only while a session is open:

1. `initial_heartbeat`: no heartbeat yet since the session began;
2. `heartbeat`: the last heartbeat is too old;
3. `section`: an open section is too old; each one is evaluated on its own. During the first
   iterations a timeout named `warmup` stands in for the one of `step`;
4. `out_of_section`: no section open for too long. Off while section timeouts are configured, none
   is called `warmup`, and `step` was not opened yet: start-up is then not limited.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

from .slot import STEP, SlotView

WARMUP = "warmup"
MIN_SLEEP_S = 0.01  # So that a timeout of zero cannot spin the monitor.
_INITIAL = "initial_rank_heartbeat_timeout"
_HEARTBEAT = "rank_heartbeat_timeout"
_SECTIONS = "rank_section_timeouts"
_OUTSIDE = "rank_out_of_section_timeout"
_PLAIN_LIMITS = frozenset({_INITIAL, _HEARTBEAT, _OUTSIDE})


def change_limits(config: MutableMapping[str, Any], changes: Mapping[str, Any]) -> str | None:
    """Change timeouts of a configuration in place, or return the problem of `changes`."""
    plain = dict(changes)
    sections = plain.pop(_SECTIONS, None) or {}
    unknown = sorted(plain.keys() - _PLAIN_LIMITS)
    if unknown:
        return f"these are not limits: {', '.join(unknown)}"
    if not isinstance(sections, dict):
        return f"{_SECTIONS} must be a mapping"
    for name, value in (*plain.items(), *sections.items()):
        if not _is_limit(value):
            return f"{name}: {value!r} is no number of seconds"
    limits = config[_SECTIONS]
    config.update(plain)
    # A section that is not in `config` has no word in the slot.
    config[_SECTIONS] = {name: sections.get(name, limit_s) for name, limit_s in limits.items()}
    return None


def _is_limit(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value is None
    return math.isfinite(value) and value >= 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A rule that a rank broke, and since when; `reason` is that of a health check."""

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

    def is_same(self, other: Verdict) -> bool:
        mine = (self.rule, self.section, self.since)
        return mine == (other.rule, other.section, other.since)


def evaluate(
    view: SlotView, limits: Mapping[str, Any], session_start: float, now: float
) -> Verdict | None:
    """Return the rule whose deadline passed first, or None while the rank keeps all of them."""
    broken = [v for v in _running(view, limits, session_start) if now > v.deadline]
    return min(broken, key=lambda v: v.deadline, default=None)


def next_look(view: SlotView, limits: Mapping[str, Any], session_start: float, now: float) -> float:
    """Return when to look again (monotonic s): at the next deadline, also of what may begin now."""
    deadlines = [running.deadline for running in _running(view, limits, session_start)]
    lengths = (*(limits[name] for name in _PLAIN_LIMITS), *limits[_SECTIONS].values())
    given = [length_s for length_s in lengths if length_s is not None]
    longest_sleep_s: float = min((limits["workload_check_interval"], *given))
    return max(min((now + longest_sleep_s, *deadlines)), now + MIN_SLEEP_S)


def _running(view: SlotView, limits: Mapping[str, Any], session_start: float) -> Iterator[Verdict]:
    """Yield a verdict for every running limit, as it will hold when that limit expires."""
    start = view.session_start or session_start
    sections_s = limits[_SECTIONS]

    def running(rule: str, since: float, limit_s: float, section: str | None = None) -> Verdict:
        return Verdict(
            rule=rule, section=section, since=since, limit_s=limit_s, iteration=view.iteration
        )

    if view.heartbeat_last is None:
        if limits[_INITIAL] is not None:
            yield running("initial_heartbeat", start, limits[_INITIAL])
    elif limits[_HEARTBEAT] is not None:
        yield running("heartbeat", view.heartbeat_last, limits[_HEARTBEAT])
    for section, since in view.open_sections.items():
        limit_s = sections_s.get(section)
        if section == STEP and _is_warming_up(view, limits):
            limit_s = sections_s[WARMUP]
        if limit_s is not None:
            yield running("section", since, limit_s, section)
    starts_free = bool(sections_s) and WARMUP not in sections_s and view.step_first_open is None
    if limits[_OUTSIDE] is not None and not view.open_sections and not starts_free:
        since = view.out_of_section_since or start
        yield running("out_of_section", since, limits[_OUTSIDE])


def _is_warming_up(view: SlotView, limits: Mapping[str, Any]) -> bool:
    if WARMUP not in limits[_SECTIONS] or view.iteration is None or view.first_iteration is None:
        return False
    num_iterations: int = limits["num_warmup_iterations"]
    return view.iteration - view.first_iteration < num_iterations
