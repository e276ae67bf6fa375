# SPDX-License-Identifier: Apache-2.0
"""What all launchers of a job have in common: settings, rules and the time of day. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from nvidia_resiliency_ext.shared_utils.errors import ConfigError

from .coordinator import CoordinatorRules
from .placement import PlacementRules, few
from .records import ForeignValueError
from .restarts import BlameRules, Budget

_HOST = "host"


def write_settings(host: str, settings: Mapping[str, str]) -> str:
    return json.dumps({_HOST: host, **settings})


def read_settings(text: str) -> dict[str, str]:
    """Parse the text of `write_settings`. Raises ForeignValueError: the text is anything else."""
    try:
        settings = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ForeignValueError(f"not settings: {error}") from None
    if not isinstance(settings, dict) or not all(type(v) is str for v in settings.values()):
        raise ForeignValueError("not settings")
    return settings


def differences(own: Mapping[str, str], host: str, theirs: Mapping[str, str]) -> list[str]:
    """Return a sentence for each flag with another value on `host` than where `theirs` are from."""
    other = theirs.get(_HOST, "another host")
    return [
        f"{flag} is {value} on {host} and {theirs[flag]} on {other}"
        for flag, value in sorted(own.items())
        if flag in theirs and theirs[flag] != value
    ]


NNODES = "--nnodes"
MAX_RESTARTS = "--max-restarts"
POLICY = "--ft-restart-policy"
IMPLEMENTATION = "--ft-rdzv-impl"
LEASE = "--ft-lease"
WINDOW = "--ft-restart-budget-window"
BLAME_LIMIT = "--ft-node-blame-limit"
BLAME_WINDOW = "--ft-node-blame-window"
SEGMENT = "--ft-segment"
GROUP_SIZE = "rdzv_conf replacement_group_size"
LAST_CALL = "rdzv_conf last_call_timeout"
MULTI_LAUNCHERS = "NVRX_ENABLE_MULTI_LAUNCHERS_PER_NODE"
USE_INFRA_RANK = "--ft-use-infra-group-rank"
JOB_ARRAY = "a Slurm job array"
MIN_HEALTHY = "min-healthy"
LEGACY = "legacy"
NONE = "None"


def settings_of(rules: CoordinatorRules) -> dict[str, str]:
    placement = rules.placement
    return {
        NNODES: f"{placement.min_nodes}:{placement.max_nodes}",
        MAX_RESTARTS: str(rules.budget.max_restarts),
        POLICY: MIN_HEALTHY if rules.min_healthy else "any-failed",
        IMPLEMENTATION: LEGACY if placement.elastic and not rules.min_healthy else "barrier",
        LEASE: str(rules.lease_s),
        WINDOW: str(rules.budget.window_s),
        BLAME_LIMIT: str(rules.blame.limit),
        BLAME_WINDOW: str(rules.blame.window_s),
        SEGMENT: str(placement.segment),
        GROUP_SIZE: str(placement.group_size),
        LAST_CALL: str(rules.last_call_s),
        MULTI_LAUNCHERS: str(not placement.one_launcher_per_addr),
        USE_INFRA_RANK: str(placement.use_infra_rank),
        JOB_ARRAY: str(not rules.counts_unhealthy),
    }


def rules_from_settings(settings: Mapping[str, str]) -> CoordinatorRules:
    """Return the rules that `settings_of` wrote. Raises ConfigError: they are no such rules."""
    try:
        least, most = settings[NNODES].split(":")
        placement = PlacementRules(
            min_nodes=int(least),
            max_nodes=int(most),
            segment=_whole(settings[SEGMENT]),
            group_size=_whole(settings[GROUP_SIZE]),
            one_launcher_per_addr=settings[MULTI_LAUNCHERS] != "True",
            elastic=is_elastic(settings[POLICY], settings[IMPLEMENTATION]),
            use_infra_rank=settings[USE_INFRA_RANK] == "True",
        )
        return CoordinatorRules(
            placement=placement,
            budget=Budget(int(settings[MAX_RESTARTS]), _seconds(settings[WINDOW])),
            blame=BlameRules(int(settings[BLAME_LIMIT]), float(settings[BLAME_WINDOW])),
            lease_s=float(settings[LEASE]),
            last_call_s=float(settings[LAST_CALL]),
            min_healthy=settings[POLICY] == MIN_HEALTHY,
            counts_unhealthy=settings[JOB_ARRAY] != "True",
        )
    except (KeyError, ValueError) as error:
        raise ConfigError(f"the launchers' settings are unusable: {error}") from None


def is_elastic(policy: str, implementation: str) -> bool:
    """Return whether all nodes up to the largest number work, and not just as many as needed."""
    return implementation == LEGACY or policy == MIN_HEALTHY


def _whole(text: str) -> int | None:
    return None if text == NONE else int(text)


def _seconds(text: str) -> float | None:
    return None if text == NONE else float(text)


# Beyond what a slow store or a busy node adds between stamping an arrival and writing it.
TOLERANCE_S = 5.0
MAX_SHOWN = 5
_Name = TypeVar("_Name", str, int)


@dataclass(frozen=True, slots=True)
class Reading:
    """Offset of a clock from the reader's: `ahead_s`, plus or minus `give_or_take_s`."""

    ahead_s: float
    give_or_take_s: float = 0.0


def read(stamp: float, not_before: float, not_after: float) -> Reading:
    """Return a clock's offset by a stamp that was written between two moments of the own clock."""
    return Reading(
        ahead_s=stamp - (not_before + not_after) / 2, give_or_take_s=(not_after - not_before) / 2
    )


def off_by(
    readings: Mapping[_Name, Reading], tolerance_s: float = TOLERANCE_S
) -> dict[_Name, float]:
    """Return by name how far clocks are ahead (below 0: behind) of those that agree."""
    ordered = sorted(reading.ahead_s for reading in readings.values())
    agreeing, right_s, first = 0, 0.0, 0
    # The longest run within the tolerance is right; of two as long, the nearer to our own clock.
    for last, ahead_s in enumerate(ordered):
        while ahead_s - ordered[first] > tolerance_s:
            first += 1
        count, middle_s = last - first + 1, ordered[(first + last) // 2]
        if (count, -abs(middle_s)) > (agreeing, -abs(right_s)):
            agreeing, right_s = count, middle_s
    return {
        name: reading.ahead_s - right_s
        for name, reading in readings.items()
        if abs(reading.ahead_s - right_s) - reading.give_or_take_s > tolerance_s
    }


def sentence(off: Iterable[tuple[str, float]]) -> str:
    """Return whose clock is off, as a line for people; empty when nobody's is."""
    worst = sorted(off, key=lambda item: (-abs(item[1]), item[0]))
    if not worst:
        return ""
    offsets = [
        f"{name} is {abs(off_s):.1f} s {'ahead' if off_s > 0 else 'behind'}"
        for name, off_s in worst
    ]
    shown = few(offsets, MAX_SHOWN)
    return f"clocks are off, by the others' time: {shown}; synchronise them"
