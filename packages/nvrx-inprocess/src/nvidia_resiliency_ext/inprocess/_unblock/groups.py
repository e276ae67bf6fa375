# SPDX-License-Identifier: Apache-2.0
"""List, abort and destroy process groups; hold them until gloo's worker threads are idle.

torch waits for a group's worker threads in the destructor of its last reference. A worker whose
operation has failed takes the interpreter's lock, with which `DistributedDataParallel`'s reducer is
freed: where that has the last reference, both wait for ever. A reference of Python's is dropped
without the lock; so one is held here until the workers are idle.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any

from nvidia_resiliency_ext.inprocess._inputs import call_bounded
from nvidia_resiliency_ext.inprocess.exception import TimeoutError as ReleaseTimeoutError
from nvidia_resiliency_ext.shared_utils.attribute_wrapping import WrappedAttribute

from .gloo import end_gloo_connections
from .waits import is_in_untimed_condition, thread_name

logger = logging.getLogger("nvrx")
Backend = Any


def all_groups() -> list[Any]:
    """Return torch's process groups; none if it is not initialised."""
    from torch import distributed

    if not distributed.is_available() or not distributed.is_initialized():
        return []
    return list(distributed.distributed_c10d._world.pg_map)  # noqa: SLF001 - torch has no list


def backends() -> list[Backend]:
    """Return the backends of all groups, each once."""
    return list({id(each): each for group in all_groups() for each in _backends_of(group)}.values())


def _backends_of(group: Any) -> list[Backend]:
    found = (backend_of(group, device) for device in getattr(group, "_device_types", ()))
    return [backend for backend in found if backend is not None]


def backend_of(group: Any, device: Any) -> Backend | None:
    """Return the backend of a group for a device, `None` if there is none."""
    import torch

    try:
        backend = group._get_backend(torch.device(device))  # noqa: SLF001 - torch's name for it
    except RuntimeError:
        return None
    # With TORCH_DISTRIBUTED_DEBUG=DETAIL there is a shell around it that compares calls.
    return getattr(backend, "wrapped_pg", backend)


def is_gloo_group(group: Any) -> bool:
    """Return whether a group uses gloo for any device."""
    return any(map(is_gloo, _backends_of(group)))


def abort_backend(backend: Backend) -> None:
    """End its collectives by `abort()`, before torch 2.6 `_shutdown()`; gloo's by its sockets."""
    if is_gloo(backend):
        return
    for name in ("abort", "_shutdown"):
        function = getattr(backend, name, None)
        if function is not None:
            function()
            return
    logger.debug("%s has nothing to abort with", type(backend).__name__)


def is_gloo(backend: Backend) -> bool:
    name = getattr(backend, "name", None)
    return callable(name) and name() == "gloo"


# Of torch's `_World`; later versions may have fewer.
_REGISTERS = (
    "pg_map",
    "pg_names",
    "pg_group_ranks",
    "pg_backend_config",
    "pg_to_tag",
    "tags_to_pg",
    "pg_coalesce_state",
)
_TASKS = "/proc/self/task"
_WORKER_NAME = "pt_gloo_runloop"
_LOOK_S = 0.0005

# They fail within gloo's next round; on a busy host they wait for a processor.
_IDLE_S = 0.3

# What is kept of groups whose workers are not idle in time: those of two restarts, at least.
_KEPT_LISTS = 4
_RELEASE_LIMIT = timedelta(seconds=2)


