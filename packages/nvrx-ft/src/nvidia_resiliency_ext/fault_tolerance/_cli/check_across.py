# SPDX-License-Identifier: Apache-2.0
"""The nodes of a job meet to compare themselves, as they would to train; nothing is started.

They use keys of their own, so a check does not disturb a job of the same name.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from nvidia_resiliency_ext.fault_tolerance._agent.many_nodes import Meeting
from nvidia_resiliency_ext.fault_tolerance._rendezvous import clocks, keys
from nvidia_resiliency_ext.fault_tolerance._rendezvous.endpoint import wait_until_reachable
from nvidia_resiliency_ext.fault_tolerance._rendezvous.store import (
    JobStore,
    connect,
    serve,
    share_secret,
)
from nvidia_resiliency_ext.shared_utils.clock import Clock
from nvidia_resiliency_ext.shared_utils.errors import NvrxError

from .check_local import Finding, failed, json_within, passed

__all__ = ["NodeReport", "compare", "compare_nodes", "nodes_finding"]


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


ANSWER_S = 10.0
GOODBYE_S = 3.0
MAX_FINDINGS = 40
_MAX_TEXT = 1000
_FIELDS = ("host", "versions", "settings", "failures")


def compare_nodes(  # noqa: PLR0913 - named, and each of them a fact of its own
    meeting: Meeting,
    report: NodeReport,
    *,
    run_id: str,
    secret: bytes | None,
    nodes: tuple[int, int],
    wait_s: float,
    clock: Clock,
) -> list[Finding]:
    """Meet the other nodes and return what all of them together found; the same on each.

    Raises:
        NvrxError: they cannot be met.
    """
    import threading

    prefix = keys.prefix(f"{run_id}:check")
    server = None
    if meeting.listener is not None:
        server = serve(meeting.listener, meeting.host, nodes[1])
        secret = secret or share_secret(server, prefix)
    wait_until_reachable(meeting.host, meeting.port, wait_s, clock, threading.Event())
    store = connect(meeting.host, meeting.port, prefix, secret, wait_s)
    me = store.count("came", 1)
    store.put(f"report/{me}", json_within(asdict(report), keys_limit()))
    if store.count("told", 1) == nodes[1]:
        store.put("all", "1")
    if server is not None:
        store.wait_until_set("all", wait_s)
        store.put("go", str(store.count("told", 0)))
    count = store.wait_for("go", wait_s + ANSWER_S)
    now = time.time()
    if count is None or not count.isdecimal():
        raise NvrxError("the node that serves the store gave no answer; see what it says")
    store.put(f"clock/{me}", repr(now))
    if store.count("clocks", 1) == int(count):
        store.put("clocked", "1")
    if server is not None:
        store.wait_until_set("clocked", ANSWER_S)
        store.put("found", json_within(_found(store, int(count), nodes, wait_s), keys_limit()))
    findings = _read(store.wait_for("found", 2 * ANSWER_S))
    if store.count("bye", 1) == int(count):
        store.put("gone", "1")
    if server is not None:
        store.wait_until_set("gone", GOODBYE_S)
    del server
    return findings


def keys_limit() -> int:
    """Return how long a value may be: what the store's readers take, less the digest."""
    from nvidia_resiliency_ext.fault_tolerance._rendezvous.records import MAX_VALUE_BYTES

    return MAX_VALUE_BYTES - 1024


def _found(
    store: JobStore, count: int, nodes: tuple[int, int], wait_s: float
) -> list[dict[str, Any]]:
    reports = [_report(store, number) for number in range(1, count + 1)]
    found = [nodes_finding(reports, *nodes, wait_s), *compare(reports)]
    return [asdict(replace(f, text=f.text[:_MAX_TEXT])) for f in found[:MAX_FINDINGS]]


def _report(store: JobStore, number: int) -> NodeReport:
    """Return what a node told; what is no report is one that says nothing."""
    try:
        told = json.loads(store.peek(f"report/{number}") or "")
        report = NodeReport(**{name: told[name] for name in _FIELDS})
        clock = store.peek(f"clock/{number}")
        return replace(report, clock=float(clock) if clock else None)
    except (ValueError, TypeError, KeyError, NvrxError):
        return NodeReport(f"node {number}", failures=("its report cannot be read",))


def _read(text: str | None) -> list[Finding]:
    if text is None:
        raise NvrxError("the node that serves the store did not compare in time")
    try:
        return [Finding(**item) for item in json.loads(text)]
    except (ValueError, TypeError) as error:
        raise NvrxError(f"what was found cannot be read: {error}") from None
