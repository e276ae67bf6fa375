# SPDX-License-Identifier: Apache-2.0
"""Decide which event was the first fault, who had it and where; it reads no line.

Events have roles. A root beats any cascade, whatever their order; among roots the earlier one
wins, and of those at the same moment the more specific. What the job survived is no fault. Lines
that confirm (kernel, scheduler) replace a symptom that says less.
"""

from __future__ import annotations

import calendar
import functools
import hashlib
import re
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nvidia_resiliency_ext.attribution._logs.dialects import NO_YEAR
from nvidia_resiliency_ext.attribution._logs.events import ABOUT_A_RANK
from nvidia_resiliency_ext.attribution._logs.members import Members, named_members
from nvidia_resiliency_ext.attribution._logs.progress import counted

if TYPE_CHECKING:
    from collections.abc import Callable

    from nvidia_resiliency_ext.attribution._logs.events import Event, ScanResult
    from nvidia_resiliency_ext.attribution._logs.registry import Registry

__all__ = ["Diagnosis", "diagnose", "role_of"]

_CONFIRM_S = 60.0
_SAME_MOMENT_S = 2.0
_SAME_LINES = 8
_CLOCK_JUMP_S = 2700.0
_TIER = {"root": 0, "confirm": 0, "either": 1, "cascade": 2, "teardown": 3}
_WEAK = frozenset({"host.exit_nonzero", "host.sigkill", "sched.sigterm", "net.store_lost"})
# Code of a symptom -> the least probability with which a guessed fault replaces it.
_SYMPTOMS = {
    "net.store_lost": 0.15,
    "nccl.timeout": 0.3,
    "host.exit_nonzero": 0.3,
    "host.sigkill": 0.3,
    "sched.sigterm": 0.3,
}
_ENDED_BY_OTHERS = frozenset({0, -15, 143})
_ENDS = frozenset({"host.exit_nonzero", "host.sigkill", "host.segfault", "unknown"})
_COMPLAINTS = frozenset({"root", "either", "cascade"})
_MASS = 0.5
_SILENT_SHARE = 0.34
_LEAST_REPORTERS = 2
_LEAST_STEPS = 2
_VOLATILE = re.compile(r"0x[0-9a-fA-F]+|/[^\s'\":,]+|\b[0-9a-f]{8,}\b|\d+|\b[\w-]+\d[\w.-]*\b")


@dataclass(slots=True)
class Diagnosis:
    """Faults, suspects and progress found in a log.

    Attributes:
        code: Reason code.
        confidence: 0 to 1.
        fault: The first fault; None when there is none.
        rank: Who had it, or None.
        node: Where, or None.
        suspects: Ranks that may be to blame.
        suspect_nodes: Their nodes, as far as known.
        entity: File that the fault names.
        is_mass: More than half of the ranks had it.
        fingerprint: Same for the same fault in another attempt.
        recovered: Events that the job survived.
        contained: The device contained the fault: no node is blamed.
        is_single: The job has one rank, or the log names none.
    """

    code: str = "unknown"
    confidence: float = 0.2
    fault: Event | None = None
    rank: int | None = None
    node: str | None = None
    suspects: tuple[int, ...] = ()
    suspect_nodes: tuple[str, ...] = ()
    entity: str | None = None
    is_mass: bool = False
    fingerprint: str = ""
    recovered: set[int] = field(default_factory=set)
    contained: bool = False
    is_single: bool = True


