# SPDX-License-Identifier: Apache-2.0
"""The program `nvrx-attrsvc`: bind, serve, end."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

from nvidia_resiliency_ext.attribution._core.files import lock_for_life
from nvidia_resiliency_ext.services.attrsvc.app import create_app
from nvidia_resiliency_ext.services.attrsvc.settings import ServiceEndpoint, Settings
from nvidia_resiliency_ext.shared_utils import unix_sockets
from nvidia_resiliency_ext.shared_utils.console import plain, write_err
from nvidia_resiliency_ext.shared_utils.errors import ConfigError, NvrxError
from nvidia_resiliency_ext.shared_utils.os_utils import private_dir

__all__ = ["main", "setup"]

logger = logging.getLogger("nvrx")

_EXIT_USAGE = 2
_BACKLOG = 1024
_ACCEPTS = 64
_GRACE_S = 2
_MUTE_S = 10.0
_MOST_MUTE = 1024
_MUTE_SHARE = 2


def setup(environ: Mapping[str, str] | None = None) -> Settings:
    """Return the settings of the environment, and configure logging.

    Args:
        environ: The environment; None: that of the process.

    Raises:
        ConfigError: A setting is wrong.

    Example:
        >>> str(setup({"NVRX_ATTRSVC_ALLOWED_ROOT": "/logs"}).service_endpoint)  # doctest: +SKIP
        'http://127.0.0.1:8000'
    """
    settings = Settings.from_environ(os.environ if environ is None else environ)
    logging.basicConfig(
        level=settings.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    return settings


def main(argv: list[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT.

    Args:
        argv: The arguments without the program's name; None: those of the process.

    Returns:
        0 at the end, 2 when a setting is wrong or the address cannot be used.
    """
    parser = argparse.ArgumentParser(
        prog="nvrx-attrsvc",
        description="Serve verdicts about logs over HTTP. Settings are environment variables:"
        " NVRX_ATTRSVC_ALLOWED_ROOT (required), NVRX_ATTRSVC_ENDPOINT and others.",
    )
    _, unknown = parser.parse_known_args(argv)
    if unknown:
        parser.error(
            f"{unknown[0]}: it takes no arguments; set environment variables, such as"
            " NVRX_ATTRSVC_ENDPOINT=127.0.0.1:8000"
        )
    try:
        settings = setup()
        app = create_app(settings)
        with _own_state(settings.state_dir), _bound(settings.service_endpoint) as listener:
            return _serve(app, listener, settings)
    except (NvrxError, OSError) as error:
        write_err(plain(f"nvrx-attrsvc: {error}") + "\n")
        return _EXIT_USAGE


def _serve(app: Any, listener: socket.socket, settings: Settings) -> int:
    import uvicorn
    from uvicorn.protocols.http.h11_impl import H11Protocol

    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # each client takes one
    mute = _Mute()

    class Protocol(H11Protocol):
        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            mute.close(self.connections)

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            listener.listen(_BACKLOG)  # asyncio has made it as short as what it accepts at once

        async def on_tick(self, counter: int) -> bool:
            mute.close(self.server_state.connections)
            return await super().on_tick(counter)

    config = uvicorn.Config(
        app,
        log_config=None,
        log_level=settings.log_level.lower(),
        access_log=False,
        timeout_graceful_shutdown=_GRACE_S,
        server_header=False,
        http=Protocol,
        backlog=_ACCEPTS,  # so many are accepted before others are looked at
    )
    logger.info("listening at %s; logs below %s", settings.service_endpoint, settings.allowed_root)
    server = Server(config)

    def end(*_: object) -> None:
        server.should_exit = True

    # uvicorn raises a signal again after its own end: without these the process would then die
    # before it has removed its socket.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    server.run(sockets=[listener])
    return 0 if server.started else _EXIT_USAGE


class _Mute:
    """Let go of connections that ask nothing: those without a request, or after one was answered.

    Each may wait `_MUTE_S` seconds, and all have a part of the descriptors: the oldest go first.
    """

    def __init__(self) -> None:
        self._since: dict[Any, tuple[object, float]] = {}

    def close(self, connections: Any) -> None:
        """Look at all connections; called for each new one, and many times a second."""
        now_s = time.monotonic()
        mute = [c for c in connections if c.cycle is None or c.cycle.response_complete]
        known = self._since
        self._since = {}
        for one in mute:
            cycle, since_s = known.get(one, (one.cycle, now_s))
            self._since[one] = (one.cycle, since_s if cycle is one.cycle else now_s)
        oldest = sorted(mute, key=lambda one: self._since[one][1])
        descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)  # may be changed at any time
        most = min(descriptors // _MUTE_SHARE, _MOST_MUTE)
        for index, one in enumerate(oldest):
            is_late = now_s - self._since[one][1] > _MUTE_S
            if one.transport is not None and (is_late or len(oldest) - index > most):
                one.transport.abort()


@contextlib.contextmanager
def _own_state(path: str | None) -> Iterator[None]:
    """Keep other services from a state directory; the kernel lets go of it with the process.

    Raises:
        ConfigError: Another service has it, or it cannot be used.
    """
    if path is None:
        yield
        return
    what = f"the state directory {path}"
    try:
        private_dir(path)
    except OSError as error:
        raise ConfigError(f"{what}: {error.strerror or error}") from None
    lock = lock_for_life(os.path.join(path, "lock"), what)
    try:
        yield
    finally:
        os.close(lock)


@contextlib.contextmanager
def _bound(where: ServiceEndpoint) -> Iterator[socket.socket]:
    """Yield a listening socket; the file of a Unix socket is removed in the end.

    Raises:
        ConfigError: The address cannot be had.
    """
    try:
        listener = _listening(where)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"cannot listen at {where}: {why}") from None
    with listener:
        try:
            yield listener
        finally:
            if where.path is not None:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(where.path)


def _listening(where: ServiceEndpoint) -> socket.socket:
    if where.path is not None:
        return unix_sockets.listen(where.path, _BACKLOG)
    family = socket.AF_INET6 if ":" in where.host else socket.AF_INET
    # With the protocol named, asyncio switches off the delay of small packets: 40 ms a reply.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((where.host, where.port))
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


if __name__ == "__main__":
    sys.exit(main())
