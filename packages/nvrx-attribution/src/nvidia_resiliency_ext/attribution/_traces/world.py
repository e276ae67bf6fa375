# SPDX-License-Identifier: Apache-2.0
"""The process groups of all ranks, and where each member stands in each group; it accuses nobody.

A group is known by its name and its members: after a split, a name may repeat with others in it.
Where a backend does not record the members (gloo), they are the ranks that used the group.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nvidia_resiliency_ext.attribution._traces.dumps import Dump, Op, Status, parse_members

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["GroupState", "World"]

_WORLD_NAMES = frozenset({"default_pg", "0"})
_MOST_RANKS = 1 << 20


@dataclass(slots=True, eq=False)
class GroupState:
    """One process group with the operations that its members recorded.

    Attributes:
        name: Its name.
        desc: Its description.
        members: Its ranks, sorted.
        has_p2p: Sends and receives are among its operations.
        by_seq: Rank -> sequence number -> its collectives with that number.
        newest: Rank -> highest sequence number recorded.
    """

    name: str
    desc: str
    members: tuple[int, ...]
    has_p2p: bool = False
    by_seq: dict[int, dict[int, list[Op]]] = field(default_factory=dict)
    newest: dict[int, int] = field(default_factory=dict)
    local_ids: dict[int, int] = field(default_factory=dict)


class World:
    """All ranks of a job.

    Args:
        dumps: Rank -> dump.

    Attributes:
        dumps: As given.
        groups: Every group in which something was recorded.
        group_of: (rank, group name) -> group.
        size: Highest rank known + 1.
        missing: Ranks that a group names and that have no dump, sorted.
    """

    def __init__(self, dumps: Mapping[int, Dump]) -> None:
        self.dumps = dumps
        self.group_of: dict[tuple[int, str], GroupState] = {}
        self._groups_of: dict[int, list[GroupState]] = {}
        self._parsed: dict[str, tuple[int, ...]] = {}
        self._by_key: dict[tuple[str, tuple[int, ...]], GroupState] = {}
        named = self._add_groups()
        self.size = max((*dumps, *named), default=-1) + 1
        self.missing = [rank for rank in range(self.size) if rank not in dumps]
        self._complete_members()
        self.groups = list(self._by_key.values())
        self._ids_by_desc: dict[str, Counter[int]] = {}
        for group in self.groups:
            ids = self._ids_by_desc.setdefault(group.desc, Counter())
            ids.update(group.local_ids.values())

    def status(self, rank: int, group: GroupState) -> Status | None:
        """Return a rank's counters of a group, also when it recorded nothing there.

        The number of a group on a rank is known from its operations; without any, it is the one
        that most other ranks give to groups of this description.
        """
        dump = self.dumps.get(rank)
        if dump is None:
            return None
        local_id = group.local_ids.get(rank)
        if local_id is None:
            ids = self._ids_by_desc[group.desc]
            if not ids or not group.desc:
                return None
            local_id = ids.most_common(1)[0][0]
            used = {g.local_ids.get(rank) for g in self.groups_of(rank) if g is not group}
            if local_id in used:
                return None
        return dump.status.get(local_id)

    def reached(self, rank: int, desc: str) -> int | None:
        """Return the last collective that a rank enqueued in its group of a description.

        Returns:
            Its sequence number, or None when that is not known: the rank has no such group, or
            several, or one whose counters mix collectives and transfers.
        """
        own = [group for group in self.groups_of(rank) if group.desc == desc]
        if len(own) == 1 and not own[0].has_p2p:
            return own[0].newest[rank]
        dump = self.dumps.get(rank)
        ids = self._ids_by_desc.get(desc)
        if own or dump is None or not ids:
            return None
        if sum(group.desc == desc for group in dump.groups) != 1:
            return None
        status = dump.status.get(ids.most_common(1)[0][0])
        return None if status is None else status.enqueued

    def groups_of(self, rank: int) -> list[GroupState]:
        """Return the groups in which a rank recorded something."""
        return self._groups_of.get(rank, [])

    def _add_groups(self) -> set[int]:
        named: set[int] = set()
        for rank, dump in self.dumps.items():
            members_of = {group.name: self._members(group.members_text) for group in dump.groups}
            for members in members_of.values():
                if members:
                    named.add(members[-1])
            for op in dump.ops:
                group = self.group_of.get((rank, op.pg_name))
                if group is None:
                    members = members_of.get(op.pg_name, ())
                    key = (op.pg_name, members)
                    group = self._by_key.get(key)
                    if group is None:
                        group = GroupState(op.pg_name, op.pg_desc, members)
                        self._by_key[key] = group
                    self.group_of[rank, op.pg_name] = group
                    self._groups_of.setdefault(rank, []).append(group)
                    group.local_ids[rank] = op.pg_id
                    group.by_seq[rank] = {}
                    group.newest[rank] = -1
                if op.is_p2p:
                    group.has_p2p = True
                else:
                    group.by_seq[rank].setdefault(op.seq, []).append(op)
                    group.newest[rank] = max(group.newest[rank], op.seq)
        return named

    def _members(self, text: str) -> tuple[int, ...]:
        # The world's members stand in every dump: the text is read once.
        found = self._parsed.get(text)
        if found is None:
            found = self._parsed[text] = parse_members(text)
        return found

    def _complete_members(self) -> None:
        for group in self._by_key.values():
            if group.members:
                continue
            if {group.name, group.desc} & _WORLD_NAMES:
                group.members = tuple(range(min(self.size, _MOST_RANKS)))
            else:
                group.members = tuple(sorted(group.by_seq))
