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

from nvidia_resiliency_ext.inprocess._store.sockets import wait_until_listening

__all__ = ["patient_rendezvous"]

_NAME = "TCPStore"
_LAST_TRY = timedelta(seconds=1)


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
        if not args:
            kwargs["wait_for_workers"] = False
            if not kwargs.get("is_master", False):
                limit = kwargs.get("timeout") or timedelta(seconds=300)
                if not wait_until_listening(host_name, port, limit.total_seconds(), time.monotonic):
                    # torch says best what is wrong when nobody comes.
                    kwargs["timeout"] = _LAST_TRY
        return make(host_name, port, *args, **kwargs)

    setattr(rendezvous, _NAME, make_patiently)
    try:
        yield
    finally:
        if getattr(rendezvous, _NAME, None) is make_patiently:
            setattr(rendezvous, _NAME, make)