class DestroyedGroups:
    """The groups that were destroyed, or are about to be; for any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lists: deque[list[Any]] = deque()

    def hold(self, groups: Iterable[Any]) -> None:
        """Hold references of groups whose operations are about to be ended."""
        with self._lock:
            known = self._lists[-1] if self._lists else []
            new = [group for group in groups if group not in known]
            if new:
                self._lists.append(new)

    def destroy(self) -> None:
        """Let torch forget all groups; quick once their backends are aborted."""
        from torch import distributed

        if distributed.is_available() and distributed.is_initialized():
            self.hold(all_groups())
            distributed.destroy_process_group()

    def release(self, within_s: float = _IDLE_S) -> bool:
        """Drop the references once gloo's workers are idle; return whether none is held any more.

        Where they are not idle in time, or cannot be distinguished from other threads, the groups
        of the last restarts stay until the next call.
        """
        is_idle = are_gloo_workers_idle(within_s)
        with self._lock:
            if is_idle is None:
                # Of another backend all threads have ended when its group is destroyed.
                is_idle = not any(is_gloo_group(g) for each in self._lists for g in each)
            count = len(self._lists) - (0 if is_idle else _KEPT_LISTS)
            dropped = [self._lists.popleft() for _ in range(count)]
            is_empty = not self._lists
        if dropped:
            try:
                # The destructor waits for threads, of which one may be stuck in a device.
                call_bounded("nvrx-release-groups", dropped.clear, _RELEASE_LIMIT)
            except ReleaseTimeoutError as error:
                logger.warning("process groups of an earlier iteration stay: %s", error)
        return is_empty


destroyed_groups = DestroyedGroups()


@contextlib.contextmanager
def patient_destruction() -> Iterator[None]:
    """Inside, hold the groups that the program destroys by itself until gloo's workers are idle.

    A worker that has just ended the last operation frees it as one does whose operation failed.
    """
    from torch import distributed

    def make(wrapped: WrappedAttribute) -> Any:
        @functools.wraps(wrapped.original)
        def destroy_patiently(*args: Any, **kwargs: Any) -> Any:
            destroyed_groups.hold(all_groups())
            try:
                return wrapped.original(*args, **kwargs)
            finally:
                destroyed_groups.release()

        return destroy_patiently

    with contextlib.ExitStack() as stack:
        for place in (distributed, distributed.distributed_c10d):
            stack.callback(WrappedAttribute(place, "destroy_process_group", make).restore)
        yield


def forget_unfinished() -> None:
    """Let a creation of groups that was cut short leave nothing behind; for the main thread.

    torch counts groups, and the count is part of the keys through which ranks connect: a rank that
    had begun would wait forever for one that had not. A group that was finished after the abort
    is destroyed.
    """
    from torch import distributed

    if not distributed.is_available():
        return
    if distributed.is_initialized():
        destroyed_groups.hold(all_groups())
        # To destroy them resets them, whatever is under way. They go though their connections
        # cannot be found, as by a process that has no descriptor left.
        with contextlib.suppress(OSError):
            end_gloo_connections()
        destroyed_groups.destroy()
    else:
        _reset_registers(distributed.distributed_c10d)
    destroyed_groups.release()


def _reset_registers(c10d: Any) -> None:
    world = c10d._world  # noqa: SLF001 - torch resets it only with a default group
    for name in _REGISTERS:
        register = getattr(world, name, None)
        if register is not None:
            register.clear()
    unregister = getattr(c10d, "_unregister_all_process_groups", None)
    if unregister is not None:
        unregister()
    world.group_count = 0


def are_gloo_workers_idle(within_s: float) -> bool | None:
    """Wait until gloo's worker threads are idle: in a condition variable without a limit.

    None where there is no thread of that name: no gloo, or a torch before 2.11.
    """
    until_s = time.monotonic() + within_s
    try:
        workers = [task for task in os.listdir(_TASKS) if thread_name(task) == _WORKER_NAME]
    except OSError:  # no descriptor is left
        return False
    if not workers:
        return None
    # One that has ended has nothing to do, either.
    while workers := [
        task
        for task in workers
        if not is_in_untimed_condition(task) and os.path.exists(f"{_TASKS}/{task}")
    ]:
        if time.monotonic() >= until_s:
            return False
        time.sleep(_LOOK_S)  # nothing tells when a thread begins to wait
    return True
