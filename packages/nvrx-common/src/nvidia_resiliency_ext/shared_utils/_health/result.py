# SPDX-License-Identifier: Apache-2.0
"""Owns the shape of a health check's answer; reads nothing."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Finding", "HealthResult", "Status", "healthy", "skipped", "unhealthy"]

Status = Literal["healthy", "unhealthy", "skipped"]


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check found, before it is named and timed.

    Attributes:
        status: ``skipped`` where there was nothing to look at; that is not a failure.
        reason: One line for people; empty when healthy and nothing needs to be said.
        evidence: What was read, as JSON values.
        warnings: Lines for the log, where one reason is not enough.
    """

    status: Status
    reason: str = ""
    evidence: Mapping[str, Any] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()


def healthy(reason: str = "", evidence: Mapping[str, Any] | None = None) -> Finding:
    """Return a finding that nothing is wrong."""
    return Finding("healthy", reason, evidence or {})


def skipped(reason: str, evidence: Mapping[str, Any] | None = None) -> Finding:
    """Return a finding that there was nothing to look at."""
    return Finding("skipped", reason, evidence or {})


def unhealthy(
    reason: str, evidence: Mapping[str, Any] | None = None, warnings: tuple[str, ...] = ()
) -> Finding:
    """Return a finding that something is wrong."""
    return Finding("unhealthy", reason, evidence or {}, warnings)


@dataclass(frozen=True, slots=True)
class HealthResult:
    """What one health check found; false only when it is unhealthy.

    Attributes:
        name: The check, as the command line names it.
        status: ``healthy``, ``unhealthy`` or ``skipped`` (nothing was there to look at).
        reason: One line for people.
        component: What was looked at, such as ``gpu 3`` or ``mlx5_0``.
        evidence: What was read, as JSON values.
        duration_s: How long it took.
    """

    name: str
    status: Status
    reason: str = ""
    component: str = ""
    evidence: Mapping[str, Any] = field(default_factory=dict)
    duration_s: float = 0.0

    def __bool__(self) -> bool:
        """Return False only when unhealthy."""
        return self.status != "unhealthy"
