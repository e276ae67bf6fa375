# SPDX-License-Identifier: Apache-2.0
"""While a call runs, nobody waits inside torch for the store of `env://` or `tcp://` to be there.

torch's client tries again and again to connect, its host waits until all have connected; neither
ends when a signal comes. Here a client waits in Python, where it can be interrupted, until somebody
listens, and the host does not wait: process groups wait for each other's keys anyway.
"""

from __future__ import annotations

import contextlib
import importlib
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from nvidia_resiliency_ext.inprocess._store.errors import StoreLostError
from nvidia_resiliency_ext.inprocess._store.sockets import make_within, wait_until_listening

__all__ = ["RendezvousError", "patient_rendezvous"]

_NAME = "TCPStore"
# Of its arguments after host and port; torch 2.4 gives three of them without names.
_POSITIONS = (
    "world_size",
    "is_master",
    "timeout",
    "wait_for_workers",
    "multi_tenant",
    "master_listen_fd",
    "use_libuv",
)
_LIMIT = timedelta(seconds=300)
# torch is not exact.
_GRACE_S = 1.0


class RendezvousError(StoreLostError, RuntimeError):
    """There is no store for a group; as torch's own error a RuntimeError."""


@contextlib.contextmanager
def patient_rendezvous() -> Iterator[None]:
    """Make torch's rendezvous interruptible inside."""
    # As an attribute of the package it is the function of the same name.
    rendezvous = importlib.import_module("torch.distributed.rendezvous")
    make = getattr(rendezvous, _NAME, None)
    if make is None:
        yield  # a torch that does it in another way
        return

    def make_patiently(host_name: str, port: int, *args: Any, **kwargs: Any) -> Any:
        kwargs |= dict(zip(_POSITIONS, args, strict=False))
        kwargs["wait_for_workers"] = False
        if kwargs.get("is_master", False):
            return make(host_name, port, **kwargs)
        limit_s = (kwargs.get("timeout") or _LIMIT).total_seconds()
        deadline = time.monotonic() + limit_s
        where = f"no store answers at {host_name}:{port}"
        if not wait_until_listening(host_name, port, limit_s, time.monotonic):
            raise RendezvousError(f"{where}: nobody listens there, after {limit_s:g} s")
        left_s = max(0.0, deadline - time.monotonic()) + _GRACE_S
        try:
            return make_within(lambda: make(host_name, port, **kwargs), port, left_s)
        except TimeoutError as error:
            raise RendezvousError(f"{where}: {error}, after {limit_s:g} s") from None

    setattr(rendezvous, _NAME, make_patiently)
    try:
        yield
    finally:
        if getattr(rendezvous, _NAME, None) is make_patiently:
            setattr(rendezvous, _NAME, make)
