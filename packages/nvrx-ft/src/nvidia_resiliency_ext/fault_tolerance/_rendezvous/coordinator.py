# SPDX-License-Identifier: Apache-2.0
"""What the rendezvous host decides: when a round closes, opens, or the job is over. Pure.

`decide` is asked again whenever something may have changed: no event can be missed or come twice.

    phase    sees                                              decides
    OPEN     enough nodes, nobody worth waiting for            the placement
    OPEN     two launchers with one address, bad segments ...  over (failure)
    OPEN     nodes that were started with other settings       over (failure), in the first round
    OPEN     more unhealthy nodes than may be missing          over (failure)
    CLOSED   every node with a place succeeded                 over (graceful)
    CLOSED   a node with a place is lost or has left           open, or over without budget
    CLOSED   a limit was broken by a rank that may wait        hang: what do the others do?
    CLOSED   all have reported what their ranks do, or 3 s passed  hang: whom to blame
    CLOSED   a node that must go                               leave, and agree where ranks save
    CLOSED   all left, and enough without those that must go   open
    CLOSED   min-healthy: too few nodes healthy or done        open, or over without budget
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from nvidia_resiliency_ext.fault_tolerance._core import errors
from nvidia_resiliency_ext.fault_tolerance._core.machine import Cause, agreed_call
from nvidia_resiliency_ext.shared_utils import hang_culprit
from nvidia_resiliency_ext.shared_utils.rank_activity import Activity

from . import restarts
from .keys import LEASES_IN_DOUBT, LEASES_TO_EXPIRY
from .placement import NotEnough, Placement, PlacementError, PlacementRules, place
from .records import Arrival, Entry, HangStage, Kind, NodeMessage, Phase, WorkerState
from .restarts import BlameRules, Budget, Failures, is_named

LOOK_AGAIN_S = 1.0  # A node that dies between its two writes delays a round by no more.
LAST_CALL_LOOK_S = 0.1
HANG_ANSWERS_S = 3.0  # How long nodes are waited for that do not say what their ranks do.
_BROKEN = (WorkerState.UNHEALTHY, WorkerState.FAILED, WorkerState.UNKNOWN)


@dataclass(frozen=True, slots=True)
class CoordinatorRules:
    """Rules of the coordinator's decisions. Times are seconds."""

    placement: PlacementRules
    budget: Budget
    lease_s: float
    blame: BlameRules = field(default_factory=BlameRules)
    last_call_s: float = 1.0
    min_healthy: bool = False
    counts_unhealthy: bool = True


@dataclass(slots=True)
class Memory:
    """State that the coordinator keeps between rounds. Times are of its monotonic clock."""

    active: tuple[Arrival, ...] = ()  # With a place in the last closed round, by rank.
    spares: frozenset[str] = frozenset()
    unhealthy: frozenset[str] = frozenset()
    gone: frozenset[str] = frozenset()
    failures: Failures = field(default_factory=dict)
    excluded: frozenset[str] = frozenset()
    enough_since: float | None = None
    resumed_at: float | None = None  # When it took the job up from a host that may know more nodes.


