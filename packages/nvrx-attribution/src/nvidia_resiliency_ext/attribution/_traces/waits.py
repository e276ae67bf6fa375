# SPDX-License-Identifier: Apache-2.0
"""Who waits for whom: the operation at which each rank is blocked, and who has not reached it.

Edges lead from a rank to the members that have not reached its blocking operation. They are kept
once per operation, not once per rank, so that the work grows with the entries. A rank that others
wait for, and that waits for nobody, is where the job is stuck.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from nvidia_resiliency_ext.attribution._traces.dumps import Op
    from nvidia_resiliency_ext.attribution._traces.world import GroupState, World

__all__ = ["Blocking", "LagKind", "WaitGraph", "WaitPoint"]

LagKind = Literal["host", "device", "missing"]

_MOST_COMPARED = 64
_LEAST_COMMON = 2
_LONGEST_COMPARED = 12

# A member may end these before the others have come.
_ONE_SIDED = frozenset({"broadcast", "reduce", "gather", "scatter", "coalesced"})


@dataclass(slots=True, eq=False)
class WaitPoint:
    """One operation at which ranks are blocked.

    Attributes:
        group: Its process group.
        op: One rank's entry of it.
        here: Ranks blocked exactly here.
        lagging: Members that have not reached it, and how that shows.
        completed: Members that have ended it.
    """

    group: GroupState
    op: Op
    here: list[int] = field(default_factory=list)
    lagging: dict[int, LagKind] = field(default_factory=dict)
    completed: list[int] = field(default_factory=list)

    @property
    def is_frozen(self) -> bool:
        """Whether members ended it while others did not, though nobody can end it alone."""
        return bool(self.completed) and not self.op.is_p2p and self.op.name not in _ONE_SIDED


@dataclass(slots=True)
class Blocking:
    """The first operation of a rank that has not ended; of a batch of transfers, all of them."""

    op: Op
    group: GroupState
    batch: list[Op]


class WaitGraph:
    """Find the ranks that hold the others up.

    Args:
        world: The groups of all ranks.

    Attributes:
        blocking: Rank -> where it is blocked.
        points: Every operation at which a rank is blocked.
        sinks: Rank -> how it holds others up; it waits for nobody itself.
        skipped: Ranks that went past an operation of a group without calling it, while ranks at
            the same place have called theirs.
        unexplained: Ranks that wait and reach no sink: they wait for each other.
        unresolved: Operations that every member has reached and that do not end.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self.blocking = {
            rank: found for rank in world.dumps if (found := self._blocking(rank)) is not None
        }
        self._points: dict[tuple[int, object], WaitPoint] = {}
        self._point_of: dict[int, WaitPoint] = {}
        for rank, blocking in self.blocking.items():
            if blocking.op.is_p2p:
                self._add_transfer(rank, blocking)
            else:
                self._add_collective(rank, blocking)
        self.points = list(self._points.values())
        self._resolve()

    def point_of(self, rank: int) -> WaitPoint | None:
        """Return the operation at which a rank is blocked."""
        return self._point_of.get(rank)

    def waits_for(self, rank: int) -> dict[int, LagKind]:
        """Return the members that a rank waits for; empty for a frozen rank."""
        point = self._point_of.get(rank)
        return {} if point is None or point.is_frozen else point.lagging

    def cycle(self) -> list[int]:
        """Return ranks that wait for each other in a circle; empty when there is none."""
        if not self.unexplained:
            return []
        seen: dict[int, int] = {}
        path: list[int] = []
        rank = min(self.unexplained)
        while rank not in seen:
            seen[rank] = len(path)
            path.append(rank)
            rank = min(self.waits_for(rank))
        return path[seen[rank] :]

    def _blocking(self, rank: int) -> Blocking | None:
        ops = self._world.dumps[rank].ops
        for index, op in enumerate(ops):
            if op.is_done or (op.is_p2p and op.peers is None):
                continue
            batch = [op]
            if op.is_p2p:
                for other in ops[index + 1 :]:
                    if not other.is_p2p or (other.pg_name, other.p2p_seq) != (
                        op.pg_name,
                        op.p2p_seq,
                    ):
                        break
                    if not other.is_done and other.peers is not None:
                        batch.append(other)
            return Blocking(op, self._world.group_of[rank, op.pg_name], batch)
        return None

    def _add_collective(self, rank: int, blocking: Blocking) -> None:
        group, op = blocking.group, blocking.op
        key = (id(group), op.seq)
        point = self._points.get(key)
        if point is None:
            point = self._points[key] = WaitPoint(group, op)
            for member in group.members:
                self._place(point, member)
        self._point_of[rank] = point

    def _place(self, point: WaitPoint, member: int) -> None:
        group, seq = point.group, point.op.seq
        own = group.by_seq.get(member)
        if member not in self._world.dumps:
            point.lagging[member] = "missing"
        elif own is not None and seq in own:
            if all(op.is_done for op in own[seq]):
                point.completed.append(member)
            else:
                block = self.blocking[member]
                if block.group is group and not block.op.is_p2p and block.op.seq == seq:
                    point.here.append(member)
                else:
                    point.lagging[member] = "device"
        elif own is not None and group.newest[member] > seq:
            point.completed.append(member)
        elif (own is None or group.newest[member] < 0) and self._has_enqueued(member, group, seq):
            # A dump of active entries only: what was enqueued and is not in it has ended.
            point.completed.append(member)
        else:
            point.lagging[member] = "host"

    def _has_enqueued(self, member: int, group: GroupState, seq: int) -> bool:
        if group.has_p2p:
            return False
        status = self._world.status(member, group)
        return status is not None and status.enqueued >= seq

    def _add_transfer(self, rank: int, blocking: Blocking) -> None:
        group = blocking.group
        point = self._points[id(group), ("p2p", rank)] = WaitPoint(group, blocking.op, [rank])
        self._point_of[rank] = point
        for op in blocking.batch:
            assert op.peers is not None
            source, target = op.peers
            peer_number = target if op.name == "send" else source
            if peer_number >= len(group.members):
                continue
            peer = group.members[peer_number]
            if peer == rank:
                continue
            if peer not in self._world.dumps:
                point.lagging[peer] = "missing"
                continue
            pending = self._pending_transfers(peer, group, op.peers, op.name)
            if not pending:
                point.lagging[peer] = "host"
            elif (block := self.blocking.get(peer)) is None or pending[0] not in block.batch:
                point.lagging[peer] = "device"

    def _pending_transfers(
        self, peer: int, group: GroupState, peers: tuple[int, int], name: str
    ) -> list[Op]:
        return [
            op
            for op in self._world.dumps[peer].ops
            if op.peers == peers
            and op.name != name
            and not op.is_done
            and self._world.group_of[peer, op.pg_name] is group
        ]

    def _resolve(self) -> None:
        self.sinks: dict[int, LagKind] = {}
        self.unresolved: list[WaitPoint] = []
        waiting = {rank for rank in self._point_of if self.waits_for(rank)}
        for point in self.points:
            if point.is_frozen:
                self._add_frozen(point)
            elif not point.lagging:
                self._add_reached(point)
            else:
                for member, kind in point.lagging.items():
                    if member not in waiting and member not in self.blocking:
                        self.sinks[member] = kind
        self._add_idle()
        self.unexplained = waiting - self._explained(waiting)
        self.skipped = self._skipped() if self.unexplained else {}

    def _add_idle(self) -> None:
        """Name ranks with nothing pending although a peer called an operation that they lack."""
        world = self._world
        idle = [rank for rank in world.dumps if rank not in self.blocking]
        if not idle:
            return
        for group in world.groups:
            newest = max(
                (
                    seq
                    for rank, by_seq in group.by_seq.items()
                    if rank in self.blocking
                    for seq, ops in by_seq.items()
                    if not all(op.is_done for op in ops)
                ),
                default=-1,
            )
            for rank in group.members if newest >= 0 else ():
                if rank in world.dumps and rank not in self.blocking and rank not in self.sinks:
                    own = group.newest.get(rank, -1)
                    if own < newest and (own >= 0 or not self._has_enqueued(rank, group, newest)):
                        self.sinks[rank] = "host"

    def _skipped(self) -> dict[int, WaitPoint]:
        found: dict[int, WaitPoint] = {}
        for point in self.points:
            if point.is_frozen or point.group.has_p2p:
                continue
            for member, kind in point.lagging.items():
                own_point = self._point_of.get(member)
                if kind != "host" or own_point is None or member not in self.unexplained:
                    continue
                seqs = [
                    self._world.reached(rank, point.group.desc)
                    for rank in own_point.here
                    if rank not in point.lagging
                ]
                known = [seq for seq in seqs if seq is not None]
                if known and sum(seq >= point.op.seq for seq in known) * 2 > len(known):
                    found[member] = point
                elif own_point.lagging and set(own_point.lagging.values()) == {"device"}:
                    # Its peers have called both, in the other order, and more: it never called it.
                    found[member] = point
                elif any(self._is_past(member, peer) for peer in point.here[:_MOST_COMPARED]):
                    found[member] = point
        return found

    def _is_past(self, member: int, peer: int) -> bool:
        """Return whether a rank's pending calls are those of a peer after its blocking call."""
        own, others = self._pending(member), self._pending(peer)[1:]
        length = min(len(own), len(others))
        return length >= _LEAST_COMMON and own[:length] == others[:length]

    def _pending(self, rank: int) -> list[tuple[object, ...]]:
        pending = (op for op in self._world.dumps[rank].ops if not op.is_done)
        return [
            (op.pg_desc, op.name, op.peers, op.counts, op.dtypes)
            for op in islice(pending, _LONGEST_COMPARED)
        ]

    def _add_frozen(self, point: WaitPoint) -> None:
        """Name ranks in an operation that peers ended, if waited for or if all others ended it."""
        waited_for = {
            member for other in self.points if not other.is_frozen for member in other.lagging
        }
        everybody_else = len(point.completed) == len(point.group.members) - len(point.here)
        for rank in point.here:
            if rank in waited_for or everybody_else:
                self.sinks[rank] = "device"

    def _add_reached(self, point: WaitPoint) -> None:
        """Name ranks that have not started an operation that all enqueued and others started."""
        if point.op.is_p2p:
            self.unresolved.append(point)
            return
        states = {
            rank: any(op.state == "started" for op in point.group.by_seq[rank][point.op.seq])
            for rank in point.here
        }
        idle = [rank for rank, has_started in states.items() if not has_started]
        if idle and len(idle) <= len(states) // 2:
            self.sinks.update(dict.fromkeys(idle, "device"))
        else:
            self.unresolved.append(point)

    def _explained(self, waiting: set[int]) -> set[int]:
        """Return the waiting ranks from which a chain leads to a rank that does not wait."""
        behind: dict[int, list[WaitPoint]] = {}
        waiters: dict[int, list[int]] = {}
        for rank in waiting:
            waiters.setdefault(id(self._point_of[rank]), []).append(rank)
        for point in self.points:
            if not point.is_frozen:
                for member in point.lagging:
                    behind.setdefault(member, []).append(point)
        done: set[int] = set()
        queue = deque(member for member in behind if member not in waiting)
        seen = set(queue)
        while queue:
            for point in behind.get(queue.popleft(), ()):
                for rank in waiters.get(id(point), ()):
                    if rank not in seen:
                        seen.add(rank)
                        done.add(rank)
                        queue.append(rank)
        return done
