# SPDX-License-Identifier: Apache-2.0
"""Owns the words and fields in which a hang is reported; it sends nothing."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .evidence import Evidence
    from .verdict import Verdict

__all__ = ["HEALTH_RULES", "cause_kind", "describe", "fault_fields", "hang_report"]

_RULES = {
    "initial_heartbeat": "sent no first heartbeat",
    "heartbeat": "sent no heartbeat",
    "section": "was in section {section!r}",
    "out_of_section": "was outside all sections",
}
HEALTH_RULES = frozenset({"gpu_health", "nic_health"})
"""Rules that a rank breaks through no fault of its own."""


def hang_report(
    verdict: Verdict, evidence: Evidence, *, signalled_at: float, identity: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the machine-readable reason of a kill.

    Args:
        verdict: The rule that was broken.
        evidence: What was learned of the process.
        signalled_at: When it got its first signal, on the monotonic clock.
        identity: cycle, rank, local_rank, pid, host, time, signal.
    """
    return {
        "rule": verdict.rule,
        "section": verdict.section,
        "since": verdict.since,
        "elapsed": signalled_at - verdict.since,
        "limit": verdict.limit_s,
        "iteration": verdict.iteration,
        "late_s": signalled_at - verdict.deadline,
        "stacks": evidence.stacks_path,
        "state": evidence.state,
        "wchan": evidence.wchan,
        "rss_bytes": evidence.rss_bytes,
        "reason": verdict.reason,
        **identity,
    }


def describe(report: Mapping[str, Any]) -> str:
    """Return a report as one line for the log."""
    if report["rule"] in HEALTH_RULES:
        what = f"cannot go on: {report['reason']}; found within {report['limit']:g} s"
    else:
        rule = _RULES[report["rule"]].format(section=report["section"])
        what = f"{rule} for {report['elapsed']:.2f} s, limit {report['limit']:.2f} s"
    iteration = "" if report["iteration"] is None else f", iteration {report['iteration']}"
    stacks = report["stacks"] or "none"
    return (
        f"rank {report['rank']} (pid {report['pid']} on {report['host']}) {what}"
        f", cycle {report['cycle']}"
        f"{iteration}; state {report['state']}, wchan {report['wchan'] or '-'}, stacks: {stacks}; "
        f"ending it with {signal.Signals(report['signal']).name}"
    )


def cause_kind(rule: str) -> str:
    """Return what a fault is called in which a rank broke this rule."""
    if rule in HEALTH_RULES:
        return "unhealthy"
    return "hang_heartbeat" if "heartbeat" in rule else "hang_section"


def fault_fields(report: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of the `fault` event for a report."""
    section = report["section"]
    return {
        "cause": cause_kind(report["rule"]),
        "what": report["rule"] if section is None else f"{report['rule']} {section}",
        "detail": describe(report),
        "detected_by": "monitor",
        "deadline_s": report["limit"],
        "late_s": report["late_s"],
    }
