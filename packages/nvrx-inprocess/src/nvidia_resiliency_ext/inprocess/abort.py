# SPDX-License-Identifier: Apache-2.0
"""Callbacks that unblock the main thread after an interruption, and chains of them."""

from __future__ import annotations

import abc
import datetime as dt
import functools
import importlib
import importlib.util
import logging
import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from nvidia_resiliency_ext.inprocess import _inputs
from nvidia_resiliency_ext.inprocess._inputs import call_bounded, check_duration, check_path
from nvidia_resiliency_ext.inprocess.compose import Compose, members_of
from nvidia_resiliency_ext.inprocess.exception import TimeoutError as AbortTimeoutError
from nvidia_resiliency_ext.inprocess.state import FrozenState
from nvidia_resiliency_ext.shared_utils.abandonable import AbandonableCall
from nvidia_resiliency_ext.shared_utils.abort_hooks import run_abort_hooks
from nvidia_resiliency_ext.shared_utils.clock import Deadline
from nvidia_resiliency_ext.shared_utils.trace_collector import (
    NoFlightRecorderError,
    TorchFRTraceCollector,
)

from ._unblock import groups
from ._unblock.gloo import end_gloo_connections
from ._unblock.groups import destroyed_groups

__all__ = [
    "Abort",
    "AbortPersistentCheckpointProcesses",
    "AbortTorchDistributed",
    "AbortTransformerEngine",
]

Task = tuple[str, Callable[[], object]]


class Abort(abc.ABC):
    """Called on a helper thread after an interruption; it must unblock the main thread."""

    @abc.abstractmethod
    def __call__(self, state: FrozenState) -> FrozenState:
        """Unblock this rank's main thread, and return `state`; subclasses implement it."""
        raise NotImplementedError


logger = logging.getLogger("nvrx")


def run_abort(abort: Callable[[FrozenState], Any], state: FrozenState, deadline_s: float) -> None:
    """Call an abort, or the members of a `Compose` of aborts, the last one first.

    A member that raises or is late does not prevent the others from running: it may use half of the
    remaining time, the last one all of it.
    """
    deadline = Deadline.after(deadline_s)
    members = list(members_of(abort))[::-1]
    given: tuple[object, ...] = (state,)
    for left, member in zip(range(len(members), 0, -1), members, strict=True):
        returned = _run(member, given, deadline.remaining() * (1.0 if left == 1 else 0.5))
        # After a failure the next one gets what this one got.
        if returned is not None:
            given = returned if isinstance(returned, tuple) else (returned,)


def _run(member: Any, given: tuple[object, ...], patience_s: float) -> object:
    """Run one member and log how it ended; return its result, None where there is none."""
    name = _name_of(member)
    start = time.monotonic()
    # `Compose` knows which members take no arguments.
    call = AbandonableCall(f"nvrx-abort-{name}", lambda: Compose(member)(*given))
    if not call.ended.wait(patience_s):
        waited_s = time.monotonic() - start
        logger.error("abort %s has not ended in %.3f s; it is abandoned", name, waited_s)
        return None
    try:
        returned: object = call.result()
    except BaseException:
        logger.exception("abort %s failed after %.3f s", name, time.monotonic() - start)
        return None
    logger.info("abort %s took %.3f s", name, time.monotonic() - start)
    return returned


def _name_of(member: Any) -> str:
    try:
        return str(getattr(member, "__name__", type(member).__name__))
    except Exception:  # noqa: BLE001 - a user's class may do anything
        return type(member).__name__


_ENGINE = "transformer_engine"
_USER_BUFFERS = "transformer_engine.pytorch.module.base"

# The second is where newer versions keep it.
_FP8_MODULES = ("transformer_engine.pytorch.fp8", "transformer_engine.pytorch.quantization")


class AbortTransformerEngine(Abort):
    """Destroys TransformerEngine's user buffers and resets its FP8 state, where it is installed.

    It must run after `AbortTorchDistributed`: write it before that one in a `Compose`.
    """

    def __call__(self, state: FrozenState) -> FrozenState:
        """Free Transformer Engine's communication buffers, reset its FP8 state, return `state`."""
        if importlib.util.find_spec(_ENGINE) is None:
            return state
        try:
            base = _import(_USER_BUFFERS)
            if base is not None:
                base.destroy_ub()
        finally:
            manager = _fp8_manager()
            if manager is not None:
                manager.reset()
        return state


class AbortPersistentCheckpointProcesses(Abort):
    """Ends the workers of asynchronous checkpoints: runs the abort hooks that are registered."""

    def __call__(self, state: FrozenState) -> FrozenState:
        """Run all registered abort hooks, raise the first failure, return `state`."""
        failures = run_abort_hooks()
        if failures:
            raise failures[0]
        return state


def _fp8_manager() -> Any:
    for name in _FP8_MODULES:
        manager = getattr(_import(name), "FP8GlobalStateManager", None)
        if manager is not None:
            return manager
    return None


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        logger.debug("nothing to abort in %s: %s", name, error)
        return None


_TIMEOUT = dt.timedelta(seconds=10)
_RECORDER_TIMEOUT = timedelta(seconds=1)
_DESTROY_AT_LEAST_S = 1.0


