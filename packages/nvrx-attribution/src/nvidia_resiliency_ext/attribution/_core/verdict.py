# SPDX-License-Identifier: Apache-2.0
"""The verdict about one attempt of a job, and its JSON forms; it decides nothing."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass, field, replace
from typing import Any

__all__ = ["FirstFault", "ReportedEvent", "RetryState", "Verdict", "VerdictProgress"]

_SCHEMA = "nvrx_attribution.v1"
_RESPONSE_SCHEMA = "restart_agent_response.v1"
_BASIS_OF_RULE = {
    "confirmation_retry": "confirmation_retry_available",
    "general_retry": "general_retry_available",
    "workload_managed_recovery": "workload_managed_recovery_available",
}
_USE_OF_QUALITY = {
    "normal": "eligible",
    "degraded": "eligible_degraded",
    "unusable": "fallback_to_nvrx_default",
}
_HEADS = {
    "STOP": "STOP - DONT RESTART IMMEDIATE",
    "RESTART": "RESTART IMMEDIATE",
    "CONTINUE": "ERRORS NOT FOUND",
    "UNKNOWN": "NO LOGS",
}


@dataclass(frozen=True)
class RawAnalysisResultItem:
    """One analysed log, as older callers know it.

    Attributes:
        raw_text: Five lines: head, explanation, attribution, checkpoint flag, issues.
        auto_resume: Head such as `RESTART IMMEDIATE`.
        auto_resume_explanation: Why, in one line.
        attribution_text: What failed and where.
        checkpoint_saved_flag: 1 when a checkpoint was saved.
        action: STOP, RESTART, CONTINUE or UNKNOWN.
        primary_issues: Code of the first fault.
        secondary_issues: Codes of the others.
    """

    raw_text: str
    auto_resume: str
    auto_resume_explanation: str
    attribution_text: str
    checkpoint_saved_flag: int
    action: str
    primary_issues: list[str] = field(default_factory=list)
    secondary_issues: list[str] = field(default_factory=list)

    @classmethod
    def from_payload(cls, payload: Any) -> RawAnalysisResultItem:
        """Return the item that a decoded JSON object holds.

        Args:
            payload: The object, with all eight keys.

        Raises:
            TypeError: The value is no object, or a key is missing.
        """
        keys = cls.__dataclass_fields__
        if not isinstance(payload, dict) or any(key not in payload for key in keys):
            raise TypeError(f"a result item is an object with {', '.join(keys)}")
        return cls(**{key: payload[key] for key in keys})

    def to_payload(self) -> dict[str, Any]:
        """Return the JSON object."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class RetryState:
    """Which budget counts, how large it is, how much of it is used.

    Attributes:
        rule: `general_retry`, `bounded_retry`, `confirmation_retry`, `workload_managed_recovery` or
            `workload_unrecoverable`.
        budget: Repeats without progress that are allowed.
        used: Repeats so far.
        scope: `root`, or `root_and_entity`.
        exhausted: No repeat is left.
        ceiling: Repeats of one root that are allowed, whatever the rule.
    """

    rule: str = "general_retry"
    budget: int = 3
    used: int = 0
    scope: str = "root"
    exhausted: bool = False
    ceiling: int = 3


@dataclass(frozen=True, slots=True)
class FirstFault:
    """The line of the fault that came first.

    Attributes:
        line: Its number, from 1.
        byte: Where it begins.
        time: ISO time, or None.
        rank: Who had the fault, or None.
        local_rank: Its number on its node, or None.
        node: Where it runs, or None.
        gpu: Its device, or None.
        text: The line without prefixes, secrets taken out.
    """

    line: int
    byte: int
    time: str | None
    rank: int | None
    local_rank: int | None
    node: str | None
    gpu: str | None
    text: str


@dataclass(frozen=True, slots=True)
class VerdictProgress:
    """How far the attempt came; None where the log does not say."""

    first_step: int | None = None
    last_step: int | None = None
    last_checkpoint_step: int | None = None


