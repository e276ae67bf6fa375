# SPDX-License-Identifier: Apache-2.0
"""The process groups of this process and their backends; aborts these. It decides no order."""

from __future__ import annotations

import logging
from typing import Any

__all__ = [
    "Backend",
    "abort_backend",
    "all_groups",
    "backend_of",
    "backends",
    "is_gloo",
    "is_gloo_group",
]

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


def is_gloo_group(group: Any) -> bool:
    """Say whether a group uses gloo for any device."""
    return any(
        backend is not None and is_gloo(backend)
        for backend in (backend_of(group, device) for device in _device_types(group))
    )


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


def _device_types(group: Any) -> list[Any]:
    return list(getattr(group, "_device_types", ()))
