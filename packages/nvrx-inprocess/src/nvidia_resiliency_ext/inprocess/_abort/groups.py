# SPDX-License-Identifier: Apache-2.0
"""The process groups of this process and their backends; ends them. It decides no order."""

from __future__ import annotations

import contextlib
import logging
from typing import Any

from .gloo_sockets import end_gloo_connections

__all__ = [
    "Backend",
    "abort_backend",
    "all_groups",
    "backend_of",
    "backends",
    "destroy_all",
    "forget_unfinished",
    "is_gloo",
]

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
    found: dict[int, Backend] = {}
    for group in all_groups():
        for device in _device_types(group):
            backend = backend_of(group, device)
            if backend is not None:
                found.setdefault(id(backend), backend)
    return list(found.values())


def backend_of(group: Any, device: Any) -> Backend | None:
    """Return what a group uses for a device, `None` if nothing."""
    import torch

    try:
        backend = group._get_backend(torch.device(device))  # noqa: SLF001 - torch's name for it
    except RuntimeError:
        return None
    # With TORCH_DISTRIBUTED_DEBUG=DETAIL there is a shell around it that compares calls.
    return getattr(backend, "wrapped_pg", backend)


def abort_backend(backend: Backend) -> None:
    """End what it does: `abort()`, or what was in its place before torch 2.6.

    Not gloo's: its own ends nothing. `gloo_sockets.py` does.
    """
    if is_gloo(backend):
        return
    for name in ("abort", "_shutdown"):
        function = getattr(backend, name, None)
        if function is not None:
            function()
            return
    logger.debug("%s has nothing to abort with", type(backend).__name__)


def is_gloo(backend: Backend) -> bool:
    """Say whether it is gloo's."""
    name = getattr(backend, "name", None)
    return callable(name) and name() == "gloo"


def destroy_all() -> None:
    """Forget all groups; quick once their backends are aborted."""
    from torch import distributed

    if distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


def forget_unfinished() -> None:
    """Let a creation of groups that was cut short leave nothing behind; for the main thread.

    torch counts groups, and the count stands in the keys by which ranks meet: a rank that had begun
    would never meet one that had not. A group that was finished after the abort is destroyed.
    """
    from torch import distributed

    if not distributed.is_available():
        return
    if distributed.is_initialized():
        # To destroy them resets them, whatever is under way. They go though their connections
        # cannot be found, as by a process that has no descriptor left.
        with contextlib.suppress(OSError):
            end_gloo_connections()
        distributed.destroy_process_group()
        return
    c10d = distributed.distributed_c10d
    world = c10d._world  # noqa: SLF001 - torch resets it only with a default group
    for name in _REGISTERS:
        register = getattr(world, name, None)
        if register is not None:
            register.clear()
    unregister = getattr(c10d, "_unregister_all_process_groups", None)
    if unregister is not None:
        unregister()
    world.group_count = 0


def _device_types(group: Any) -> list[Any]:
    return list(getattr(group, "_device_types", ()))
