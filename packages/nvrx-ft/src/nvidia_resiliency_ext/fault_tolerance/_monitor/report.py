# SPDX-License-Identifier: Apache-2.0
"""Owns the words and fields in which a hang is reported; it sends nothing."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .evidence import Evidence
    from .verdict import Verdict

__all__ = ["describe", "fault_fields", "hang_report"]

_RULES = {
    "initial_heartbeat": "sent no first heartbeat",
    "heartbeat": "sent no heartbeat",
    "section": "was in section {section!r}",
    "out_of_section": "was outside all sections",
}


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
        **identity,
    }


def describe(report: Mapping[str, Any]) -> str:
    """Return a report as one line for the log."""
    what = _RULES[report["rule"]].format(section=report["section"])
    iteration = "" if report["iteration"] is None else f", iteration {report['iteration']}"
    stacks = report["stacks"] or "none"
    return (
        f"rank {report['rank']} (pid {report['pid']} on {report['host']}) {what} for "
        f"{report['elapsed']:.2f} s, limit {report['limit']:.2f} s, cycle {report['cycle']}"
        f"{iteration}; state {report['state']}, wchan {report['wchan'] or '-'}, stacks: {stacks}; "
        f"ending it with {signal.Signals(report['signal']).name}"
    )


def fault_fields(report: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of the `fault` event for a report."""
    by_heartbeat = report["rule"] in ("initial_heartbeat", "heartbeat")
    section = report["section"]
    return {
        "cause": "hang_heartbeat" if by_heartbeat else "hang_section",
        "what": report["rule"] if section is None else f"{report['rule']} {section}",
        "detail": describe(report),
        "detected_by": "monitor",
        "deadline_s": report["limit"],
        "late_s": report["late_s"],
    }
