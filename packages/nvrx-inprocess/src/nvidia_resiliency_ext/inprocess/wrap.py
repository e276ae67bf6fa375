# SPDX-License-Identifier: Apache-2.0
"""`Wrapper`, which runs a function again after a fault, and `CallWrapper`, one call of it."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch

from nvidia_resiliency_ext.shared_utils.events import EventLog

from . import _inputs
from ._call.interrupt import AtomicLock, require_main_thread
from ._call.loop import CallLoop
from ._call.rendezvous import check_store_kwargs, hold_rendezvous, require_valid_rank
from ._call.report import RestartReport
from ._call.settings import Settings, bounded, check_settings
from ._inputs import check_callable
from ._monitor.client import MonitorLink
from ._monitor.page import ProgressPage, StackDump
from ._monitor.start import ensure_started
from .abort import Abort, AbortTorchDistributed
from .completion import Completion
from .compose import Compose, members_of
from .exception import InternalError
from .finalize import Finalize
from .health_check import (
    ChainedGPUHealthCheck,
    ChainedNicHealthCheck,
    ChainedNVLHealthCheck,
    HealthCheck,
    log_skips_at_debug,
)
from .initialize import Initialize
from .param_utils import substitute_param_value
from .rank_assignment import ActivateAllRanks, RankAssignment, ShiftRanks
from .state import State
from .store import StoreMixin, TCPStore
from .terminate import Terminate

__all__ = ["CallWrapper", "RestartReport", "Wrapper"]

logger = logging.getLogger("nvrx")

F = TypeVar("F", bound=Callable[..., Any])

_LAZY = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
_ALL_WORK: Any = Compose(ActivateAllRanks(), ShiftRanks())


class Wrapper:
    """Call a distributed function again, in the same processes, when one of its ranks fails.

    Use it as a decorator: `@Wrapper(...)`, or `fn = Wrapper(...)(fn)`. All times are `timedelta`.
    It must be safe to call the function again, and it must not catch `BaseException`.

    Args:
        store_factory: `store_factory(**store_kwargs)` creates a connection to the job's store, in
            every rank and in every node's monitor; importable by its name.
        store_kwargs: Its arguments: values of JSON, `timedelta` and paths.
        initialize: Called at the start of every iteration.
        abort: Called from a helper thread after a fault; must unblock the main thread.
        finalize: Called after a fault, when the function has ended.
        health_check: Called after `initialize`, and before this rank restarts after a fault.
        rank_assignment: Renumbers the surviving ranks and chooses the active ones.
        monitor_thread_interval: Accepted for compatibility; nothing is polled.
        monitor_process_interval: Time between two checks of the ranks by the monitor.
        heartbeat_interval: Time between two lease renewals of a node.
        progress_watchdog_interval: Time between two automatic progress signals of a rank.
        soft_timeout: Time without progress after which all ranks restart.
        hard_timeout: Time without progress after which the rank's process is killed.
        heartbeat_timeout: Time without a lease renewal after which a node counts as lost.
        barrier_timeout: Longest wait until all ranks have left an interrupted iteration.
        completion_timeout: Longest wait until all ranks have completed, after this one has.
        last_call_wait: Wait after the first report of a fault for reports of other faults.
        termination_grace_time: Time between SIGTERM and SIGKILL.
        monitor_process_logfile: Absolute path of the monitor's log; `{rank}` is replaced.
        monitor_process_pidfile: Absolute path of a file with the monitor's process id.
        enabled: False returns the function itself.
        completion: Called once when all ranks have completed.
        terminate: Called once when this rank leaves with an exception.
        rank_filter: Older form of the last part of `rank_assignment`: runs after it and chooses the
            active ranks. Use it only if `rank_assignment` has no filter.

    Attributes:
        restart_health_check: Checks before this rank restarts after a fault: network, NVLink and
            GPU checks of device `LOCAL_RANK`, then the members of `health_check`; or None.

    Raises:
        TypeError: an argument is of another type.
        ValueError: two times conflict, a path is not absolute, or a port is invalid.

    Example:
        >>> from datetime import timedelta
        >>> import torch.distributed as dist
        >>> import nvidia_resiliency_ext.inprocess as inprocess
        >>> retry = inprocess.initialize.RetryController(max_iterations=10)
        >>> limits = {"soft_timeout": timedelta(seconds=30), "hard_timeout": timedelta(seconds=60)}
        >>> @inprocess.Wrapper(store_kwargs={"port": 29501}, initialize=retry, **limits)
        ... def train(call: inprocess.CallWrapper | None = None) -> None:
        ...     store = dist.PrefixStore(str(call.iteration), call.store)
        ...     dist.init_process_group(
        ...         "gloo", store=store, rank=call.state.active_rank,
        ...         world_size=call.state.active_world_size)
        ...     for step in range(100):
        ...         train_one_step(step)
        ...         call.ping()
        >>> train()  # doctest: +SKIP
    """

    def __init__(  # noqa: PLR0913 - the signature is given
        self,
        *,
        store_factory: type[StoreMixin] = TCPStore,
        store_kwargs: dict[str, Any] | None = None,
        initialize: Initialize | None = None,
        abort: Abort | None = AbortTorchDistributed(),  # noqa: B008 - has no state
        finalize: Finalize | None = None,
        health_check: HealthCheck | None = None,
        rank_assignment: RankAssignment = _ALL_WORK,
        rank_filter: Any = None,
        monitor_thread_interval: timedelta = timedelta(seconds=1),
        monitor_process_interval: timedelta = timedelta(seconds=1),
        heartbeat_interval: timedelta = timedelta(seconds=1),
        progress_watchdog_interval: timedelta = timedelta(seconds=1),
        soft_timeout: timedelta = timedelta(seconds=60),
        hard_timeout: timedelta = timedelta(seconds=90),
        heartbeat_timeout: timedelta = timedelta(seconds=30),
        barrier_timeout: timedelta = timedelta(seconds=120),
        completion_timeout: timedelta = timedelta(seconds=120),
        last_call_wait: timedelta = timedelta(seconds=1),
        termination_grace_time: timedelta = timedelta(seconds=5),
        monitor_process_logfile: str | None = None,
        monitor_process_pidfile: str | None = None,
        enabled: bool = True,
        completion: Completion | None = None,
        terminate: Terminate | None = None,
    ) -> None:
        given = {name: value for name, value in locals().items() if name != "self"}
        settings = Settings(**given)
        check_settings(settings, is_distributed_available=torch.distributed.is_available())
        if store_factory is TCPStore:
            check_store_kwargs(store_kwargs or {})
        self.settings = bounded(settings)
        for name, value in given.items():
            setattr(self, name, value)
        self.restart_health_check = _restart_health_check(health_check)
        if enabled:
            with contextlib.suppress(InternalError):
                # Its imports overlap with the program's own; the call says what is wrong.
                ensure_started(needs_torch=store_factory is not TCPStore)

    def __call__(self, fn: F) -> F:
        """Return `fn` wrapped, or `fn` itself if the wrapper is not enabled.

        Args:
            fn: The function. A parameter annotated with `CallWrapper` gets the object of the
                running call.

        Raises:
            TypeError: `fn` is not callable, or is a coroutine or generator function.
        """
        check_callable("the wrapped function", fn)
        if any(is_lazy(fn) for is_lazy in _LAZY):
            raise TypeError(
                f"the wrapped function must run when it is called: {fn!r} is async or a generator;"
                " wrap one that calls asyncio.run()"
            )
        if not self.settings.enabled:
            return fn

        @functools.wraps(fn)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            with CallWrapper(self) as call:
                return call(fn, args, kwargs)

        return wrapped  # type: ignore[return-value]


def _restart_health_check(check: HealthCheck | None) -> Any:
    """Return the user's checks and those of this rank's devices; None when there are neither."""
    members: tuple[Any, ...] = () if check is None else tuple(members_of(check))
    index = _inputs.optional_number("LOCAL_RANK")
    if index is not None:
        for kind in (ChainedGPUHealthCheck, ChainedNVLHealthCheck, ChainedNicHealthCheck):
            added = kind(device_index=index)
            log_skips_at_debug(added)
            members += (added,)
    return Compose(*members) if members else None


class CallWrapper:
    """One call of a wrapped function, with the methods that the function may use.

    A parameter of the function that is annotated with this class receives it. Use it as a context
    manager: it holds a connection to the node's monitor and to the job's store.

    Args:
        wrapper: The wrapper whose function is called.

    Raises:
        RuntimeError: this is not the main thread.
        ValueError: torch.distributed is initialized already, or `RANK` does not fit `WORLD_SIZE`.
        BarrierTimeout: not all ranks have called within `barrier_timeout`.

    Example:
        >>> def train(call: CallWrapper | None = None) -> None:
        ...     with call.disable_hang_protection():
        ...         compile_model()
        ...     while step():
        ...         call.ping()
        ...         with call.atomic():
        ...             save_checkpoint()
    """

    def __init__(self, wrapper: Wrapper) -> None:
        require_main_thread("a wrapped function")
        if torch.distributed.is_initialized():
            raise ValueError(
                "not torch.distributed.is_initialized() does not hold: call the wrapped function"
                " before init_process_group, which belongs into the function"
            )
        settings = wrapper.settings
        with contextlib.ExitStack() as stack:
            stack.enter_context(_inputs.exported_ranks_restored())
            # Last of all: what refers to each other would stay open until a garbage collection.
            stack.callback(self._release)
            state = State.from_env()
            rank = require_valid_rank(state)
            page = ProgressPage.create()
            stack.callback(page.close)
            rendezvous = hold_rendezvous(settings, state)
            # Before the interrupter, which takes an unused signal: it sees that this one is lent.
            dump = StackDump()
            stack.callback(dump.close)
            link = MonitorLink(rendezvous.monitor_settings, page, self._on_event, dump)
            event_log = EventLog.join(src="wrapper")
            stack.callback(event_log.close)
            loop = CallLoop(
                settings=settings,
                state=state,
                restart_health_check=wrapper.restart_health_check,
                rendezvous=rendezvous,
                link=link,
                page=page,
                event_log=event_log,
                inject=self._inject,
            )
            stack.callback(loop.events.close)
            self._loop: CallLoop | None = loop
            stack.callback(link.close)
            try:
                link.attach(rank, state.world_size)
            except InternalError:
                rendezvous.send_departure_notice(rank, 0, frozenset(range(state.world_size)))
                raise
            stack.callback(loop.close)
            loop.watchdog.start()
            stack.callback(loop.watchdog.stop)
            self._stack = stack.pop_all()
        self._page = page
        self._lock = loop.lock
        self._state = state
        self._reports = loop.reports
        # Without a frame of its own between the caller and the page.
        self.ping = page.stamp_manual  # type: ignore[method-assign]

    def __enter__(self) -> CallWrapper:  # noqa: PYI034  # Self is not in Python 3.10
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def __call__(
        self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Call `fn(*args, **kwargs)`, again after each fault; return its value.

        Args:
            fn: The function.
            args: Its positional arguments.
            kwargs: Its keyword arguments.

        Returns:
            The return value of the function.

        Raises:
            BaseException: the exception with which this rank leaves.
        """
        if self._loop is None:
            raise InternalError("this CallWrapper was shut down")
        return self._loop.run(fn, args, kwargs)

    # What the function may use ---------------------------------------------------------------

    @property
    def iteration(self) -> int:
        """Number of restarts of the function."""
        return self._state.iteration

    @property
    def state(self) -> State:
        """Current state of this rank."""
        return self._state

    @property
    def store(self) -> Any:
        """The job's store, without the prefix of an iteration; None after the end of the call."""
        return None if self._loop is None else self._loop.rendezvous.store

    base_store = store

    @property
    def restart_reports(self) -> tuple[RestartReport, ...]:
        """The last restarts of this call, with their cause and the time of each phase."""
        return tuple(self._reports)

    def ping(self) -> None:
        """Report progress; from the first call in an iteration on, reports are expected."""
        self._page.stamp_manual()

    def atomic(self) -> AtomicLock:
        """Return a context manager: no abort and no restart begins while its body runs."""
        return self._lock

    @contextlib.contextmanager
    def disable_hang_protection(self) -> Iterator[None]:
        """Turn timeouts off in the body; exceptions still cause a restart. May be nested."""
        self._disable_hang_protection()
        try:
            yield
        finally:
            self._enable_hang_protection()

    def _disable_hang_protection(self) -> None:
        self._page.disable_timeouts()

    def _enable_hang_protection(self) -> None:
        self._page.enable_timeouts()

    def shutdown(self) -> None:
        """Leave the wrapper: release the monitor, the store and the helper threads."""
        self._stack.close()

    def _release(self) -> None:
        self._loop = None

    def _on_event(self, event: Any) -> None:
        if self._loop is not None:
            self._loop.receive(event)

    def _inject(
        self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Any, Any]:
        return substitute_param_value(fn, tuple(args), dict(kwargs), {CallWrapper: self})
