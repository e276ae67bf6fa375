# SPDX-License-Identifier: Apache-2.0
"""Ends all that torch.distributed does in this process, so that nothing waits for a peer."""

from __future__ import annotations

import datetime as dt
import logging
import threading
from typing import TYPE_CHECKING, Any

from nvidia_resiliency_ext.inprocess import _env
from nvidia_resiliency_ext.inprocess._checks import check_duration, check_path
from nvidia_resiliency_ext.inprocess.exception import TimeoutError as AbortTimeoutError
from nvidia_resiliency_ext.inprocess.state import FrozenState
from nvidia_resiliency_ext.shared_utils.clock import Deadline
from nvidia_resiliency_ext.shared_utils.trace_collector import NoFlightRecorderError

from . import groups
from .base import Abort
from .destroyed import destroyed_groups
from .gloo_sockets import end_gloo_connections
from .recorder import Recording, is_recording

if TYPE_CHECKING:
    from collections.abc import Callable

    Task = tuple[str, Callable[[], object]]

__all__ = ["AbortTorchDistributed"]

logger = logging.getLogger("nvrx")

_TIMEOUT = dt.timedelta(seconds=10)
_RECORDER_TIMEOUT_S = 1.0
_DESTROY_AT_LEAST_S = 1.0


class AbortTorchDistributed(Abort):
    """Aborts the collectives of all process groups, then destroys the groups.

    NCCL's backends are aborted all at once, gloo's connections are shut down; the main thread, if
    it waits for a collective, gets an error and goes on, even if something keeps the group alive.
    Something that fails, or does not end, does not keep the rest from being done.

    Args:
        torch_fr_trace_path: Folder for what torch's flight recorder knows at that moment, as
            `iter_<iteration>/_dump_<rank>.json`; default: `NVRX_FR_TRACE_PATH`, else none. It is
            saved only if the recorder has a buffer (`TORCH_FR_BUFFER_SIZE` or
            `TORCH_NCCL_TRACE_BUFFER_SIZE`). A torch without a recorder is told of once.
        timeout: How long all of it may take.

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
        self,
        torch_fr_trace_path: str | None = None,
        *,
        timeout: dt.timedelta = _TIMEOUT,
    ) -> None:
        if torch_fr_trace_path is not None:
            check_path("torch_fr_trace_path", torch_fr_trace_path)
        check_duration("timeout", timeout)
        self.torch_fr_trace_path = torch_fr_trace_path
        self.timeout = timeout
        self._has_no_recorder = False

    def __call__(self, state: FrozenState) -> FrozenState:
        """Abort all process groups and destroy them.

        Args:
            state: The rank's state when the fault was seen.

        Raises:
            Exception: The first failure, after everything was tried.
        """
        deadline = Deadline.after(self.timeout.total_seconds())
        failures = _Failures()
        recording = failures.of("flight recorder", lambda: self._record(state))
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
        if recording is not None:
            recording.save()
        failures.raise_first()
        return state

    def _record(self, state: FrozenState) -> Recording | None:
        path = self.torch_fr_trace_path or _env.flight_record_path()
        if not path or self._has_no_recorder or not groups.all_groups() or not is_recording():
            return None
        recording = Recording(path, state.iteration)
        try:
            recording.take(_RECORDER_TIMEOUT_S)
        except NoFlightRecorderError as error:
            # It will have none at the next restart, either.
            self._has_no_recorder = True
            logger.warning("no flight records will be saved in %s: %s", path, error)
            return None
        return recording

    @staticmethod
    def shutdown_all_process_group_backends() -> None:
        """Abort the backends of all groups, all at once; the groups stay.

        Raises:
            Exception: The first thing that failed, after all was done.
        """
        failures = _Failures()
        failures.of("gloo", end_gloo_connections)
        failures.of_all(_tasks(), Deadline.after(_TIMEOUT.total_seconds()))
        failures.raise_first()

    @staticmethod
    def shutdown_process_group_backend(group: Any, device: Any) -> None:
        """Abort the backend of a group for one device; do nothing if it has none.

        Of gloo, whose connections cannot be told apart by group, nothing is ended.

        Connections of gloo are not ended here, because they cannot be told apart by group.

        Args:
            group: The process group.
            device: The device, such as `torch.device("cuda")`.
        """
        backend = groups.backend_of(group, device)
        if backend is not None:
            groups.abort_backend(backend)


def _tasks() -> list[Task]:
    return [
        (f"backend {index} ({type(backend).__name__})", _abort_of(backend))
        for index, backend in enumerate(groups.backends())
        if not groups.is_gloo(backend)
    ]


def _abort_of(backend: groups.Backend) -> Callable[[], object]:
    return lambda: groups.abort_backend(backend)


class _Failures:
    """Does things of which each may fail, and keeps the first failure for the end."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._first: BaseException | None = None

    def of(self, name: str, function: Callable[[], Any]) -> Any:
        """Call a function; `None` if it fails."""
        try:
            return function()
        except BaseException as error:  # noqa: BLE001 - kept for the end
            self._add(name, error)
            return None

    def of_all(self, tasks: list[Task], deadline: Deadline) -> None:
        """Call functions all at once; those that are late are left to themselves."""
        threads = [
            threading.Thread(target=self.of, args=task, name=f"nvrx-abort-{task[0]}", daemon=True)
            for task in tasks
        ]
        for thread in threads:
            thread.start()
        for (name, _), thread in zip(tasks, threads, strict=True):
            thread.join(deadline.timeout())
            if thread.is_alive():
                self._add(name, AbortTimeoutError(f"{name} has not ended in time"))

    def raise_first(self) -> None:
        """Raise what failed first, if anything."""
        first, self._first = self._first, None
        if first is not None:
            raise first

    def _add(self, name: str, error: BaseException) -> None:
        logger.error("abort of %s failed: %r", name, error)
        with self._lock:
            if self._first is None:
                self._first = error
