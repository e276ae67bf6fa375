# SPDX-License-Identifier: Apache-2.0
"""Bring the ranks of a call together: find or serve the store, agree on the call's keys."""

from __future__ import annotations

import inspect
import logging
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore as TorchPrefixStore  # type: ignore[attr-defined]

from nvidia_resiliency_ext.inprocess._inputs import call_bounded, check_duration, check_integer
from nvidia_resiliency_ext.inprocess._monitor import messages
from nvidia_resiliency_ext.inprocess._monitor.messages import MonitorSettings
from nvidia_resiliency_ext.inprocess._monitor.store_threads import CONNECT
from nvidia_resiliency_ext.inprocess._protocol.decision import Arrival
from nvidia_resiliency_ext.inprocess._protocol.iteration_store import IterationStore
from nvidia_resiliency_ext.inprocess._store.access import StoreAccess
from nvidia_resiliency_ext.inprocess._store.endpoint import (
    LAST_PORT,
    STORE_VARIABLE,
    Endpoint,
    cycle_prefix,
    find_endpoint,
    job_name,
    require_number,
)
from nvidia_resiliency_ext.inprocess._store.mixin import close_barrier, pass_barrier
from nvidia_resiliency_ext.inprocess._store_server import StoreServer, host_store
from nvidia_resiliency_ext.inprocess.attribution import Interruption, InterruptionRecord
from nvidia_resiliency_ext.inprocess.state import State
from nvidia_resiliency_ext.inprocess.store import (
    BarrierOverflow,
    BarrierTimeout,
    StoreMixin,
    TCPStore,
)
from nvidia_resiliency_ext.shared_utils.clock import Deadline
from nvidia_resiliency_ext.shared_utils.store_client import StoreLostError

from .settings import Settings

logger = logging.getLogger("nvrx")

_NONCE = "nonce"
_LONGEST_NONCE = 64
_HOSTED_LIMIT = timedelta(seconds=5)
_DEPARTURE_LIMIT = timedelta(seconds=5)

_LATEST_CALL = "latest_call"
_BARRIER = "initial_barrier"

# The number of the next call; a rank that was given up in one goes on with that of the others.
_next_call = 0
# Endpoints that this process has seen served, so that later calls need not ask.
_served: set[tuple[str, int]] = set()
# Those of the environment of which it was said that they go before arguments.
_logged: set[Endpoint] = set()
# Those that this process has started; the last one is asked for stores at other ports, too.
_store_servers: list[StoreServer] = []


class CallStore(StoreMixin, TorchPrefixStore):
    """The keys of one call, below a prefix of the job's store."""


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """The store with the call's prefix, what the monitor needs, and the call's number."""

    store: Any
    monitor_settings: MonitorSettings
    below: Any
    call: int

    def send_departure_notice(
        self, initial_rank: int, iteration: int, participants: frozenset[int]
    ) -> None:
        """Record in the store that this rank, which has no monitor, leaves; an error is logged."""
        kind = Interruption.MONITOR_PROCESS_EXCEPTION

        def notify() -> None:
            store = IterationStore(self.below, self.monitor_settings.prefix)
            store.interrupt(iteration, [InterruptionRecord(initial_rank, kind)], participants)
            arrival = Arrival(initial_rank, None, None, is_out=True)
            store.arrive(iteration, arrival, participants, has_reported=True)

        try:
            call_bounded("nvrx-departure-notice", notify, _DEPARTURE_LIMIT)
        except Exception as error:  # noqa: BLE001 - the rank leaves with its own exception
            logger.warning("the other ranks are not told that this rank ends: %s", error)


def check_store_kwargs(kwargs: Mapping[str, Any]) -> None:
    """Check arguments of `TCPStore`: not all of them are used, but none may be a mistake."""
    try:
        inspect.signature(TCPStore).bind(**kwargs)
    except TypeError as error:
        raise TypeError(f"store_kwargs of TCPStore: {error}") from None
    host, port, timeout = (kwargs.get(name) for name in ("host_name", "port", "timeout"))
    if host is not None and not isinstance(host, str):
        raise TypeError(f"store_kwargs['host_name'] must be a str, not {host!r}")
    if port is not None:
        check_integer("store_kwargs['port']", port, least=1)
        if port > LAST_PORT:
            raise ValueError(f"store_kwargs['port'] must be at most {LAST_PORT}, not {port}")
    if "timeout" in kwargs:
        check_duration("store_kwargs['timeout']", timeout)


def require_valid_rank(state: State) -> int:
    """Return the rank; a ValueError if all would wait in vain for its place."""
    assert state.rank is not None
    if state.rank >= state.world_size:
        raise ValueError(
            f"RANK must be less than WORLD_SIZE: RANK={state.rank} (default 0),"
            f" WORLD_SIZE={state.world_size} (default 1)"
        )
    if state.world_size > 1 and "RANK" not in os.environ:
        raise ValueError(f"RANK is not set, though WORLD_SIZE={state.world_size}")
    return state.rank