def diagnose(
    scan: ScanResult, registry: Registry, guess: Callable[[], Event | None] | None = None
) -> Diagnosis:
    """Return the diagnosis from the events of the whole log.

    Args:
        scan: The events.
        registry: The rules.
        guess: Returns a fault that no rule knows, for a log in which rules found none, or a
            symptom alone.
    """
    found = Diagnosis()
    _align_years(scan)
    _place_local_ranks(scan)
    found.recovered = {id(e) for e in scan.events if _is_recovered(e, scan)}
    if scan.events and scan.progress.last_step is None:
        found.recovered |= {id(e) for e in _survived(scan)}
    live = [e for e in scan.events if id(e) not in found.recovered]
    done = [e for e in live if e.role == "done"]
    faults = [e for e in live if e.role in _TIER and e.code != "unknown"]
    later = [e for e in faults if done and e.last_line > done[-1].last_line]
    # Faults of the shutdown end no job, but a job that made steps after the line was not done.
    if done and not (later and scan.progress.has_stepped(done[-1].mark)):
        later = [e for e in later if _TIER[e.role] == 0]
    if done and not later:
        found.code, found.confidence = "done.completed", registry.code("done.completed").confidence
        found.fault = None
        return found
    fault = _first_fault(faults)
    may_guess = fault.code in _SYMPTOMS if fault else scan.progress.phase != "shutdown"
    if guess is not None and may_guess:
        fault = _prefer_guess(fault, guess())
    if fault is None:
        _without_fault(found, scan)
        return found
    fault = _confirmed(fault, faults)
    found.fault, found.code = fault, fault.code
    found.entity = fault.entity
    entry = registry.xids.get(fault.xid) if fault.xid is not None else None
    found.contained = entry is not None and entry.contained
    _locate(found, fault, scan, faults)
    found.confidence = _confidence(found, fault, scan, registry)
    found.fingerprint = _fingerprint(found, fault)
    return found


def _prefer_guess(fault: Event | None, guessed: Event | None) -> Event | None:
    """Return a guessed fault instead of nothing, or of a symptom that it may have caused."""
    if fault is None or guessed is None:
        return guessed or fault
    return guessed if (guessed.rule.confidence or 0.0) >= _SYMPTOMS[fault.code] else fault


def role_of(event: Event, diagnosis: Diagnosis) -> str:
    """Return the role of an event as it is reported."""
    if id(event) in diagnosis.recovered:
        return "recovered"
    if event is diagnosis.fault:
        return "root"
    return {"either": "cascade", "confirm": "root", "done": "context"}.get(event.role, event.role)


def _is_recovered(event: Event, scan: ScanResult) -> bool:
    if event.role == "done" or not scan.progress.has_gone_on(event.mark):
        return False
    # Output that was held back can come after the fault: times decide where there are some.
    step_time, fault_time = scan.progress.last_step_time_s, event.first.time_s
    if step_time is None or fault_time is None or event.count > 1:
        return True
    return step_time > fault_time or abs(step_time - fault_time) > _CLOCK_JUMP_S


def _survived(scan: ScanResult) -> list[Event]:
    """Return the events after which two steps came that a tool tells in its own words.

    Lines without a usual word must have begun before the event: its peers may count their waits.
    """
    numbers, texts = zip(*scan.sample(), strict=True)
    steps = [
        (0 if first is None else numbers[first], numbers[index])
        for index, first in counted(texts).items()
    ]
    return [
        event
        for event in scan.events
        if event.role != "done"
        and sum(first < event.first.line <= event.last_line < line for first, line in steps)
        >= _LEAST_STEPS
    ]


def _first_fault(faults: list[Event]) -> Event | None:
    for tier in range(3):
        candidates = [e for e in faults if _TIER[e.role] == tier]
        if tier == 0:
            scheduler = [e for e in candidates if e.rule.specificity >= 94]  # noqa: PLR2004
            others = [e for e in candidates if e not in scheduler]
            candidates = _with_scheduler(scheduler, others)
            candidates = [e for e in candidates if e.role != "confirm"] or candidates
        if tier == 1:
            strong = [e for e in candidates if e.code not in _WEAK]
            candidates = strong or _without_consequences(candidates, faults)
        if candidates:
            return _earliest(candidates)
    return None


def _without_consequences(exits: list[Event], faults: list[Event]) -> list[Event]:
    """Drop exits of ranks that reported a cascade before: the report explains the exit."""
    said: set[int] = set().union(*(e.ranks for e in faults if e.role == "cascade"))
    return [e for e in exits if not (said and e.code == "host.exit_nonzero" and e.ranks <= said)]


