# SPDX-License-Identifier: Apache-2.0
"""Operations of the iteration protocol on a store; callers decide when to use which.

An object belongs to one thread, with a connection of its own. Errors: `StoreLostError` when the
store does not answer, `ForeignValueError` when a key holds what none of us writes.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from typing import Any

from nvidia_resiliency_ext.inprocess._store.access import StoreAccess
from nvidia_resiliency_ext.inprocess._store.endpoint import (
    ForeignValueError,
    IterationKeys,
    iteration_keys,
    require_number,
)
from nvidia_resiliency_ext.inprocess.attribution import Interruption, InterruptionRecord

from .decision import (
    Arrival,
    Decision,
    NodeEntry,
    decide,
    decode_decision,
    encode_decision,
    format_arrival,
    format_node,
    format_records,
    have_all_reported,
    is_complete,
    is_whole,
    parse_arrivals,
    parse_nodes,
    parse_records,
)

_LEASE_WAIT_S = 1.0
KEPT_OUTCOMES = 8
"""Of so many iterations the outcome and the decision are kept."""


class Outcome(enum.Enum):
    COMPLETED = "completed"
    INTERRUPTED = "interrupted"


_INTERRUPTED = Outcome.INTERRUPTED.value + ";"


class IterationStore:
    """The protocol's keys of one call, in a store."""

    def __init__(self, store: Any, prefix: str) -> None:
        self._access = StoreAccess(store)
        self._prefix = prefix
        # Records that never change once they stand, of the latest iteration.
        self._first: tuple[int, tuple[InterruptionRecord, ...]] = (-1, ())
        self._all_reported: tuple[int, tuple[InterruptionRecord, ...]] = (-1, ())

    @property
    def operations(self) -> int:
        return self._access.operations

    def complete(self, iteration: int, arrival: Arrival) -> None:
        """Record that a rank has completed, or is a reserve; the last one decides the outcome."""
        keys = self._keys(iteration)
        self._access.append(keys.completions, format_arrival(arrival))
        # If others report, this one is not waited for.
        self._access.add(keys.reported, 1)
        count = self._access.add(keys.completed, 1)
        if arrival.world_size is not None and count >= arrival.world_size:
            self._settle_completion(keys)

    def interrupt(
        self, iteration: int, records: Sequence[InterruptionRecord], participants: frozenset[int]
    ) -> Outcome:
        """Report interruptions of initial ranks; return the outcome, which may be another one."""
        keys = self._keys(iteration)
        text = format_records(records)
        # The first report travels with the outcome: one operation, and it is known to all.
        found = self._access.settle(keys.outcome, _INTERRUPTED + text)
        outcome = self._keep_outcome(iteration, found)
        if outcome is Outcome.COMPLETED:
            return outcome
        is_first = found == _INTERRUPTED + text
        if not is_first:
            self._access.append(keys.interruption_records, text)
        if not is_first and all(r.interruption is Interruption.SOFT_TIMEOUT for r in records):
            # Saves an operation; at worst the last call, after a whole soft timeout, is not cut
            # short.
            return outcome
        ranks = len({record.rank for record in records})
        # Of the first report, which nobody can overlook, one rank is taken as counted.
        self._count_reported(iteration, ranks - 1 if is_first else ranks, participants)
        return outcome

    def arrive(
        self,
        iteration: int,
        arrival: Arrival,
        participants: frozenset[int],
        *,
        has_reported: bool = False,
    ) -> None:
        """Record in which form a participant reached the end; the last one makes the decision.

        `has_reported` tells that a record of this rank was written, so that it is counted already.
        """
        keys = self._keys(iteration)
        self._access.append(keys.arrivals, format_arrival(arrival))
        if self._access.add(keys.arrived, 1) >= len(participants):
            if self._settle_decision(keys, participants) is not None:
                self._forget_old(iteration)
        elif not arrival.goes_on and not has_reported:
            # No record will come of it any more.
            self._count_reported(iteration, 1, participants)

    def look(self, iteration: int, participants: frozenset[int]) -> Decision | None:
        """Decide in place of a monitor that has ended; for a monitor that waits in vain."""
        keys = self._keys(iteration)
        self._settle_completion(keys)
        return self._settle_decision(keys, participants)

    def outcome(self, iteration: int, timeout_s: float) -> Outcome | None:
        """Wait until the outcome stands; None after `timeout_s`.

        Of an iteration that all others have left far behind it is an interruption.
        """
        text = self._access.get(self._keys(iteration).outcome, timeout_s)
        if text is None:
            return Outcome.INTERRUPTED if self._is_forgotten(iteration) else None
        return self._keep_outcome(iteration, text)

    def wait_all_reported(self, iteration: int, timeout_s: float) -> bool:
        """Wait until no record can come any more; False after `timeout_s`."""
        if timeout_s <= 0:
            return False
        key = self._keys(iteration).all_reported
        text = self._access.get(key, timeout_s)
        if text is None:
            return False
        self._all_reported = iteration, tuple(parse_records(text, key))
        return True

    def records(self, iteration: int) -> tuple[InterruptionRecord, ...]:
        """Return the interruption records so far; without an operation where all have reported."""
        known, records = self._all_reported
        return records if known == iteration else self._read_records(iteration)

    def first_records(self, iteration: int) -> tuple[InterruptionRecord, ...]:
        """Return the records of the outcome that was read; without an operation."""
        known, records = self._first
        return records if known == iteration else ()

    def decision(self, iteration: int, timeout_s: float) -> Decision | None:
        """Wait until the decision stands; None after `timeout_s`.

        Of an iteration that all others have left far behind it is that nobody here goes on.
        """
        key = self._keys(iteration).decision
        text = self._access.get(key, timeout_s)
        if text is None:
            return Decision(0, {}, (), ()) if self._is_forgotten(iteration) else None
        return decode_decision(text, key)

    def register_node(self, node: NodeEntry) -> None:
        """Announce a node and its lease, or a new monitor of it."""
        # The lease first: a monitor that reads of the node may then ask for it.
        self.renew_lease(node.node_id)
        self._access.append(f"{self._prefix}nodes", format_node(node))

    def nodes(self) -> list[NodeEntry]:
        """Return all nodes that were announced, by number."""
        key = f"{self._prefix}nodes"
        return parse_nodes(self._access.peek(key) or "", key)

    def renew_lease(self, node_id: int) -> None:
        self._access.add(f"{self._prefix}lease_{node_id}", 1)

    def leases(self, node_ids: Iterable[int]) -> dict[int, int]:
        """Return the leases of nodes that were announced; they only ever grow."""
        keys = {f"{self._prefix}lease_{node_id}": node_id for node_id in node_ids}
        texts = self._access.get_all(list(keys), _LEASE_WAIT_S)
        found = zip(keys.items(), texts, strict=True)
        return {node: require_number(key, text) for (key, node), text in found if text is not None}

    def forget(self, iteration: int) -> None:
        """Remove the lists of an iteration that has been decided; outcome and decision stay."""
        keys = self._keys(iteration)
        for key in keys:
            if key not in (keys.outcome, keys.decision):
                self._access.delete(key)

    def _forget_old(self, iteration: int) -> None:
        """Remove the lists of the last iteration, outcome and decision of a much older one."""
        if iteration > 0:
            self.forget(iteration - 1)
        if iteration >= KEPT_OUTCOMES:
            self._access.set(f"{self._prefix}oldest", str(iteration - KEPT_OUTCOMES + 1))
            old = self._keys(iteration - KEPT_OUTCOMES)
            self._access.delete(old.outcome)
            self._access.delete(old.decision)

    def _is_forgotten(self, iteration: int) -> bool:
        key = f"{self._prefix}oldest"
        return iteration < require_number(key, self._access.peek(key) or "0")

    def _keys(self, iteration: int) -> IterationKeys:
        return iteration_keys(self._prefix, iteration)

    def _settle_completion(self, keys: IterationKeys) -> None:
        text = self._access.peek(keys.completions)
        if text is not None and is_complete(parse_arrivals(text, keys.completions)):
            self._access.settle(keys.outcome, Outcome.COMPLETED.value)

    def _count_reported(self, iteration: int, ranks: int, participants: frozenset[int]) -> None:
        keys = self._keys(iteration)
        # A rank may count twice: the count only says when it is worth looking.
        count = self._access.add(keys.reported, ranks) if ranks else 0
        if count + 1 < len(participants):
            return
        records, silent = self._read_records(iteration), list[Arrival]()
        for key in (keys.arrivals, keys.completions):
            silent += parse_arrivals(self._access.peek(key) or "", key)
            if have_all_reported(records, silent, participants):
                self._access.set(keys.all_reported, format_records(records))
                return

    def _read_records(self, iteration: int) -> tuple[InterruptionRecord, ...]:
        keys = self._keys(iteration)
        # Others wait for the outcome, so it is not to be peeked at while it is missing.
        if self._first[0] != iteration and self._access.check(keys.outcome):
            text = self._access.peek(keys.outcome)
            if text is not None:
                self._keep_outcome(iteration, text)
        return self._with_later(self.first_records(iteration), keys)

    def _keep_outcome(self, iteration: int, text: str) -> Outcome:
        outcome, first = _parse_outcome(text, self._keys(iteration).outcome)
        self._first = iteration, tuple(first)
        return outcome

    def _with_later(
        self, first: Iterable[InterruptionRecord], keys: IterationKeys
    ) -> tuple[InterruptionRecord, ...]:
        later = self._access.peek(keys.interruption_records) or ""
        return tuple(dict.fromkeys([*first, *parse_records(later, keys.interruption_records)]))

    def _settle_decision(
        self, keys: IterationKeys, participants: frozenset[int]
    ) -> Decision | None:
        text = self._access.peek(keys.arrivals)
        arrivals = parse_arrivals(text or "", keys.arrivals)
        if not is_whole(arrivals, participants):
            return None
        # Everybody may have left without a word: that is an interruption, too.
        standing = self._access.settle(keys.outcome, _INTERRUPTED)
        outcome, first = _parse_outcome(standing, keys.outcome)
        if outcome is Outcome.COMPLETED:
            return None
        records = self._with_later(first, keys)
        decided = encode_decision(decide(arrivals, participants, records))
        return decode_decision(self._access.settle(keys.decision, decided), keys.decision)


def _parse_outcome(text: str, key: str) -> tuple[Outcome, list[InterruptionRecord]]:
    if text == Outcome.COMPLETED.value:
        return Outcome.COMPLETED, []
    if text.startswith(_INTERRUPTED):
        return Outcome.INTERRUPTED, parse_records(text[len(_INTERRUPTED) :], key)
    raise ForeignValueError(key, text)
