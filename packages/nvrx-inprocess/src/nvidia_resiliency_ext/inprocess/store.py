# SPDX-License-Identifier: Apache-2.0
"""The key-value stores that ranks use to agree: torch's, with barriers; for one thread each."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import FileStore as TorchFileStore  # type: ignore[attr-defined]
from torch.distributed import PrefixStore as TorchPrefixStore  # type: ignore[attr-defined]
from torch.distributed import TCPStore as TorchTCPStore  # type: ignore[attr-defined]

from nvidia_resiliency_ext.inprocess import _inputs
from nvidia_resiliency_ext.shared_utils.errors import ConfigError
from nvidia_resiliency_ext.shared_utils.store_client import StoreLostError
from nvidia_resiliency_ext.shared_utils.store_sockets import (
    open_client,
    serving_options,
    socket_names,
)

from ._store.endpoint import (
    Endpoint,
    NobodyListensError,
    first_line,
    iteration_prefix,
    limit_answers,
    listen,
    named_endpoint,
    port_is_held,
    wait_until_listening,
)
from ._store.mixin import BarrierError, BarrierOverflow, BarrierTimeout, StoreMixin

__all__ = [
    "BarrierError", "BarrierOverflow", "BarrierTimeout", "FileStore", "PrefixStore", "StoreMixin",
    "TCPStore",
]  # fmt: skip

logger = logging.getLogger("nvrx")

_TIMEOUT = timedelta(seconds=300)
# A store that lives answers in less than a millisecond; what blocks longer has lost its host.
ANSWER_TIMEOUT_S = 20.0
# What connecting may take beyond the given time: torch itself is not exact.
_GRACE_S = 1.0


def connect_client(make: Callable[[], Any], endpoint: Endpoint, limit_s: float) -> Any:
    """Return the torch client that `make` connects; wait in Python until the port listens.

    torch itself waits more than three times as long, and handles no signal during this wait.
    """
    deadline = time.monotonic() + limit_s
    if not wait_until_listening(endpoint.host, endpoint.port, limit_s):
        text = f"no store answers at {endpoint}: nobody listens there, after {limit_s:g} s"
        raise NobodyListensError(text)
    left_s = max(0.0, deadline - time.monotonic()) + _GRACE_S
    try:
        return open_client(make, endpoint.port, left_s)
    except TimeoutError as error:
        text = f"no store answers at {endpoint}: {error}, after {limit_s:g} s"
        raise StoreLostError(text) from None


class TCPStore(StoreMixin, TorchTCPStore):
    """A store over TCP; rank 0 hosts it unless another process listens there already.

    Args:
        host_name: The host of the store; `MASTER_ADDR` by default.
        port: Its port; `MASTER_PORT` by default.
        world_size: How many processes will connect; `WORLD_SIZE` by default.
        timeout: Longest time to connect, or to wait for a key, a `timedelta`; default: 300 s.
        wait_for_workers: Whether the host waits until all have connected. Default True.
        multi_tenant: Whether several stores of this process share one server. Default False.
        use_libuv: Use torch's server with libuv. Default True; before torch 2.8 always the one
            without libuv, because only that one can listen at a single address.

    Raises:
        ConfigError: An argument is neither given nor usable in the environment.
        StoreLostError: No store answers in time.

    Example:
        >>> store = TCPStore("localhost", 29500, world_size=8)  # doctest: +SKIP
        >>> store.barrier([rank], "start", 8, timedelta(seconds=60))  # doctest: +SKIP
    """

    critical_ranks = (0,)

    def __init__(  # noqa: PLR0913, PLR0917 - the signature is given
        self,
        host_name: str | None = None,
        port: int | None = None,
        world_size: int | None = None,
        timeout: timedelta = _TIMEOUT,
        wait_for_workers: bool = True,
        multi_tenant: bool = False,
        use_libuv: bool = True,
    ) -> None:
        endpoint = named_endpoint(os.environ, host_name, port)
        world_size = _inputs.optional_number("WORLD_SIZE") if world_size is None else world_size
        if world_size is None:
            found = f"WORLD_SIZE={os.environ.get('WORLD_SIZE', '')[:64]!r} in the environment"
            raise ConfigError(f"{found} is no number, and no world_size is given")
        options = {
            "world_size": world_size,
            "timeout": timeout,
            "wait_for_workers": wait_for_workers,
            "multi_tenant": multi_tenant,
            "use_libuv": use_libuv,
        }
        is_host = _inputs.number("RANK", 0) == 0
        if not is_host:
            self._join(endpoint, options)
        elif not self._host(endpoint, options):
            try:
                self._join(endpoint, options)
            except NobodyListensError as error:
                raise NobodyListensError(f"{error}; {port_is_held(endpoint.port)}") from None

    @classmethod
    def connect(
        cls, endpoint: Endpoint, timeout: timedelta = _TIMEOUT, *, use_libuv: bool = True
    ) -> TCPStore:
        """Connect to a store that another process serves; never host one.

        Args:
            endpoint: Host and port of the store.
            timeout: Longest wait of the store's methods, a `timedelta`; default: 300 s.
            use_libuv: As torch's `TCPStore`. Default True.

        Raises:
            StoreLostError: No process serves it, or the port belongs to something else.
        """
        store = cls.__new__(cls)
        options = {"timeout": timeout, "wait_for_workers": False, "use_libuv": use_libuv}
        TCPStore._join(store, endpoint, options)
        return store

    def clone(self) -> TCPStore:
        """Return the same store over a new connection, for another thread."""
        endpoint = Endpoint(self.host, self.port, is_served=True)
        return TCPStore.connect(endpoint, _timeout_of(self), use_libuv=self._use_libuv)

    def limit_answers(self, timeout_s: float) -> None:
        """Limit a wait for a reply of the store to `timeout_s`, on all connections to its port."""
        limit_answers(self.port, timeout_s)

    def _host(self, endpoint: Endpoint, options: dict[str, Any]) -> bool:
        """Serve the store here; False if somebody serves that port already."""
        options = dict(options)
        listener = None
        if not options["multi_tenant"]:
            try:
                listener = listen(endpoint.host, endpoint.port)
            except socket.gaierror as error:
                raise StoreLostError(f"{endpoint.host} does not resolve: {error}") from None
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    return False
                # The address may be that of a gateway: then torch listens at all addresses.
                logger.warning(
                    "the store listens at all addresses: %s is none of this host", endpoint.host
                )
        port = endpoint.port
        if listener is not None:
            port = listener.getsockname()[1]
            options |= serving_options(listener, torch.__version__, without_libuv=True)
        try:
            self._open(endpoint.host, port, options={"is_master": True, **options})
        except RuntimeError as error:
            if "EADDRINUSE" in str(error):
                return False
            raise
        return True

    def _join(self, endpoint: Endpoint, options: dict[str, Any]) -> None:
        known = socket_names()
        client = {"is_master": False, **options}
        try:
            connect_client(
                lambda: self._open(endpoint.host, endpoint.port, options=client),
                endpoint,
                options["timeout"].total_seconds(),
            )
        except RuntimeError as error:
            raise StoreLostError(f"no store answers at {endpoint}: {first_line(error)}") from None
        limit_answers(endpoint.port, ANSWER_TIMEOUT_S, known)

    def _open(self, host: str, port: int, options: dict[str, Any]) -> None:
        self._use_libuv = options["use_libuv"]
        super().__init__(host, port, **options)


class FileStore(StoreMixin, TorchFileStore):
    """A store in a file that all processes can reach.

    Args:
        path: The file.
        world_size: How many processes use it; negative if that is not known.
        timeout: Longest time to wait for a key, a `timedelta`; default: 300 s.
    """

    def __init__(
        self, path: str | os.PathLike[str], world_size: int = -1, timeout: timedelta = _TIMEOUT
    ) -> None:
        super().__init__(os.fspath(path), world_size)
        self._path = os.fspath(path)
        self._world_size = world_size
        self.set_timeout(timeout)

    def clone(self) -> FileStore:
        """Return the same store for another thread."""
        return FileStore(self._path, self._world_size, _timeout_of(self))


class PrefixStore(StoreMixin, TorchPrefixStore):
    """The keys of one iteration.

    Args:
        iteration: Which.
        store: Where they are kept.

    Attributes:
        base_store: The store that was given.
    """

    def __init__(self, iteration: int, store: Any) -> None:
        super().__init__(iteration_prefix(iteration), store)
        self.iteration = iteration
        self.base_store = store
        with contextlib.suppress(AttributeError):
            self.critical_ranks = store.critical_ranks

    def clone(self) -> PrefixStore:
        """Return the same keys over a connection of their own, for another thread."""
        return PrefixStore(self.iteration, self.base_store.clone())


def _timeout_of(store: Any) -> timedelta:
    # torch's stubs do not know the property.
    timeout: timedelta = store.timeout
    return timeout