@dataclass(frozen=True, slots=True)
class ReportedEvent:
    """One group of lines that say the same."""

    code: str
    role: str
    count: int
    first_line: int
    ranks: str
    sample: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """What failed, where, and what to do.

    Attributes:
        action: STOP, RESTART, CONTINUE or UNKNOWN.
        reason_code: Such as `gpu.off_bus`.
        domain: infrastructure, workload, unknown or none.
        confidence: 0 to 1.
        retry: The budget that counts.
        first_fault: Its line; None when nothing was found.
        suspect_ranks: Who may be to blame.
        suspect_nodes: Where these run.
        exclude_nodes: Nodes that the next attempt should not use.
        entity: `{"kind", "id"}` of a file or place in the data, or None.
        phase: startup, training, checkpoint_save, checkpoint_load, shutdown or unknown.
        progress: Steps and checkpoints.
        events: What else was found.
        fr: Report of the flight recorder, or None.
        evidence: `{"line", "quote"}` of what the verdict rests on.
        fingerprint: Same for the same fault in another attempt.
        registry_version: Of the rules.
        coverage: `{"bytes", "lines", "truncated"}`.
        refinement: What a model added, or None.
        elapsed_s: Seconds of analysis.
        job_id: As given.
        cycle_id: As given.
        explanation: Why this action, in one line; the code is not repeated in it.
    """

    action: str
    reason_code: str
    domain: str
    confidence: float
    retry: RetryState = RetryState()
    first_fault: FirstFault | None = None
    suspect_ranks: tuple[int, ...] = ()
    suspect_nodes: tuple[str, ...] = ()
    exclude_nodes: tuple[str, ...] = ()
    entity: dict[str, str] | None = None
    phase: str = "unknown"
    progress: VerdictProgress = VerdictProgress()
    events: tuple[ReportedEvent, ...] = ()
    fr: dict[str, Any] | None = None
    evidence: tuple[dict[str, Any], ...] = ()
    fingerprint: str = ""
    registry_version: str = ""
    coverage: dict[str, Any] = field(default_factory=dict)
    refinement: dict[str, Any] | None = None
    elapsed_s: float = 0.0
    job_id: str | None = None
    cycle_id: int | None = None
    explanation: str = ""

    @property
    def reason(self) -> str:
        """Code and explanation in one line."""
        return f"{self.reason_code}: {self.explanation}"

    def with_changes(self, **changes: Any) -> Verdict:
        """Return a copy with other values.

        Args:
            changes: New values by name of the field.
        """
        return replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object `nvrx_attribution.v1`."""
        fault = self.first_fault
        return {
            "schema": _SCHEMA,
            "action": self.action,
            "reason_code": self.reason_code,
            "domain": self.domain,
            "confidence": round(self.confidence, 3),
            "retry": {key: getattr(self.retry, key) for key in ("rule", "budget", "used", "scope")},
            "first_fault": None if fault is None else asdict(fault),
            "suspect_ranks": list(self.suspect_ranks),
            "suspect_nodes": list(self.suspect_nodes),
            "exclude_nodes": list(self.exclude_nodes),
            "entity": self.entity,
            "phase": self.phase,
            "progress": asdict(self.progress),
            "events": [asdict(event) for event in self.events],
            "fr": self.fr,
            "evidence": list(self.evidence),
            "fingerprint": self.fingerprint,
            "registry_version": self.registry_version,
            "coverage": dict(self.coverage),
            "refinement": self.refinement,
            "elapsed_s": round(self.elapsed_s, 3),
            "job_id": self.job_id,
            "cycle_id": self.cycle_id,
            "explanation": self.explanation,
        }

    def to_item(self) -> RawAnalysisResultItem:
        """Return the result item of older callers."""
        fault = self.first_fault
        where = "no fault was found"
        if fault is not None:
            where = f"{self.reason_code}: {fault.text} (line {fault.line}"
            where += f", rank {fault.rank}" if fault.rank is not None else ""
            where += f", node {fault.node})" if fault.node is not None else ")"
        saved = int(self.progress.last_checkpoint_step is not None)
        primary = [] if fault is None else [self.reason_code]
        others = [event.code for event in self.events if event.code != self.reason_code]
        secondary = list(dict.fromkeys(code for code in others if code != "unknown"))
        head = _HEADS[self.action]
        issues = ", ".join([*primary, *secondary]) or "none"
        raw = "\n".join((head, self.reason, where, f"checkpoint saved: {saved}", issues))
        return RawAnalysisResultItem(
            *(raw, head, self.reason, where, saved, self.action, primary, secondary)
        )

    def to_restart_agent_response(self) -> dict[str, Any]:
        """Return the JSON object `restart_agent_response.v1`; all keys are always there."""
        fault = self.first_fault
        fingerprint = f"sha256:{self.fingerprint}" if self.fingerprint else None
        quality = "degraded" if self.reason_code == "unknown" else "normal"
        quality = "unusable" if self.action == "UNKNOWN" else quality
        return {
            "schema_version": _RESPONSE_SCHEMA,
            "decision": "STOP" if self.action == "STOP" else "RESTART",
            "decision_basis": self._basis(),
            "retry_policy": {
                "policy_version": "retry_budget.v1",
                "rule": self.retry.rule,
                "general_root_ceiling": self.retry.ceiling,
                "selected_rule_budget": self.retry.budget,
                "exhausted_by": self.retry.rule if self.retry.exhausted else None,
            },
            "failure_domain": self.domain if self.domain != "none" else "unknown",
            "result_provenance": {
                "candidate_kind": "l1_enriched"
                if self.refinement and self.refinement.get("used")
                else "deterministic",
                "result_quality": quality,
                "nvrx_use": _USE_OF_QUALITY[quality],
            },
            "primary_failure": None
            if fault is None
            else {
                "failure_class": self.reason_code,
                "signature": fault.text,
                "root_fingerprint": fingerprint,
                "fault_outcome": "terminal",
                "causal_role": "initiating",
                "line": fault.line,
                "rank": fault.rank,
                "node": fault.node,
                "gpu": fault.gpu,
                "phase": self.phase,
                "affected_entity": None
                if self.entity is None
                else {
                    "kind": self.entity["kind"],
                    "identity": self.entity["id"],
                    "fingerprint": "sha256:"
                    + hashlib.sha256(self.entity["id"].encode()).hexdigest(),
                },
            },
            "root_cause_assessment": {"text": self.reason, "confidence": self.confidence},
            "model_recovery_assessment": None,
            "secondary_failures": self._events({"root", "either", "recovered"}),
            "cascades": self._events({"cascade", "teardown"}),
            "evidence_coverage": dict(self.coverage),
            "evidence": list(self.evidence),
            "justification": self.reason,
        }

    def _basis(self) -> str:
        if self.action == "UNKNOWN":
            return "log_unavailable"
        if self.action == "CONTINUE":
            return "no_primary_failure"
        if self.action == "STOP":
            exhausted = self.retry.exhausted
            return "retry_budget_exhausted" if exhausted else "workload_unrecoverable"
        rule = self.retry.rule
        return _BASIS_OF_RULE.get(rule, "retry_recovery_available")

    def _events(self, roles: set[str]) -> list[dict[str, Any]]:
        line = self.first_fault.line if self.first_fault is not None else -1
        return [asdict(e) for e in self.events if e.role in roles and e.first_line != line]
