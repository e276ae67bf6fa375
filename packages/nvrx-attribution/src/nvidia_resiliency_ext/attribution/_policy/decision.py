# SPDX-License-Identifier: Apache-2.0
"""Decide what is done: action, budget, nodes to exclude. Pure; history comes as counts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from nvidia_resiliency_ext.attribution._core.verdict import RetryState

if TYPE_CHECKING:
    from nvidia_resiliency_ext.attribution._logs.diagnosis import Diagnosis
    from nvidia_resiliency_ext.attribution._logs.registry import Code
    from nvidia_resiliency_ext.attribution._policy.history import Repeats

__all__ = ["Decision", "RetryPolicy", "decide"]

_MOST_GENERAL = 3  # codes with a larger budget have their own ceiling
_MANAGED = frozenset({"num.nan", "num.spike"})
_MANAGED_RULE = "workload_managed_recovery"


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Limits of retries, which a site may set.

    Attributes:
        general_ceiling: Repeats of any one fault without progress before STOP.
        confirmation_retries: The same for codes that count per file or place in the data.
        bounded_retries: The same for codes under the rule `bounded_retry`.
        managed_retries: The same for NaN and spikes, when the workload itself skips the data that
            causes them after a retry; None: it does not.
    """

    general_ceiling: int = 3
    confirmation_retries: int = 1
    bounded_retries: int = 1
    managed_retries: int | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """What is done, why (beside the code), and which nodes the next attempt should not use."""

    action: str
    retry: RetryState
    exclude_nodes: tuple[str, ...]
    explanation: str


def decide(
    found: Diagnosis,
    code: Code,
    repeats: Repeats,
    policy: RetryPolicy,
    *,
    had_steps: bool,
) -> Decision:
    """Return the decision about one attempt.

    Args:
        found: What failed and where.
        code: Meaning of its code.
        repeats: How often it came back.
        policy: Of the site.
        had_steps: This attempt had completed a step before the fault.
    """
    rule, allowed = _rule_of(code, policy)
    # Preemption and lost nodes come back without being anybody's fault: their budget is larger.
    ceiling = code.budget if code.budget > _MOST_GENERAL else policy.general_ceiling
    is_per_entity = code.per_entity or rule == _MANAGED_RULE
    budget = min(allowed, ceiling)
    used = repeats.entity if is_per_entity and found.entity else repeats.root
    scope = "root_and_entity" if is_per_entity else "root"
    state = RetryState(rule, budget, used, scope, ceiling=ceiling)
    exclude = _excluded(found, code, repeats)
    if code.action == "CONTINUE":
        return Decision("CONTINUE", replace(state, budget=0, used=0), (), "the job ended well")
    hopeless = replace(state, rule="workload_unrecoverable", budget=code.budget, used=repeats.root)
    if code.action == "STOP":
        return Decision("STOP", replace(hopeless, budget=0), (), "another start meets the same")
    is_early = not had_steps and not repeats.had_steps
    if code.stop_first and is_early and (not code.most_ranks or found.is_mass or found.is_single):
        text = "before any step was completed: another start meets the same"
        return Decision("STOP", hopeless, (), text)
    if used >= budget or repeats.root >= ceiling:
        if code.domain == "infrastructure" and exclude and repeats.on_node >= max(1, budget):
            text = "again on the same node: start without it"
            return Decision("RESTART", state, exclude, text)
        text = f"retry_budget_exhausted: it came back {repeats.root} times without progress"
        return Decision("STOP", replace(state, exhausted=True), exclude, text)
    return Decision("RESTART", state, exclude, "a restart may help")


def _rule_of(code: Code, policy: RetryPolicy) -> tuple[str, int]:
    """Return the rule under which a code's retries are counted, and how many it allows."""
    if policy.managed_retries is not None and code.name in _MANAGED:
        return _MANAGED_RULE, policy.managed_retries
    if code.per_entity:
        return "confirmation_retry", policy.confirmation_retries
    if code.bounded:
        return "bounded_retry", policy.bounded_retries
    # A code that is only guessed ends no job the first time, whatever its table says.
    return "general_retry", code.budget or policy.general_ceiling


def _excluded(found: Diagnosis, code: Code, repeats: Repeats) -> tuple[str, ...]:
    if found.contained or found.is_mass:
        return ()
    nodes = found.suspect_nodes or ((found.node,) if found.node else ())
    if code.exclude:
        return nodes
    # Twice on one node, while the others are fine, is the node's.
    is_again = repeats.on_node >= 1 and code.domain != "workload"
    return nodes if is_again else ()
