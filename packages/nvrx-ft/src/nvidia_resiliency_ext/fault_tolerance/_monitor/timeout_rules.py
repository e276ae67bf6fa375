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

import math
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .slot import STEP

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, MutableMapping

    from .slot import SlotView


WARMUP = "warmup"
MIN_SLEEP_S = 0.01
"""Shortest pause between two looks, so that a timeout of zero cannot spin the monitor."""
_SECTIONS = "rank_section_timeouts"
_PLAIN_LIMITS = frozenset(
    {"initial_rank_heartbeat_timeout", "rank_heartbeat_timeout", "rank_out_of_section_timeout"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What the configuration says about judging and killing one rank; a limit of None is none."""

    initial_heartbeat_s: float | None
    heartbeat_s: float | None
    sections_s: Mapping[str, float | None]
    out_of_section_s: float | None
    num_warmup_iterations: int
    longest_pause_s: float
    evidence_timeout_s: float
    termination_signal: int

    @classmethod
    def from_config(cls, config: Mapping[str, Any], num_warmup_iters: int | None = None) -> Policy:
        """Take a configuration in its plain form; a rank may give its own warm-up iterations."""
        if num_warmup_iters is None:
            num_warmup_iters = config["num_warmup_iterations"]
        sig = config["rank_termination_signal"]
        return cls(
            initial_heartbeat_s=config["initial_rank_heartbeat_timeout"],
            heartbeat_s=config["rank_heartbeat_timeout"],
            sections_s=dict(config[_SECTIONS]),
            out_of_section_s=config["rank_out_of_section_timeout"],
            num_warmup_iterations=int(num_warmup_iters),
            longest_pause_s=float(config["workload_check_interval"]),
            evidence_timeout_s=float(config["hang_evidence_timeout"]),
            termination_signal=signal.Signals[sig].value if isinstance(sig, str) else int(sig),
        )

    def longest_sleep_s(self) -> float:
        """Return the shortest limit, or `longest_pause_s`: nothing begun now expires before."""
        limits = (self.initial_heartbeat_s, self.heartbeat_s, self.out_of_section_s)
        given = [limit for limit in (*limits, *self.sections_s.values()) if limit is not None]
        return min((self.longest_pause_s, *given))


def change_limits(config: MutableMapping[str, Any], changes: Mapping[str, Any]) -> str | None:
    """Change timeouts of a configuration in place, or return what is wrong with them.

    A section that is not in `config` has no word in the slot and is passed over.
    """
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
    limits = dict(config[_SECTIONS])
    limits.update({name: value for name, value in sections.items() if name in limits})
    config.update(plain)
    config[_SECTIONS] = limits
    return None


def _is_limit(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value is None
    return math.isfinite(value) and value >= 0


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

    def is_same(self, other: Verdict) -> bool:
        """Return whether nothing has changed since `other`."""
        mine = (self.rule, self.section, self.since)
        return mine == (other.rule, other.section, other.since)


def evaluate(view: SlotView, policy: Policy, session_start: float, now: float) -> Verdict | None:
    """Return the rule whose deadline passed first, or None while the rank keeps all of them."""
    broken = [v for v in _running(view, policy, session_start) if now > v.deadline]
    return min(broken, key=lambda v: v.deadline, default=None)


def next_look(view: SlotView, policy: Policy, session_start: float, now: float) -> float:
    """Return when to look again at the latest (monotonic s): at the earliest deadline known now."""
    deadlines = [running.deadline for running in _running(view, policy, session_start)]
    return max(min((now + policy.longest_sleep_s(), *deadlines)), now + MIN_SLEEP_S)


def _running(view: SlotView, policy: Policy, session_start: float) -> Iterator[Verdict]:
    """Yield every limit that is running now, as the verdict it will be when it expires."""
    start = view.session_start or session_start

    def running(rule: str, since: float, limit_s: float, section: str | None = None) -> Verdict:
        return Verdict(
            rule=rule, section=section, since=since, limit_s=limit_s, iteration=view.iteration
        )

    if view.heartbeat_last is None:
        if policy.initial_heartbeat_s is not None:
            yield running("initial_heartbeat", start, policy.initial_heartbeat_s)
    elif policy.heartbeat_s is not None:
        yield running("heartbeat", view.heartbeat_last, policy.heartbeat_s)
    for section, since in view.open_sections.items():
        limit_s = policy.sections_s.get(section)
        if section == STEP and _is_warming_up(view, policy):
            limit_s = policy.sections_s[WARMUP]
        if limit_s is not None:
            yield running("section", since, limit_s, section)
    if (
        policy.out_of_section_s is not None
        and not view.open_sections
        and _limits_outside(view, policy)
    ):
        since = view.out_of_section_since or start
        yield running("out_of_section", since, policy.out_of_section_s)


def _is_warming_up(view: SlotView, policy: Policy) -> bool:
    if WARMUP not in policy.sections_s or view.iteration is None or view.first_iteration is None:
        return False
    return view.iteration - view.first_iteration < policy.num_warmup_iterations


def _limits_outside(view: SlotView, policy: Policy) -> bool:
    starts_free = bool(policy.sections_s) and WARMUP not in policy.sections_s
    return not starts_free or view.step_first_open is not None
