# SPDX-License-Identifier: Apache-2.0
"""Torch's c10d rendezvous store, made to honour `use_libuv` and `store_connect_wait_seconds`.

`ft_launcher` makes its store itself and needs no patch; this is for programs that use torch's own.
"""

from __future__ import annotations

import logging
import random
import threading
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import c10d_rendezvous_backend
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError, RendezvousParameters
from torch.distributed.elastic.rendezvous.utils import (
    _matches_machine_hostname,
    parse_rendezvous_endpoint,
)

from nvidia_resiliency_ext.shared_utils.clock import SystemClock

from ._rendezvous import endpoint
from .rdzv_utils import rdzv_config_get_as_float

__all__ = ["apply_c10d_patch", "create_tcp_store"]

logger = logging.getLogger("nvrx")

_READ_TIMEOUT_S = 60
_CONNECT_WAIT_S = 120.0


def apply_c10d_patch() -> None:
    """Let torch's c10d backend make its store through this module, in this process; repeatable.

    It then knows the settings `use_libuv` (default true), which server torch's store uses, and
    `store_connect_wait_seconds` (default 120), the longest wait for the store to start.
    """
    c10d_rendezvous_backend._create_tcp_store = create_tcp_store  # noqa: SLF001 - the patch


def create_tcp_store(params: RendezvousParameters) -> TCPStore:
    """Serve or reach the store at the endpoint of `params`.

    Without `is_host` the name of the machine decides. If that machine cannot bind the port, another
    process already serves the store.

    Raises:
        ValueError: a setting has an unusable value.
        RendezvousConnectionError: the store cannot be served or reached.
    """
    host, port = parse_rendezvous_endpoint(params.endpoint, default_port=endpoint.DEFAULT_PORT)
    read_timeout = params.get_as_int("read_timeout", _READ_TIMEOUT_S)
    if read_timeout is None or read_timeout <= 0:
        raise ValueError(f"read_timeout={read_timeout}: must be a positive number of seconds")
    use_libuv = params.get_as_bool("use_libuv", True)
    wait_s = rdzv_config_get_as_float(params.config, "store_connect_wait_seconds", _CONNECT_WAIT_S)
    is_host = params.get_as_bool("is_host")

    def make(is_master: bool) -> TCPStore:
        return TCPStore(
            host,
            port,
            is_master=is_master,
            multi_tenant=True,
            timeout=timedelta(seconds=read_timeout),
            use_libuv=use_libuv is not False,
        )

    try:
        if is_host or (is_host is None and _matches_machine_hostname(host)):
            try:
                return make(True)
            except (ValueError, RuntimeError, TimeoutError) as error:
                if is_host:
                    raise
                logger.info(
                    "%s:%d is served by another process already (%s)", host, port, str(error)
                )
        _wait_for_tcp_store_server(host, port, wait_s if wait_s is not None else _CONNECT_WAIT_S)
        return make(False)
    except (ValueError, RuntimeError, TimeoutError) as error:
        raise RendezvousConnectionError(
            f"the store at {host}:{port} cannot be {'served' if is_host else 'reached'}: {error}"
        ) from error


def _wait_for_tcp_store_server(
    host: str,
    port: int,
    max_wait_seconds: float,
    probe_timeout_seconds: float = 5,
    probe_interval_seconds: float = 2,
    probe_interval_jitter_fraction: float = 0.5,
) -> None:
    """Wait until somebody listens at an address; TimeoutError: nobody did in time.

    One attempt takes `probe_timeout_seconds` at most. Pauses grow from 50 ms to
    `probe_interval_seconds` and vary at random by the fraction, from 0 to 1.
    """
    jitter = min(1.0, max(0.0, probe_interval_jitter_fraction))
    stop = threading.Event()
    # Thousands of nodes start in the same instant: the first attempts are spread too.
    first_s = min(endpoint.FIRST_PAUSE_S, max_wait_seconds) * jitter
    stop.wait(random.uniform(0.0, max(0.0, first_s)))  # noqa: S311 - spreads load
    try:
        endpoint.wait_until_reachable(
            host,
            port,
            max_wait_seconds,
            SystemClock(),
            stop,
            try_s=probe_timeout_seconds,
            longest_pause_s=max(endpoint.FIRST_PAUSE_S, probe_interval_seconds),
            spread=jitter,
        )
    except endpoint.EndpointError as error:
        raise TimeoutError(str(error)) from None