def _with_scheduler(scheduler: list[Event], others: list[Event]) -> list[Event]:
    """Prefer the scheduler's reason over errors that the job printed while it was being ended."""
    if not scheduler or not others:
        return scheduler or others
    first = _earliest(scheduler)
    before = [e for e in others if _is_before(e, first)]
    return before or [first]


def _is_before(event: Event, other: Event) -> bool:
    if event.first.time_s is not None and other.first.time_s is not None:
        return event.first.time_s < other.first.time_s - _SAME_MOMENT_S
    return event.first.line < other.first.line


def _earliest(candidates: list[Event]) -> Event:
    """Return the first by time where all have one, else by line; at one moment the specific one."""
    timed = [e for e in candidates if e.first.time_s is not None]
    if len(timed) == len(candidates):
        start = min(e.first.time_s or 0.0 for e in timed)
        near = [e for e in timed if (e.first.time_s or 0.0) - start <= _SAME_MOMENT_S]
        return min(near, key=_rank_at_one_moment)
    if len(timed) > 1:
        # A line without a time stands where it stands among those that have one.
        best = min(timed, key=lambda e: (e.first.time_s or 0.0, e.first.line))
        candidates = [e for e in candidates if e.first.time_s is None] + [best]
    start_line = min(e.first.line for e in candidates)
    near = [e for e in candidates if e.first.line - start_line <= _SAME_LINES]
    return min(near, key=_rank_at_one_moment)


