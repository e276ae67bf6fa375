# SPDX-License-Identifier: Apache-2.0
"""Add barriers and the exchange of ranks, states and records to torch's stores.

Only the last rank to arrive reads the list of a re-entrant barrier; if it died before reading, each
waiting rank reads the list once per slice.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from datetime import timedelta
from typing import Any, cast

from nvidia_resiliency_ext.inprocess.attribution import InterruptionRecord
from nvidia_resiliency_ext.inprocess.exception import RestartError
from nvidia_resiliency_ext.inprocess.state import Mode, State
from nvidia_resiliency_ext.shared_utils.clock import Deadline

from .access import StoreAccess
from .endpoint import ForeignValueError, require_json, require_number

_PREFIX = "inprocess_barrier_prefix"
_LONGEST_SLICE_S = 10.0
_DONE = "1"
_CLOSED = "0"


class BarrierError(RestartError):
    """A barrier was not passed."""


class BarrierTimeout(BarrierError):  # noqa: N818 - the name is given
    """Not all ranks arrived in time."""


class BarrierOverflow(BarrierError):  # noqa: N818 - the name is given
    """More ranks arrived than belong there."""


def pass_barrier(
    access: StoreAccess,
    ranks: Collection[int],
    group_name: str,
    rendezvous_count: int,
    timeout: timedelta | None,
    timeout_chunk: timedelta | None,
) -> bool:
    """Arrive for `ranks` and wait until so many have arrived; once per store and name.

    Return True where this call completed it; others learn from `close_barrier` how it ended.
    """
    arrived, _, done = _barrier_keys("barrier", group_name)
    count = access.add(arrived, len(ranks))
    if count > rendezvous_count:
        raise _overflow(group_name, count, rendezvous_count)
    if count == rendezvous_count:
        return access.settle(done, _DONE) == _DONE
    if _is_no_wait(timeout):
        raise _too_late(group_name, count, rendezvous_count, timeout)
    if not _wait(access, done, timeout, timeout_chunk, lambda: False):
        raise _too_late(group_name, access.add(arrived, 0), rendezvous_count, timeout)
    return False


def close_barrier(access: StoreAccess, group_name: str) -> int:
    """Close a barrier and wake its ranks; return how many had arrived, 0 if all had."""
    arrived, _, done = _barrier_keys("barrier", group_name)
    return access.add(arrived, 0) if access.settle(done, _CLOSED) == _CLOSED else 0


def _barrier_keys(kind: str, group_name: str) -> tuple[str, str, str]:
    base = f"{_PREFIX}:{kind}:{group_name}"
    return f"{base}:arrived", f"{base}:count", f"{base}:last_worker_arrived"


def _read_ranks(access: StoreAccess, key: str) -> set[int]:
    """Return the ranks of a text such as `3,5,`; a ForeignValueError for anything else."""
    text = access.peek(key) or ""
    return {require_number(key, part) for part in text.removesuffix(",").split(",") if text}


def _wait(
    access: StoreAccess,
    done: str,
    timeout: timedelta | None,
    timeout_chunk: timedelta | None,
    look: Callable[[], bool],
) -> bool:
    deadline = Deadline.after(None if timeout is None else timeout.total_seconds())
    slice_s = _LONGEST_SLICE_S
    if timeout_chunk is not None:
        slice_s = min(slice_s, timeout_chunk.total_seconds())
    while not deadline.expired():
        if access.wait(done, min(deadline.remaining(), slice_s)) or look():
            return True
    return access.check(done)


def _is_no_wait(timeout: timedelta | None) -> bool:
    return timeout is not None and timeout <= timedelta(0)


def _overflow(group_name: str, count: int, rendezvous_count: int) -> BarrierOverflow:
    return BarrierOverflow(f"{group_name}: {count} ranks for {rendezvous_count} places")


def _too_late(
    group_name: str, arrived: int, rendezvous_count: int, timeout: timedelta | None
) -> BarrierTimeout:
    limit_s = 0.0 if timeout is None else timeout.total_seconds()
    return BarrierTimeout(
        f"{group_name}: {arrived} of {rendezvous_count} ranks have arrived within {limit_s:g} s"
    )


_INTERRUPTED = "any_rank_interrupted"
_COMPLETED = "any_rank_completed"
_RECORDS = "interruption_records"
_RECORDS_LOCK = "interruption_records_lock"
_TERMINATED = "terminated_ranks"


class StoreMixin:
    """Barriers and exchanges between ranks; mix it into any torch Store, before torch's class.

    Ranks write plain text and JSON. Any other value raises `ForeignValueError`, a store
    that does not answer `StoreLostError`. Waits raise `torch.distributed.DistStoreError` when time
    is over.

    The named barriers take `ranks`, `rendezvous_count`, `timeout` and `timeout_chunk` as `barrier`
    does. In all other methods `rank` and `ranks` are numbers of the current iteration, and a method
    that reads waits until every requested value is there.

    Attributes:
        critical_ranks: Ranks whose end ends the store.
    """

    critical_ranks: tuple[int, ...] = ()

    # Barriers. torch has a method `barrier` of its own since 2.13; this one stands before it.

    def barrier(
        self,
        ranks: Collection[int],
        group_name: str,
        rendezvous_count: int,
        timeout: timedelta | None,
        timeout_chunk: timedelta | None = None,
    ) -> None:
        """Arrive for `ranks` and wait for the others; once per store and name.

        Args:
            ranks: The ranks that arrive.
            group_name: Name of the barrier.
            rendezvous_count: Number of ranks to wait for.
            timeout: Longest wait; None: no limit.
            timeout_chunk: Longest single wait in the store; None: chosen here.

        Raises:
            BarrierTimeout: Not all ranks arrived in time.
            BarrierOverflow: More ranks arrived than were waited for.
        """
        pass_barrier(self._access(), ranks, group_name, rendezvous_count, timeout, timeout_chunk)

    def reentrant_barrier(
        self,
        ranks: Collection[int],
        group_name: str,
        rendezvous_count: int,
        timeout: timedelta | None,
        timeout_chunk: timedelta | None = None,
    ) -> None:
        """Arrive and wait as at `barrier`; a rank that arrives again counts once.

        `ranks`, `group_name`, `rendezvous_count`, `timeout` and `timeout_chunk` are as there.

        Raises:
            BarrierTimeout: Not all ranks arrived in time.
        """
        access = self._access()
        arrived, count, done = _barrier_keys("reentrant_barrier", group_name)

        def look() -> bool:
            number = len(_read_ranks(access, arrived))
            if number > rendezvous_count:
                raise _overflow(group_name, number, rendezvous_count)
            if number == rendezvous_count:
                access.set(done, _DONE)
            return number == rendezvous_count

        access.append(arrived, "".join(f"{rank}," for rank in ranks))
        if access.add(count, len(ranks)) >= rendezvous_count and look():
            return
        # A caller that only arrives, as for another rank, asks the store nothing more.
        if _is_no_wait(timeout):
            raise BarrierTimeout(f"{group_name}: not all of {rendezvous_count} ranks have arrived")
        if not _wait(access, done, timeout, timeout_chunk, look):
            number = len(_read_ranks(access, arrived))
            raise _too_late(group_name, number, rendezvous_count, timeout)

    def is_rank_at_reentrant_barrier(self, rank: int, group_name: str) -> bool:
        """Return whether `rank` has arrived at `group_name`, itself or by another process."""
        arrived, _, _ = _barrier_keys("reentrant_barrier", group_name)
        return rank in _read_ranks(self._access(), arrived)

    def initial_barrier(
        self,
        ranks: Collection[int],
        rendezvous_count: int,
        timeout: timedelta | None,
        timeout_chunk: timedelta | None = None,
    ) -> None:
        """Pass the barrier before the first iteration."""
        # Not self.barrier: what another class puts under that name is none of ours.
        StoreMixin.barrier(self, ranks, "initial_barrier", rendezvous_count, timeout, timeout_chunk)

    def completion_barrier(
        self,
        ranks: Collection[int],
        rendezvous_count: int,
        timeout: timedelta | None,
        timeout_chunk: timedelta | None = None,
    ) -> None:
        """Pass the barrier of the ranks that have completed an iteration."""
        StoreMixin.barrier(
            self, ranks, "completion_barrier", rendezvous_count, timeout, timeout_chunk
        )

    def iteration_barrier(
        self,
        ranks: Collection[int],
        rendezvous_count: int,
        timeout: timedelta | None,
        timeout_chunk: timedelta | None = None,
    ) -> None:
        """Pass the barrier at the end of an interrupted iteration."""
        self.reentrant_barrier(ranks, "iteration_barrier", rendezvous_count, timeout, timeout_chunk)

    def termination_barrier(
        self,
        ranks: Collection[int],
        rendezvous_count: int,
        timeout: timedelta | None,
        timeout_chunk: timedelta | None = None,
    ) -> None:
        """Pass the barrier before the store may end."""
        self.reentrant_barrier(
            ranks, "termination_barrier", rendezvous_count, timeout, timeout_chunk
        )

    # Ranks.

    def set_initial_rank(self, rank: int, initial_rank: int) -> None:
        """Store the `initial_rank` of `rank`."""
        self._access().set(f"initial_rank_{rank}", str(initial_rank))

    def get_initial_ranks(self, ranks: Iterable[int]) -> list[int]:
        """Return the initial ranks of ranks; waits until all are known."""
        found = self._texts(f"initial_rank_{rank}" for rank in ranks)
        return [require_number(key, text) for key, text in found]

    def set_active_rank(self, rank: int, active_rank: int | None) -> None:
        """Store the `active_rank` of `rank`; None for a reserve."""
        self._access().set(f"active_rank_{rank}", json.dumps(active_rank))

    def get_all_active_ranks(self, world_size: int) -> list[int | None]:
        """Return the active rank of each of `world_size` ranks; waits until all are known."""
        found = self._texts(f"active_rank_{rank}" for rank in range(world_size))
        return [None if text == "null" else require_number(key, text) for key, text in found]

    def send_heartbeat(self, rank: int) -> None:
        """Store the time of this host as the last heartbeat of a rank."""
        self._access().set(f"heartbeat_{rank}", repr(time.time()))

    def get_heartbeat(self, rank: int) -> float:
        """Return a rank's last heartbeat in seconds since 1970; waits until it has sent one."""
        return self.get_all_heartbeats([rank])[0]

    def get_all_heartbeats(self, ranks: Iterable[int]) -> list[float]:
        """Return ranks' last heartbeats in seconds since 1970; waits until all have sent one."""
        return [_seconds(key, text) for key, text in self._texts(f"heartbeat_{r}" for r in ranks)]

    # What ranks tell each other for the assignment of ranks.

    def send_state(self, state: State, rank: int) -> None:
        """Store `state`, without its exception, for `rank`."""
        fields = {
            field.name: getattr(state, field.name)
            for field in dataclasses.fields(state)
            if field.name != "fn_exception"
        }
        fields["mode"] = state.mode.name
        self._access().set(f"state_{rank}", json.dumps(fields))

    def get_states(self, ranks: Iterable[int]) -> list[State]:
        """Return the states of ranks; waits until all are known."""
        return [_state(key, text) for key, text in self._texts(f"state_{r}" for r in ranks)]

    def send_key(self, key: Any, rank: int) -> None:
        """Store `key`, any value that JSON can represent, for `rank`."""
        self._access().set(f"key_{rank}", json.dumps(key))

    def get_keys(self, ranks: Iterable[int]) -> list[Any]:
        """Return the keys of ranks; waits until all are known."""
        return [
            require_json(key, text) for key, text in self._texts(f"key_{rank}" for rank in ranks)
        ]

    # What happens to an iteration.

    def record_interrupted(self, records: Sequence[InterruptionRecord] | None = None) -> None:
        """Record that the iteration is interrupted; `records` are ignored once they are locked."""
        access = self._access()
        if records and access.add(_RECORDS_LOCK, 0) == 0:
            access.append(_RECORDS, "".join(f"{record};" for record in records))
        access.set(_INTERRUPTED, _DONE)

    def lock_interruption_records(self) -> None:
        """Ignore records that are written from now on."""
        self._access().add(_RECORDS_LOCK, 1)

    def get_interruption_records(self) -> list[InterruptionRecord]:
        """Return the records of the iteration."""
        records = []
        for text in (self._access().peek(_RECORDS) or "").split(";"):
            if text:
                try:
                    records.append(InterruptionRecord.from_str(text))
                except ValueError:
                    raise ForeignValueError(_RECORDS, text) from None
        return records

    def wait_for_interrupted(self, timeout: timedelta) -> None:
        """Wait until the iteration is interrupted, for `timeout` at most."""
        self._wait_for(_INTERRUPTED, timeout)

    def record_completed(self) -> None:
        """Record that a rank has completed."""
        self._access().set(_COMPLETED, _DONE)

    def wait_for_completed(self, timeout: timedelta) -> None:
        """Wait until a rank has completed, for `timeout` at most."""
        self._wait_for(_COMPLETED, timeout)

    def record_terminated_ranks(self, ranks: Iterable[int]) -> None:
        """Record ranks that take no further part."""
        self._access().append(_TERMINATED, "".join(f"{rank}," for rank in ranks))

    def get_terminated_ranks(self) -> set[int]:
        """Return the ranks that will not take part any more."""
        return _read_ranks(self._access(), _TERMINATED)

    def _access(self) -> StoreAccess:
        return StoreAccess(self)

    def _texts(self, keys: Iterable[str]) -> list[tuple[str, str]]:
        wanted = list(keys)
        limit_s = cast("Any", self).timeout.total_seconds()
        found = []
        for key, text in zip(wanted, self._access().get_all(wanted, limit_s), strict=True):
            if text is None:
                raise _expired(key, limit_s)
            found.append((key, text))
        return found

    def _wait_for(self, key: str, timeout: timedelta) -> None:
        if not self._access().wait(key, timeout.total_seconds()):
            raise _expired(key, timeout.total_seconds())


def _expired(key: str, limit_s: float) -> Exception:
    from torch.distributed import DistStoreError

    return cast("Exception", DistStoreError(f"{key} was not set within {limit_s:g} s"))


def _seconds(key: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ForeignValueError(key, text) from None


def _state(key: str, text: str) -> State:
    fields = require_json(key, text)
    numbers = {field.name for field in dataclasses.fields(State)} - {"mode", "fn_exception"}
    if (
        not isinstance(fields, dict)
        or fields.keys() != numbers | {"mode"}
        or fields["mode"] not in Mode.__members__
        or not all(type(fields[name]) in (int, type(None)) for name in numbers)
    ):
        raise ForeignValueError(key, text)
    return State(**{**fields, "mode": Mode[fields["mode"]]})