class AbortTorchDistributed(Abort):
    """Aborts the collectives of all process groups, then destroys the groups.

    NCCL's backends are aborted all at once, and gloo's connections are shut down. A main thread
    that waits for a collective gets an error and continues, even if other code keeps the group
    alive. A step that fails, or does not end, does not prevent the other steps.

    Args:
        torch_fr_trace_path: Folder for the current data of torch's flight recorder, as
            `iter_<iteration>/_dump_<rank>.json`; default: `NVRX_FR_TRACE_PATH`, else none. It is
            saved only if the recorder has a buffer (`TORCH_FR_BUFFER_SIZE` or
            `TORCH_NCCL_TRACE_BUFFER_SIZE`). A torch without a recorder is logged once.
        timeout: Longest total time, a `timedelta` of at least 0; default: 10 s.

    Raises:
        TypeError: An argument has another type.

    Example:
        >>> from nvidia_resiliency_ext.inprocess import Compose
        >>> from nvidia_resiliency_ext.inprocess.abort import (
        ...     AbortPersistentCheckpointProcesses, AbortTorchDistributed)
        >>> # The last member is called first.
        >>> abort = Compose(AbortPersistentCheckpointProcesses(), AbortTorchDistributed())
    """

    def __init__(
        self, torch_fr_trace_path: str | None = None, *, timeout: dt.timedelta = _TIMEOUT
    ) -> None:
        if torch_fr_trace_path is not None:
            check_path("torch_fr_trace_path", torch_fr_trace_path)
        check_duration("timeout", timeout)
        self.torch_fr_trace_path = torch_fr_trace_path
        self.timeout = timeout
        self._has_no_recorder = False

    def __call__(self, state: FrozenState) -> FrozenState:
        """Abort and destroy all process groups, raise the first failure, return `state`."""
        deadline = Deadline.after(self.timeout.total_seconds())
        failures = _Failures()
        save_record = failures.of("flight recorder", lambda: self._take_record(state))
        # Before anything fails: the function may free its model at once, and destroy its groups.
        destroyed_groups.hold(groups.all_groups())
        failures.of("gloo", end_gloo_connections)
        failures.of_all(_tasks(), deadline)
        # Again: a lazy one may have connected meanwhile.
        failures.of("gloo", end_gloo_connections)
        if deadline.remaining() < _DESTROY_AT_LEAST_S:
            deadline = Deadline.after(_DESTROY_AT_LEAST_S)
        failures.of_all([("destroy_process_group", destroyed_groups.destroy)], deadline)
        failures.of("release", destroyed_groups.release)
        if save_record is not None:
            threading.Thread(target=save_record, name="nvrx-flight-record", daemon=True).start()
        failures.raise_first()
        return state

    def _take_record(self, state: FrozenState) -> Callable[[], None] | None:
        """Copy torch's flight recorder to memory; return a function that writes the copy."""
        path = self.torch_fr_trace_path or os.environ.get("NVRX_FR_TRACE_PATH")
        if not path or self._has_no_recorder or not groups.all_groups():
            return None
        if _inputs.flight_recorder_size() <= 0:
            return None
        folder = os.path.join(path, f"iter_{state.iteration}")

        def take() -> tuple[TorchFRTraceCollector, Any]:
            # The collector is made here, too: it looks at devices, which may be what hangs.
            collector = TorchFRTraceCollector(folder)
            return collector, collector.take()

        try:
            collector, dump = call_bounded("nvrx-flight-record", take, _RECORDER_TIMEOUT)
        except NoFlightRecorderError as error:
            # It will have none at the next restart, either.
            self._has_no_recorder = True
            logger.warning("no flight records will be saved in %s: %s", path, error)
            return None

        def save() -> None:
            try:
                logger.info("flight record saved as %s", collector.save(dump))
            except Exception:
                logger.exception("the flight record could not be saved")

        return save

    @staticmethod
    def shutdown_all_process_group_backends() -> None:
        """Abort the backends of all groups at once, raise the first failure; the groups stay."""
        failures = _Failures()
        failures.of("gloo", end_gloo_connections)
        failures.of_all(_tasks(), Deadline.after(_TIMEOUT.total_seconds()))
        failures.raise_first()

    @staticmethod
    def shutdown_process_group_backend(group: Any, device: Any) -> None:
        """Abort the backend that `group` has for `device`; do nothing if it has none.

        Connections of gloo are not ended here, because nothing tells to which group they belong.
        """
        backend = groups.backend_of(group, device)
        if backend is not None:
            groups.abort_backend(backend)


def _tasks() -> list[Task]:
    return [
        (
            f"backend {index} ({type(backend).__name__})",
            functools.partial(groups.abort_backend, backend),
        )
        for index, backend in enumerate(groups.backends())
        if not groups.is_gloo(backend)
    ]


class _Failures:
    """Does things of which each may fail, and keeps the first failure for the end."""

    def __init__(self) -> None:
        self._errors: list[BaseException] = []

    def of(self, name: str, function: Callable[[], Any]) -> Any:
        """Call a function; `None` if it fails."""
        try:
            return function()
        except BaseException as error:  # noqa: BLE001 - kept for the end
            self._add(name, error)
            return None

    def of_all(self, tasks: list[Task], deadline: Deadline) -> None:
        """Call functions all at once; those that are late are abandoned."""
        calls = [
            AbandonableCall(f"nvrx-abort-{task[0]}", functools.partial(self.of, *task))
            for task in tasks
        ]
        for (name, _), call in zip(tasks, calls, strict=True):
            if not call.ended.wait(deadline.timeout()):
                self._add(name, AbortTimeoutError(f"{name} has not ended in time"))

    def raise_first(self) -> None:
        errors, self._errors = self._errors, []
        if errors:
            raise errors[0]

    def _add(self, name: str, error: BaseException) -> None:
        logger.error("abort of %s failed: %r", name, error)
        self._errors.append(error)