def _rank_at_one_moment(event: Event) -> tuple[int, int]:
    # A bare exception says less than a rule with a cause; among causes the first line wins.
    return (-(event.rule.specificity // 25), event.first.line)


def _confirmed(fault: Event, faults: list[Event]) -> Event:
    """Return an event that confirms and replaces the presumed first fault, else that fault."""
    best = fault
    for other in faults:
        if other is fault or fault.code not in other.rule.confirms:
            continue
        if other.code == fault.code or other.rule.specificity <= best.rule.specificity:
            continue
        if _distance_s(fault, other) > _CONFIRM_S:
            continue
        if other.role in {"root", "confirm", "either"} and _may_be_same(fault, other):
            best = other
    if best is not fault and best.first.rank is None and len(fault.ranks) == 1:
        best.first.rank = fault.first.rank
    return best


def _distance_s(one: Event, other: Event) -> float:
    """Return the seconds between two events; 0 where a time is not known."""
    if one.first.time_s is None or other.first.time_s is None:
        return 0.0
    return abs(one.first.time_s - other.first.time_s)


def _may_be_same(one: Event, other: Event) -> bool:
    nodes, other_nodes = one.nodes, other.nodes
    return not nodes or not other_nodes or bool(nodes & other_nodes)


def _ranks_of(
    found: Diagnosis, fault: Event, scan: ScanResult, members_of_job: Callable[[], Members]
) -> tuple[set[int], set[int]]:
    """Set the rank of a fault as its lines say it; return the ranks of the job and of the fault."""
    known, ranks = scan.ranks, set(fault.ranks)
    found.rank = fault.first.rank
    if not ranks and fault.first.local_rank is None and len(known) < _LEAST_REPORTERS:
        # No prefix says ranks: the numbers of the lines themselves may.
        members = members_of_job()
        known, ranks = members.numbers, members.writers_like(fault.first.raw)
        found.rank = members.member_of(fault.first.raw, is_report=fault.code in ABOUT_A_RANK)
    elif found.rank is None and len(ranks) == 1:
        (found.rank,) = ranks  # the first line of it has no prefix
    return known, ranks


def _locate(found: Diagnosis, fault: Event, scan: ScanResult, faults: list[Event]) -> None:
    members = functools.cache(functools.partial(Members, scan))
    known, ranks = _ranks_of(found, fault, scan, members)
    world = scan.world_size or (max(known) + 1 if known else len(scan.places))
    found.is_single = len(known) <= 1 and (scan.world_size or 1) <= 1
    found.node = fault.first.node or scan.node_map.node_of(found.rank)
    if found.rank is None and fault.first.local_rank is not None:
        found.rank = scan.node_map.rank_of(found.node, fault.first.local_rank)
    if found.rank is None and fault.exit_code is not None:
        # The agent's own line says only the local rank; the block below it says the rank.
        twin = next((e for e in faults if e.exit_code == fault.exit_code and e.ranks), None)
        if twin is not None:
            found.rank, found.node = twin.first.rank, twin.first.node
            ranks |= twin.ranks
    if found.rank is None:
        found.rank = _rank_from_others(fault, scan, found.node, members)
    found.is_mass = world > 1 and len(ranks) + len(fault.places) > world * _MASS
    if fault.code == "nccl.timeout":
        _name_silent(found, scan, world)
    elif found.is_mass:
        found.node = None if fault.code.startswith(("user.", "ckpt.", "data.")) else found.node
    elif ranks:
        found.suspects = tuple(sorted(ranks))
    elif found.rank is not None:
        found.suspects = (found.rank,)
    nodes = {scan.node_map.node_of(rank) for rank in found.suspects} - {None}
    if fault.first.node is not None and not found.is_mass:
        nodes.add(fault.first.node)
    found.suspect_nodes = tuple(sorted(str(node) for node in nodes))
    if found.code.startswith("gpu.") and found.node is None and len(nodes) == 1:
        found.node = found.suspect_nodes[0]


def _rank_from_others(
    fault: Event, scan: ScanResult, node: str | None, members: Callable[[], Members]
) -> int | None:
    """Return the rank of a fault whose own line names none: the kernel, a daemon, a library.

    It is the first one that other lines about the same fault name; else the only one that ended
    by itself, or that others say has left; else the next one that complains at the same moment;
    else the only member, process or worker with a number that the line itself speaks of; else the
    one that most of the others speak of afterwards.
    """
    near = [e for e in scan.events if not (node and e.nodes and node not in e.nodes)]
    same = next((e for e in near if e.code == fault.code and e.first.rank is not None), None)
    if same is not None:
        return same.first.rank
    ended = (e for e in near if e.code in _ENDS and e.exit_code not in _ENDED_BY_OTHERS)
    for ranks in ({rank for e in ended for rank in e.ranks}, scan.departed_ranks):
        if len(ranks) == 1:
            return next(iter(ranks))
    for event in near:
        lines = event.first.line - fault.first.line
        if event.role in _COMPLAINTS and len(event.ranks) == 1 and 0 < lines <= _SAME_LINES:
            return event.first.rank if _distance_s(fault, event) <= _SAME_MOMENT_S else None
    named = named_members(fault.first.text)
    return named.pop() if len(named) == 1 else members().blamed(fault.first.line)


def _name_silent(found: Diagnosis, scan: ScanResult, world: int) -> None:
    """Suspect ranks that do not report the others' timeout, or are behind in their sequence."""
    events = [e for e in scan.events if e.code == "nccl.timeout"]
    reporters: set[int] = set().union(*(e.ranks for e in events))
    seqs = {rank: seq for e in events for rank, seq in e.seqs.items()}
    silent = set(range(world)) - reporters if world else set()
    is_few = len(reporters) >= _LEAST_REPORTERS and len(silent) <= world * _SILENT_SHARE
    if silent and reporters and (is_few or len(silent) == 1):
        found.suspects = tuple(sorted(silent))
    elif len(seqs) > _LEAST_REPORTERS and len(set(seqs.values())) > 1:
        lowest = min(seqs.values())
        behind = sorted(rank for rank, seq in seqs.items() if seq == lowest)
        found.suspects = tuple(behind) if len(behind) < len(seqs) / 2 else ()
    elif len(reporters) > 1 and 0 < len(scan.dump_signal_ranks - reporters) < world / 2:
        found.suspects = tuple(sorted(scan.dump_signal_ranks - reporters))
    if len(found.suspects) == 1:
        found.rank = found.suspects[0]
        found.node = scan.node_map.node_of(found.rank)
    found.is_mass = False


def _confidence(found: Diagnosis, fault: Event, scan: ScanResult, registry: Registry) -> float:
    confidence = fault.rule.confidence or registry.code(found.code).confidence
    if _TIER[fault.role] == 2:  # noqa: PLR2004 - a cascade without a root
        confidence *= 0.6
    rivals = {e.code for e in scan.events if e.role == "root" and id(e) not in found.recovered}
    if len(rivals - {found.code, "user.exception"}) > 0:
        confidence *= 0.9
    return round(confidence, 3)


def _fingerprint(found: Diagnosis, fault: Event) -> str:
    text = _VOLATILE.sub("#", fault.first.text)
    frame = re.sub(r"\(.*/", "(", fault.frame)
    parts = "\n".join((found.code, text[:200], frame))
    return hashlib.sha256(parts.encode()).hexdigest()[:32]


def _without_fault(found: Diagnosis, scan: ScanResult) -> None:
    if scan.progress.phase == "shutdown":
        found.code = "done.completed"
    found.fingerprint = hashlib.sha256(f"{found.code}\n{scan.progress.phase}".encode()).hexdigest()[
        :32
    ]


def _align_years(scan: ScanResult) -> None:
    """Move times without a year into the year that other lines of the log have."""
    if scan.year == NO_YEAR:
        return
    progress = scan.progress
    for event in scan.events:
        event.first.time_s = _in_year(event.first.time_s, scan.year)
    progress.first_step_time_s = _in_year(progress.first_step_time_s, scan.year)
    progress.last_step_time_s = _in_year(progress.last_step_time_s, scan.year)
    scan.last_time_s = _in_year(scan.last_time_s, scan.year)


def _in_year(time_s: float | None, year: int) -> float | None:
    if time_s is None:
        return None
    parts = time.gmtime(time_s)
    if parts.tm_year != NO_YEAR:
        return time_s
    return calendar.timegm((year, *parts[1:6])) + time_s % 1.0


def _place_local_ranks(scan: ScanResult) -> None:
    """Turn (node, local rank) of events into ranks where the node map has them."""
    ranks = _ranks_of_places(scan)
    for event in scan.events:
        for place in list(event.places):
            rank = scan.node_map.rank_of(*place)
            rank = ranks.get(place) if rank is None else rank
            if rank is not None:
                event.places.discard(place)
                event.ranks.add(rank)
        first = event.first
        if first.rank is None and first.local_rank is not None:
            place = (first.node, first.local_rank)
            rank = scan.node_map.rank_of(*place)
            first.rank = ranks.get(place) if rank is None else rank


def _ranks_of_places(scan: ScanResult) -> dict[tuple[str | None, int], int]:
    """Return ranks of places when all of a job are known and their nodes have as many each."""
    by_node: dict[str | None, set[int]] = {}
    for node, local in scan.places | {place for e in scan.events for place in e.places}:
        by_node.setdefault(node, set()).add(local)
    known = set(scan.node_map.seen.values()) | set(scan.node_map.given.values())
    highest = max((local for locals_ in by_node.values() for local in locals_), default=0)
    others = max(scan.ranks, default=0)
    # Nodes have one, two, four, eight... devices: so many ranks may be one node's.
    size = 1 << highest.bit_length()
    is_one_node = (scan.world_size or 0) <= size and others < size
    if len(by_node) == 1 and len(known) <= 1 and is_one_node:
        return {(node, local): local for node, locals_ in by_node.items() for local in locals_}
    if None in by_node or not by_node:
        return {}
    flat = [local for locals_ in by_node.values() for local in locals_]
    if len(set(flat)) == len(flat) and len(flat) > len(by_node):
        # No number is on two nodes: they are ranks already.
        return {(node, local): local for node, locals_ in by_node.items() for local in locals_}
    size = max(flat) + 1
    if scan.world_size is None or size * len(by_node) != scan.world_size:
        return {}
    nodes = sorted(by_node, key=_natural)
    return {
        (node, local): index * size + local
        for index, node in enumerate(nodes)
        for local in by_node[node]
    }


def _natural(name: str | None) -> list[tuple[int, str]]:
    """Return a key by which `n2` comes before `n10`."""
    parts = re.split(r"(\d+)", name or "")
    return [(int(part), "") if part.isdigit() else (-1, part) for part in parts]
