# SPDX-License-Identifier: Apache-2.0
"""The process that hosts a job's store and does nothing else; `keeper_program.py` runs it.

It belongs to no training process and to no monitor, so that the loss of any of them is an ordinary
one. It stays as long as its starter lives, which may call again, and after that as long as anybody
is connected; so the next job finds the port free. It ends on SIGTERM, too.
What became of its start it says in one line of JSON on a pipe.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nvidia_resiliency_ext.shared_utils.children import PidHandle
from nvidia_resiliency_ext.shared_utils.store_sockets import serving_options

from .identity import claim
from .sockets import count_served, listen
from .torch_part import PartialImportError, tcp_store_class

# Exit code of one that needs all of torch, and says nothing else: its starter starts it again.
NEEDS_WHOLE = 4
_OWN_CONNECTIONS = 1
_PERIOD_S = 0.25
_LONGEST_WAIT_S = 3600.0


@dataclass(frozen=True, slots=True)
class Duty:
    """What a keeper is told.

    Attributes:
        address: Where it listens; empty for all addresses.
        port: Its port.
        job: Whose it is.
        starter: The process that started it.
        idle_s: How long it stays, without the starter, when nobody is connected any more.
        report_fd: Where it says what became of its start.
        whole_torch: Whether it imports all of torch.
    """

    address: str
    port: int
    job: str
    starter: int
    idle_s: float
    report_fd: int
    whole_torch: bool


def main(arguments: Sequence[str] | None = None) -> int:
    """Host a store until told to end or nobody needs it."""
    duty = _parse(arguments)
    signal.signal(signal.SIGTERM, lambda _number, _frame: sys.exit(0))
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.umask(0o077)
    _allow_open_files()
    try:
        listener = listen(duty.address or "0.0.0.0", duty.port)  # noqa: S104 - asked for by name
        port = listener.getsockname()[1]
        store = _serve(listener, duty.address or "127.0.0.1", port, whole=duty.whole_torch)
        claim(store, duty.job)
    except PartialImportError:
        return NEEDS_WHOLE
    except Exception as error:  # noqa: BLE001 - its starter says it
        number = error.errno if isinstance(error, OSError) else None
        _report(duty.report_fd, {"error": _line(error), "errno": number})
        return 1
    _report(duty.report_fd, {"port": port, "pid": os.getpid()})
    _stay(port, duty)
    # Ends its server.
    del store
    return 0


def _serve(listener: socket.socket, host: str, port: int, *, whole: bool) -> Any:
    store_class = tcp_store_class(whole=whole)
    options = serving_options(listener, importlib.metadata.version("torch"))
    return store_class(host, port, wait_for_workers=False, **options)


def _stay(port: int, duty: Duty) -> None:
    with contextlib.suppress(ProcessLookupError):
        starter = PidHandle(duty.starter)
        while not starter.wait(_LONGEST_WAIT_S):
            pass
    # torch tells nobody who comes and goes: it is looked at now and then.
    pause = threading.Event()
    alone_since = time.monotonic()
    while time.monotonic() - alone_since < duty.idle_s:
        pause.wait(min(_PERIOD_S, duty.idle_s))
        if count_served(port, _OWN_CONNECTIONS + 1) > _OWN_CONNECTIONS:
            alone_since = time.monotonic()


def _allow_open_files() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _report(descriptor: int, fields: dict[str, Any]) -> None:
    # Its starter may have ended.
    with contextlib.suppress(OSError):
        os.write(descriptor, json.dumps(fields).encode() + b"\n")
    os.close(descriptor)


def _line(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    lines = str(error).splitlines()
    return lines[0] if lines else type(error).__name__


def _parse(arguments: Sequence[str] | None) -> Duty:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--address", default="", help="where to listen; empty: everywhere")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--job", required=True, help="name of the job")
    parser.add_argument("--starter", type=int, required=True)
    parser.add_argument("--idle-s", type=float, required=True)
    parser.add_argument("--report-fd", type=int, required=True)
    parser.add_argument("--whole-torch", action="store_true", help="import all of torch")
    return Duty(**vars(parser.parse_args(arguments)))


if __name__ == "__main__":
    sys.exit(main())