@dataclass(frozen=True, slots=True)
class View:
    """The store's content at `now` (monotonic s), with the rules and the memory to evaluate it."""

    rules: CoordinatorRules
    memory: Memory
    now: float
    entry: Entry
    messages: tuple[NodeMessage, ...] = ()
    quiet_s: Mapping[str, float] = field(default_factory=dict)  # How long a lease did not move.
    entry_age_s: float = 0.0
    me: str = ""  # Who looks.


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing is to be done; look again at `until` at the latest (monotonic s)."""

    until: float
    why: str = ""
    is_last_call: bool = False  # There are enough nodes; others are given a moment to come.


Decision = Wait | Placement | Entry


def arrived(messages: tuple[NodeMessage, ...]) -> dict[str, Arrival]:
    """Return the nodes that are there: arrived, and not gone since."""
    there: dict[str, Arrival] = {}
    for message in messages:
        if message.kind is Kind.ARRIVED and message.arrival is not None:
            there[message.node] = message.arrival
        elif message.kind in (Kind.LEFT, Kind.UNHEALTHY):
            there.pop(message.node, None)
    return there


def carried_over(memory: Memory, messages: tuple[NodeMessage, ...]) -> Memory:
    """Return the memory for the next round, updated by all messages of the round that ends."""
    active = {member.node for member in memory.active}
    return dataclasses.replace(
        memory,
        spares=frozenset(arrived(messages).keys() - active),
        unhealthy=memory.unhealthy | {n.node for n in messages if n.kind is Kind.UNHEALTHY},
        gone=memory.gone | nodes_gone(messages),
        enough_since=None,
    )


def decide(view: View) -> Decision:
    """Return the next entry of the log, a placement that closes the round, or how long to wait."""
    if view.entry.phase is Phase.OPEN:
        return _while_open(view)
    if view.entry.phase is Phase.CLOSED:
        return _while_closed(view)
    return Wait(view.now + LOOK_AGAIN_S)


def expiry_s(rules: CoordinatorRules) -> float:
    """Return after how long without a sign a node counts as lost."""
    return LEASES_TO_EXPIRY * rules.lease_s


def _while_open(view: View) -> Decision:
    rules, memory, now = view.rules, view.memory, view.now
    for message in view.messages:
        if message.kind is Kind.MISMATCH and not memory.active:
            return _failure(view, "mismatch", message.text)
    unhealthy = memory.unhealthy | {n.node for n in view.messages if n.kind is Kind.UNHEALTHY}
    surplus = rules.placement.max_nodes - rules.placement.min_nodes
    if rules.counts_unhealthy and len(unhealthy) > surplus:
        return _failure(
            view,
            "unhealthy",
            f"{len(unhealthy)} nodes are unhealthy, and --nnodes allows {surplus} to be missing:"
            f" {', '.join(sorted(unhealthy))}",
        )
    limit = expiry_s(rules)
    there = {n: a for n, a in arrived(view.messages).items() if view.quiet_s.get(n, 0.0) <= limit}
    blamed = restarts.blamed(memory.failures, now, rules.blame)
    try:
        result = place_all(view, there, blamed)
    except PlacementError as error:
        # One of them may be dead, and its place be taken by the launcher that follows it.
        if any(
            view.quiet_s.get(node, 0.0) > LEASES_IN_DOUBT * rules.lease_s for node in error.nodes
        ):
            return Wait(now + LOOK_AGAIN_S, str(error))
        return _failure(view, "placement", str(error))
    if isinstance(result, NotEnough):
        return Wait(now + LOOK_AGAIN_S, result.reason)
    gone = memory.gone | nodes_gone(view.messages)
    # Who had a place before and is neither here nor gone nor lost.
    absent = [
        member
        for member in memory.active
        if (node := member.node) not in there
        and node not in gone
        and view.quiet_s.get(node, limit) < limit
    ]
    knows = {n.node for n in view.messages if n.kind is Kind.ACKNOWLEDGED}
    doubtful = [m.host for m in absent if m.node not in knows]
    if doubtful:
        # It may be cut off and train on: nobody starts beside it before its lease has expired.
        why = f"no sign of life of {', '.join(doubtful)}, active before"
        return Wait(now + LAST_CALL_LOOK_S, why, is_last_call=True)
    since = memory.enough_since if memory.enough_since is not None else now
    late = [n for n in memory.spares if n not in there and view.quiet_s.get(n, limit) < limit]
    why = _last_call(view, result, late, absent)
    if late and not why:
        unwanted = [
            c.host
            for c in result.active
            if c.host in blamed or is_named(c.host, c.addr, memory.excluded)
        ]
        why = f"spare nodes in place of {', '.join(unwanted)}" if unwanted else ""
    if why and now < since + rules.last_call_s:
        until = min(since + rules.last_call_s, now + LAST_CALL_LOOK_S)
        return Wait(until, why, is_last_call=True)
    return result


def nodes_gone(messages: tuple[NodeMessage, ...]) -> frozenset[str]:
    return frozenset(n.node for n in messages if n.kind in (Kind.LEFT, Kind.UNHEALTHY))


def place_all(
    view: View, there: Mapping[str, Arrival], blamed: frozenset[str]
) -> Placement | NotEnough:
    """Choose the nodes that work; take denied hosts and repeatedly failing ones only if needed.

    Raises PlacementError: these nodes cannot work together.
    """
    rules = view.rules.placement
    bad = {n.node for n in view.messages if n.kind is Kind.UNHEALTHY}
    groups = (n.arrival.group for n in view.messages if n.arrival and n.node in bad)
    bad_groups = frozenset(group for group in groups if group is not None)
    candidates = list(there.values())
    result = place(candidates, rules, bad_groups)
    if isinstance(result, NotEnough):
        return result
    named = [c for c in candidates if is_named(c.host, c.addr, view.memory.excluded)]
    failed = [c for c in candidates if c.host in blamed and c not in named]
    out: list[tuple[list[Arrival], str]] = []
    # Where all nodes work that come, those that are named still have to go.
    for nodes, why, may_be_fewer in (
        (named, "named by attribution", True),
        (failed, "failed again and again", False),
    ):
        kept = [c for c in candidates if c not in nodes]
        better: Placement | NotEnough | None = None
        with contextlib.suppress(PlacementError):
            better = place(kept, rules, bad_groups) if nodes else None
        if isinstance(better, Placement) and (
            may_be_fewer or len(better.active) >= len(result.active)
        ):
            candidates, result = kept, better
            out.append((nodes, why))
    for nodes, why in out:
        result = result.without(nodes, why)
    return result


def _last_call(view: View, result: Placement, late: list[str], absent: list[Arrival]) -> str:
    """Return the nodes for which a round with enough nodes stays open, in words, or ''."""
    placement = view.rules.placement
    may_be_more = placement.elastic and len(result.active) < placement.max_nodes
    if may_be_more and (absent or late or not view.memory.active):
        return "more nodes may come"
    if not absent:
        return ""
    return f"active before: {', '.join(member.host for member in absent)}"


def _while_closed(view: View) -> Decision:
    rules, memory, now = view.rules, view.memory, view.now
    messages = (*view.messages, *losses(view))
    states = _states(memory, messages)
    done = sum(states[member.node] is WorkerState.SUCCEEDED for member in memory.active)
    if memory.active and done == len(memory.active):
        drained = _goes_on_without(view)
        if drained:
            return view.entry.opened(view.me, drained)
        if view.entry.save_at and may_have_more_nodes(rules, memory, now):
            return Wait(now + LAST_CALL_LOOK_S, "spares may come back")
        return view.entry.over(view.me, errors.RDZV_SHUTDOWN_REASON_GRACEFUL)
    broken = [member for member in memory.active if states[member.node] in _BROKEN]
    if not broken:
        patience_s = min(rules.lease_s / 4, LAST_CALL_LOOK_S if view.entry.hang else rules.lease_s)
        return _leave(view) or _hang(view) or Wait(now + patience_s)
    healthy = len(memory.active) - done - len(broken)
    if rules.min_healthy:
        if healthy == 0 and done >= rules.placement.min_nodes:
            return view.entry.over(view.me, errors.RDZV_SHUTDOWN_REASON_GRACEFUL)
        if healthy + done >= rules.placement.min_nodes:
            return Wait(now + rules.lease_s / 4)
    causes = (n.cause for n in messages if n.cause is not None and states.get(n.node) in _BROKEN)
    cause = next(causes, None) or _lost(broken[0])
    if rules.budget.left(view.entry, view.entry_age_s) > 0:
        return view.entry.opened(view.me, cause)
    return view.entry.over(view.me, errors.RDZV_SHUTDOWN_REASON_FAILURE, cause)


def _hang(view: View) -> Entry | None:
    """Return the next decision on a hang: ask nodes for their ranks' states, or name the culprit.

    What is certain is not waited for: a stopped rank is to blame, whatever the others do.
    """
    reports = {message.node: message for message in view.messages if message.kind is Kind.HUNG}
    complaint = next((n.cause for n in view.messages if n.kind is Kind.HUNG and n.cause), None)
    if complaint is None or view.entry.hang == HangStage.EVALUATED:
        return None
    states = [state for message in reports.values() for state in message.ranks]
    finding = hang_culprit.find_culprit(states, view.entry.world_size)
    silent = [m.host for m in view.memory.active if m.node not in reports]
    is_over = view.entry.hang == HangStage.ASKED and view.entry_age_s >= HANG_ANSWERS_S
    if silent and not is_over and finding.confidence is not hang_culprit.Confidence.CERTAIN:
        return None if view.entry.hang else view.entry.again(view.me, hang=HangStage.ASKED)
    cause = _hang_cause(finding, complaint, silent)
    return view.entry.again(view.me, hang=HangStage.EVALUATED, cause=cause)


def _hang_cause(finding: hang_culprit.Finding, complaint: Cause, silent: Sequence[str]) -> Cause:
    """Return why a round ends in which a rank broke a limit; its `detail` has `limit_words`."""
    broken = complaint.detail.get("limit_words", complaint.what)
    what = f"{hang_culprit.describe(finding)} ({broken})"
    if silent and finding.confidence is not hang_culprit.Confidence.CERTAIN:
        what += f"; no answer from {', '.join(silent)}"
    culprit = finding.culprits[0] if finding.culprits else None
    has_failed = culprit is not None and culprit.activity is Activity.FAILED
    detail = {**complaint.detail, "confidence": finding.confidence.value}
    detail["culprits"] = ",".join(str(state.rank) for state in finding.culprits)
    return Cause(
        "exception" if has_failed else complaint.kind,
        what,
        None if culprit is None else culprit.rank,
        host="" if culprit is None else culprit.host,
        detected_by="monitor",
        detail=detail,
    )


def may_have_more_nodes(rules: CoordinatorRules, memory: Memory, now: float) -> bool:
    """Return whether nodes may live that have not come back to this host yet."""
    since = memory.resumed_at
    return since is not None and now < since + LEASES_IN_DOUBT * rules.lease_s


def _must_go(view: View) -> dict[str, Cause]:
    unknown = Cause("preempted", "a node must go")
    return {n.node: n.cause or unknown for n in view.messages if n.kind is Kind.PREEMPTED}


def _leave(view: View) -> Entry | None:
    """Return the next step of a round that a node must leave; without its store it is over, too."""
    active = {member.node for member in view.memory.active}
    concerned = active | {view.me}
    causes = [cause for node, cause in _must_go(view).items() if node in concerned]
    if not causes or view.entry.save_at:
        return None
    if not view.entry.is_leaving:
        return view.entry.again(view.me, cause=causes[0], is_leaving=True)
    held = {message.node: message.calls for message in view.messages if message.kind is Kind.HELD}
    done = {n.node for n in view.messages if n.state is WorkerState.SUCCEEDED}
    if not active - done <= held.keys():
        return None
    return view.entry.again(view.me, cause=causes[0], save_at=agreed_call(held.values()))


def _goes_on_without(view: View) -> Cause | None:
    """Return why the job goes on without nodes that had to go, or None when it is over."""
    rules, memory, going = view.rules, view.memory, _must_go(view)
    if (
        not view.entry.save_at
        or view.me in going
        or rules.budget.left(view.entry, view.entry_age_s) <= 0
    ):
        return None
    limit = expiry_s(rules)
    gone = nodes_gone(view.messages) | going.keys()
    there = {member.node for member in memory.active} | memory.spares
    there |= {message.node for message in view.messages if message.kind is Kind.ARRIVED}
    left = [node for node in there - gone if view.quiet_s.get(node, 0.0) <= limit]
    if len(left) < rules.placement.min_nodes:
        return None
    return next(iter(going.values()), None)


def losses(view: View) -> tuple[NodeMessage, ...]:
    """Return a message for each lost node of a closed round that has none yet."""
    if view.entry.phase is not Phase.CLOSED:
        return ()
    limit, states = expiry_s(view.rules), _states(view.memory, view.messages)
    return tuple(
        NodeMessage(Kind.STATE, node, state=WorkerState.UNKNOWN, cause=_lost(member))
        for member in view.memory.active
        if states[node := member.node] is WorkerState.HEALTHY
        and view.quiet_s.get(node, 0.0) > limit
    )


def _states(memory: Memory, messages: Sequence[NodeMessage]) -> dict[str, WorkerState]:
    states = {member.node: WorkerState.HEALTHY for member in memory.active}
    for message in messages:
        if states.get(message.node) in (None, WorkerState.SUCCEEDED):
            continue
        if message.kind is Kind.STATE and message.state is not None:
            states[message.node] = message.state
        elif message.kind in (Kind.LEFT, Kind.UNHEALTHY):
            states[message.node] = WorkerState.UNKNOWN
    return states


def _lost(member: Arrival) -> Cause:
    what = f"host {member.host} is lost: no sign of life of its launcher"
    return Cause("node_lost", what, host=member.host, detected_by="lease")


def _failure(view: View, kind: str, what: str) -> Entry:
    cause = Cause(kind, what, detected_by="rendezvous")
    return view.entry.over(view.me, errors.RDZV_SHUTDOWN_REASON_FAILURE, cause)
