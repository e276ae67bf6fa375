# SPDX-License-Identifier: Apache-2.0
"""Owns how a configuration in its plain form becomes, and changes, a session's policy."""

from __future__ import annotations

import math
import signal
from typing import TYPE_CHECKING, Any

from .session import Policy
from .timeout_rules import Timeouts

if TYPE_CHECKING:
    from collections.abc import Mapping, MutableMapping

__all__ = ["change_limits", "policy_of"]

_PLAIN_LIMITS = frozenset(
    {
        "initial_rank_heartbeat_timeout",
        "rank_heartbeat_timeout",
        "rank_out_of_section_timeout",
    }
)
_SECTIONS = "rank_section_timeouts"


def policy_of(config: Mapping[str, Any], num_warmup_iters: int | None = None) -> Policy:
    """Return the rules that a configuration asks for.

    Args:
        config: The configuration in its plain form.
        num_warmup_iters: What the rank asked for at init, instead of the configured number.
    """
    settings = dict(config)
    if num_warmup_iters is not None:
        settings["num_warmup_iterations"] = num_warmup_iters
    return Policy(
        timeouts=Timeouts.from_config(settings),
        longest_pause_s=float(settings["workload_check_interval"]),
        evidence_timeout_s=float(settings["hang_evidence_timeout"]),
        termination_signal=_signal_number(settings["rank_termination_signal"]),
    )


def change_limits(config: MutableMapping[str, Any], changes: Mapping[str, Any]) -> str | None:
    """Change the timeouts of a configuration in place.

    Args:
        config: The configuration in its plain form.
        changes: Some of its timeouts; a section that is not in `config` has no place in the slot
            and is passed over.

    Returns:
        What is wrong with `changes`; nothing was changed then. None when all is well.
    """
    sections = changes.get(_SECTIONS) or {}
    unknown = sorted(changes.keys() - _PLAIN_LIMITS - {_SECTIONS})
    if unknown:
        return f"these are not limits: {', '.join(unknown)}"
    if not isinstance(sections, dict):
        return f"{_SECTIONS} must be a mapping"
    plain = {name: value for name, value in changes.items() if name != _SECTIONS}
    for name, value in (*plain.items(), *sections.items()):
        if not _is_limit(value):
            return f"{name}: {value!r} is no number of seconds"
    known = dict(config[_SECTIONS])
    known.update({name: value for name, value in sections.items() if name in known})
    config.update(plain)
    config[_SECTIONS] = known
    return None


def _is_limit(value: object) -> bool:
    if value is None:
        return True
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return math.isfinite(value) and value >= 0


def _signal_number(value: str | int) -> int:
    return signal.Signals[value].value if isinstance(value, str) else int(value)