def hold_rendezvous(
    settings: Settings, state: State, environ: Mapping[str, str] = os.environ
) -> Rendezvous:
    """Connect to the job's store and wait until all ranks have come."""
    kwargs = dict(settings.store_kwargs or {})
    if settings.store_factory is TCPStore:
        endpoint = find_endpoint(environ, kwargs.get("host_name"), kwargs.get("port"))
        if endpoint.is_served and state.rank == 0:
            _warn_of_unused(endpoint, kwargs)
        timeout = kwargs.get("timeout", timedelta(seconds=300))
        store = _connect(endpoint, min(timeout, settings.barrier_timeout), environ)
        # What connecting may take is no limit for what the function waits for.
        store.set_timeout(timeout)
        name, file = CONNECT, ""
        text = messages.dump_kwargs({"host": endpoint.host, "port": endpoint.port})
    else:
        # First of all, so that what the factory raises is what its user sees.
        store = settings.store_factory(**kwargs)
        name, file = messages.name_of(settings.store_factory)
        text = messages.dump_kwargs(kwargs)
    number, call_store = _gather(store, cycle_prefix(environ), state, settings.barrier_timeout)
    prefix = f"{cycle_prefix(environ)}{number}"
    nonce = call_store.get(_NONCE).decode("ascii", "replace")[:_LONGEST_NONCE]
    monitor_settings = MonitorSettings(
        prefix=f"{prefix}/{nonce}/",
        store_factory=name,
        store_file=file,
        store_kwargs=text,
        log_file=settings.monitor_process_logfile or "",
        pid_file=settings.monitor_process_pidfile or "",
        interval_s=settings.monitor_process_interval.total_seconds(),
        heartbeat_interval_s=settings.heartbeat_interval.total_seconds(),
        heartbeat_timeout_s=settings.heartbeat_timeout.total_seconds(),
        soft_timeout_s=settings.soft_timeout.total_seconds(),
        hard_timeout_s=settings.hard_timeout.total_seconds(),
        barrier_timeout_s=settings.barrier_timeout.total_seconds(),
        last_call_wait_s=settings.last_call_wait.total_seconds(),
        termination_grace_s=settings.termination_grace_time.total_seconds(),
    )
    return Rendezvous(call_store, monitor_settings, store, number)


def _gather(store: Any, prefix: str, state: State, limit: timedelta) -> tuple[int, CallStore]:
    """Wait until all ranks are in the same call; return its number and its keys.

    A rank that failed before, or was waited for in vain, has made another number of tries than the
    others. So all come to the latest call that any of them has begun. Whoever begins a later call,
    or gives one up, closes the barrier of the call before: its ranks come to the later one.
    """
    global _next_call  # noqa: PLW0603 - a process takes part in one call after the other
    assert state.rank is not None
    deadline = Deadline.after(limit.total_seconds())
    is_late, most = False, 0
    while True:
        number = _take_number(store, prefix, _next_call)
        if is_late:
            raise BarrierTimeout(
                f"{_BARRIER}: {most} of {state.world_size} ranks have arrived within"
                f" {limit.total_seconds():g} s (barrier_timeout): a rank has not called the wrapped"
                f" function, or has another WORLD_SIZE than {state.world_size}"
            )
        _next_call = number + 1
        call_store = CallStore(f"{prefix}{number}", store)
        if state.rank == 0:
            # Keys of earlier jobs in a store that outlives them must not be used again.
            call_store.set(_NONCE, secrets.token_hex(8))
        access, left = StoreAccess(call_store), timedelta(seconds=deadline.remaining())
        try:
            if pass_barrier(access, [state.rank], _BARRIER, state.world_size, left, None):
                return number, call_store
        except BarrierTimeout:
            is_late = True
        except BarrierOverflow as error:
            raise BarrierOverflow(
                f"{error}: another job has the same MASTER_ADDR and MASTER_PORT, or a rank has"
                f" another WORLD_SIZE than {state.world_size}"
            ) from None
        if not (arrived := close_barrier(access, _BARRIER)):
            return number, call_store
        most = max(most, arrived)


def _take_number(store: Any, prefix: str, least: int) -> int:
    """Return the number of the latest call, which is at least `least` from now on."""
    access, key = StoreAccess(store), f"{prefix}{_LATEST_CALL}"
    standing = access.peek(key) or ""
    while True:
        latest = require_number(key, standing) if standing else -1
        if latest >= least:
            return latest
        earlier, standing = standing, access.swap(key, standing, str(least))
        if earlier:
            close_barrier(StoreAccess(CallStore(f"{prefix}{earlier}", store)), _BARRIER)


def _warn_of_unused(endpoint: Endpoint, kwargs: Mapping[str, Any]) -> None:
    unused = [f"{name}={kwargs[name]!r}" for name in ("host_name", "port") if name in kwargs]
    if unused and endpoint not in _logged:
        _logged.add(endpoint)
        text = "the store is at %s (%s): %s of store_kwargs is not used"
        logger.info(text, endpoint, STORE_VARIABLE, ", ".join(unused))


def _connect(endpoint: Endpoint, limit: timedelta, environ: Mapping[str, str]) -> TCPStore:
    where = (endpoint.host, endpoint.port)
    # One rank of the node starts the store server.
    local_rank = environ.get("LOCAL_RANK") or environ.get("RANK") or "0"
    if not endpoint.is_served and local_rank == "0" and endpoint.is_here():
        if where in _served:
            # It is there from an earlier call, unless all were away for long.
            try:
                return TCPStore.connect(endpoint, min(limit, _HOSTED_LIMIT))
            except StoreLostError:
                pass
        is_single_node = environ.get("WORLD_SIZE", "1") == environ.get("LOCAL_WORLD_SIZE", "1")
        beside = _store_servers[-1] if _store_servers else None
        name, connect = job_name(environ), TCPStore.connect
        store_server = host_store(
            endpoint, name, connect, is_single_node=is_single_node, beside=beside
        )
        if store_server.process is not None:
            _store_servers.append(store_server)
        _served.add(where)
    return TCPStore.connect(endpoint, limit)
