# SPDX-License-Identifier: Apache-2.0
"""What all launchers of a job must be started with alike, and the rules they share. Pure.

So a control plane needs no flags of its own for them, and a launcher with other rules is noticed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from nvidia_resiliency_ext.shared_utils.errors import ConfigError

from .budget import Budget
from .host import HostRules
from .placement import PlacementRules, validate
from .records import ForeignValueError
from .reputation import BlameRules

_HOST = "host"


def write_settings(host: str, settings: Mapping[str, str]) -> str:
    """Return settings, by flag, of the launcher on `host` as one text."""
    return json.dumps({_HOST: host, **settings})


def read_settings(text: str) -> dict[str, str]:
    """Return what `write_settings` wrote.

    Raises:
        ForeignValueError: it is anything else.
    """
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


def settings_of(rules: HostRules, policy: str, implementation: str) -> dict[str, str]:
    """Return the rules as settings, by flag."""
    placement = rules.placement
    return {
        NNODES: f"{placement.min_nodes}:{placement.max_nodes}",
        MAX_RESTARTS: str(rules.budget.max_restarts),
        POLICY: policy,
        IMPLEMENTATION: implementation,
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


def rules_from_settings(settings: Mapping[str, str]) -> HostRules:
    """Return the rules that `settings_of` wrote.

    Raises:
        ConfigError: they are no such rules.
    """
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
        validate(placement)
        return HostRules(
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
