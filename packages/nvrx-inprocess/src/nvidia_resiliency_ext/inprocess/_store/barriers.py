# SPDX-License-Identifier: Apache-2.0
"""Barriers on a store: counting, and re-entrant ones in which a rank counts once.

Nobody reads the list of a re-entrant barrier but who counts last, and, should that one have ended
before it had looked, whoever still waits, once per slice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from datetime import timedelta

from nvidia_resiliency_ext.inprocess.exception import RestartError

from .access import StoreAccess
from .errors import ForeignValueError, parse_number

_PREFIX = "inprocess_barrier_prefix"
_LONGEST_SLICE_S = 10.0
_DONE = "1"


class BarrierError(RestartError):
    """A barrier was not passed."""


class BarrierTimeout(BarrierError):  # noqa: N818 - the name is given
    """Not all ranks arrived in time."""


class BarrierOverflow(BarrierError):  # noqa: N818 - the name is given
    """More ranks arrived than belong there."""


class _Place:
    """The keys of one barrier."""

    def __init__(self, kind: str, group_name: str) -> None:
        base = f"{_PREFIX}:{kind}:{group_name}"
        self.name = group_name
        self.arrived = f"{base}:arrived"
        self.count = f"{base}:count"
        self.done = f"{base}:last_worker_arrived"


def pass_barrier(  # noqa: PLR0913 - as the mixin has them
    access: StoreAccess,
    ranks: Collection[int],
    group_name: str,
    rendezvous_count: int,
    timeout: timedelta | None,
    timeout_chunk: timedelta | None,
    *,
    look: Callable[[], bool] = lambda: False,
) -> None:
    """Arrive for `ranks` and wait until so many have arrived; once per store and name.

    `look` is called once per slice of the wait; True ends it, as if all had arrived.
    """
    place = _Place("barrier", group_name)
    count = access.add(place.arrived, len(ranks))
    if count > rendezvous_count:
        raise _overflow(group_name, count, rendezvous_count)
    if count == rendezvous_count:
        access.set(place.done, _DONE)
    elif _is_no_wait(timeout):
        raise _too_late(group_name, count, rendezvous_count, timeout)
    elif not _wait(access, place, timeout, timeout_chunk, look):
        raise _too_late(group_name, access.add(place.arrived, 0), rendezvous_count, timeout)


def pass_reentrant_barrier(
    access: StoreAccess,
    ranks: Collection[int],
    group_name: str,
    rendezvous_count: int,
    timeout: timedelta | None,
    timeout_chunk: timedelta | None,
) -> None:
    """Arrive for `ranks`, perhaps not for the first time, and wait until all have arrived."""
    place = _Place("reentrant_barrier", group_name)

    def look() -> bool:
        arrived = len(_arrived(access, place))
        if arrived > rendezvous_count:
            raise _overflow(group_name, arrived, rendezvous_count)
        if arrived == rendezvous_count:
            access.set(place.done, _DONE)
        return arrived == rendezvous_count

    access.append(place.arrived, "".join(f"{rank}," for rank in ranks))
    arrivals = access.add(place.count, len(ranks))
    if arrivals >= rendezvous_count and look():
        return
    # Who only arrives, for another rank say, asks the store nothing more.
    if _is_no_wait(timeout):
        raise BarrierTimeout(f"{group_name}: not all of {rendezvous_count} ranks have arrived")
    if not _wait(access, place, timeout, timeout_chunk, look):
        arrived = len(_arrived(access, place))
        raise _too_late(group_name, arrived, rendezvous_count, timeout)


def is_rank_at_reentrant_barrier(access: StoreAccess, rank: int, group_name: str) -> bool:
    """Return whether a rank, or somebody for it, has arrived."""
    return rank in _arrived(access, _Place("reentrant_barrier", group_name))


def parse_ranks(text: str, key: str) -> set[int]:
    """Return the ranks of a text such as `3,5,`.

    Raises:
        ForeignValueError: it is no such text.
    """
    ranks = set()
    for part in text.removesuffix(",").split(",") if text else ():
        rank = parse_number(part)
        if rank is None:
            raise ForeignValueError(key, text)
        ranks.add(rank)
    return ranks


def _arrived(access: StoreAccess, place: _Place) -> set[int]:
    return parse_ranks(access.peek(place.arrived) or "", place.arrived)


def _wait(
    access: StoreAccess,
    place: _Place,
    timeout: timedelta | None,
    timeout_chunk: timedelta | None,
    look: Callable[[], bool],
) -> bool:
    limit_s = float("inf") if timeout is None else timeout.total_seconds()
    slice_s = _LONGEST_SLICE_S
    if timeout_chunk is not None:
        slice_s = min(slice_s, timeout_chunk.total_seconds())
    deadline = time.monotonic() + limit_s
    while (left_s := deadline - time.monotonic()) > 0:
        if access.wait(place.done, min(left_s, slice_s)) or look():
            return True
    return access.check(place.done)


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
