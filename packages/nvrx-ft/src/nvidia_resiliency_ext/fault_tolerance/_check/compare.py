# SPDX-License-Identifier: Apache-2.0
"""What differs between the nodes of a job. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from nvidia_resiliency_ext.fault_tolerance._rendezvous import clocks

from .findings import Finding, failed, passed

__all__ = ["NodeReport", "compare", "nodes_finding"]

# Marks of one event on all nodes differ by less than this where clocks are synchronised.
CLOCK_TOLERANCE_S = 1.0
MAX_SHOWN = 20


@dataclass(frozen=True, slots=True)
class NodeReport:
    """What a node told of itself; `clock` is its wall clock (unix s) at one common moment."""

    host: str
    versions: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)
    failures: Sequence[str] = ()
    clock: float | None = None


def compare(reports: Sequence[NodeReport]) -> list[Finding]:
    """Return what a job of these nodes would stumble over."""
    return [
        _same("versions of all nodes", [(r.host, r.versions) for r in reports]),
        _same("options of all nodes", [(r.host, r.settings) for r in reports]),
        _clocks(reports),
        *_failures(reports),
    ]


def nodes_finding(reports: Sequence[NodeReport], least: int, most: int, waited_s: float) -> Finding:
    """Return whether all nodes came."""
    hosts = ", ".join(sorted(r.host for r in reports)[:MAX_SHOWN])
    text = f"{len(reports)} of {most} came: {hosts}"
    if len(reports) < least:
        return failed("nodes", f"{text}; at least {least} are needed, waited {waited_s:.0f} s")
    return passed("nodes", text)


def _same(name: str, told: Sequence[tuple[str, Mapping[str, str]]]) -> Finding:
    keys = sorted({key for _, values in told for key in values})
    different = []
    for key in keys:
        by_value: dict[str, list[str]] = {}
        for host, values in told:
            by_value.setdefault(values.get(key, "missing"), []).append(host)
        if len(by_value) > 1:
            said = " and ".join(
                f"{value} on {_hosts(hosts)}" for value, hosts in sorted(by_value.items())
            )
            different.append(f"{key} is {said}")
    if different:
        return failed(name, "; ".join(different[:MAX_SHOWN]))
    return passed(name, f"{len(keys)} compared, all alike")


def _hosts(hosts: Sequence[str]) -> str:
    shown = ", ".join(sorted(hosts)[:3])
    return shown if len(hosts) <= 3 else f"{shown} and {len(hosts) - 3} more"  # noqa: PLR2004


def _clocks(reports: Sequence[NodeReport]) -> Finding:
    told = [r.clock for r in reports if r.clock is not None]
    if len(told) < len(reports):
        return failed("clocks", f"only {len(told)} of {len(reports)} nodes told theirs")
    # By number: hosts may have one name, and nobody's clock is right for being the first.
    marks = {
        number: clocks.Reading(r.clock - told[0])
        for number, r in enumerate(reports)
        if r.clock is not None
    }
    off = clocks.off_by(marks, CLOCK_TOLERANCE_S)
    if off:
        return failed("clocks", clocks.sentence([(reports[n].host, s) for n, s in off.items()]))
    return passed("clocks", f"they differ by {max(told) - min(told):.3f} s at most")


def _failures(reports: Sequence[NodeReport]) -> list[Finding]:
    return [
        failed(f"on {report.host}", text)
        for report in reports[:MAX_SHOWN]
        for text in report.failures[:MAX_SHOWN]
    ]
