# SPDX-License-Identifier: Apache-2.0
"""Starting the process that hosts a job's store, once per job and port."""

from __future__ import annotations

import errno
import json
import logging
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from nvidia_resiliency_ext.inprocess._protocol.errors import ForeignValueError, StoreLostError

from .endpoint import Endpoint
from .identity import StoreInUseError, claim
from .sockets import is_reachable_from_elsewhere

logger = logging.getLogger("nvrx")

_PROGRAM = os.path.join(os.path.dirname(os.path.abspath(__file__)), "keeper_program.py")
# torch asks the name server for the name of whoever connects, and serves nobody meanwhile.
_RESOLVER = "RES_OPTIONS"
_QUICK = "timeout:1 attempts:1"
_PROBE_S = 5.0
_LONGEST_REPORT = 1 << 14

Connect = Callable[[Endpoint, timedelta], Any]


class KeeperStartError(StoreLostError):
    """The process that is to host the store did not start."""


@dataclass(frozen=True, slots=True)
class KeeperTimes:
    """How long a keeper may take and stay, in seconds.

    Attributes:
        start_s: Its start; most of it is the import of torch.
        idle_s: Its stay when its starter has ended and nobody is connected any more.
    """

    start_s: float = 60.0
    idle_s: float = 1.0


@dataclass(frozen=True, slots=True)
class Keeper:
    """A store that is hosted here.

    Attributes:
        endpoint: Where.
        process: The process that hosts it; None if somebody else has started it.
    """

    endpoint: Endpoint
    process: subprocess.Popen[bytes] | None

    def stop(self, timeout_s: float = 10.0) -> None:
        """End the process if it was started by this object's maker, and wait for its end."""
        if self.process is not None:
            self.process.terminate()
            try:
                self.process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


def keep_store(
    endpoint: Endpoint,
    job: str,
    connect: Connect,
    *,
    is_single_node: bool = False,
    times: KeeperTimes = KeeperTimes(),
) -> Keeper:
    """See to it that a store of this job listens at an endpoint of this host.

    It may listen already: a keeper outlives its starter.

    Args:
        endpoint: Where; an address of this host.
        job: Name of the job.
        connect: Connects to a store, `TCPStore.connect`.
        is_single_node: Nobody will come from another host.
        times: How long it may take and stay.

    Raises:
        StoreInUseError: the port belongs to another job, or to a program that is no store.
        KeeperStartError: it did not start.
    """
    address = endpoint.host
    if not is_single_node and not is_reachable_from_elsewhere(address):
        logger.warning(
            "%s is a loopback address on this host: the store listens at all its addresses",
            address,
        )
        address = ""
    process, report = _start(address, endpoint.port, job, times)
    if "exit_code" in report:
        # This torch cannot be imported in part.
        process, report = _start(address, endpoint.port, job, times, "--whole-torch")
    if "port" in report:
        return Keeper(Endpoint(endpoint.host, report["port"], is_served=True), process)
    process.wait()
    if report.get("errno") != errno.EADDRINUSE:
        raise KeeperStartError(f"no store can be hosted at {endpoint}: {report.get('error')}")
    _join(endpoint, job, connect)
    return Keeper(Endpoint(endpoint.host, endpoint.port, is_served=True), None)


def _join(endpoint: Endpoint, job: str, connect: Connect) -> None:
    advice = "give the wrapper another port in store_kwargs"
    try:
        claim(connect(endpoint, timedelta(seconds=_PROBE_S)), job)
    except StoreInUseError as error:
        raise StoreInUseError(f"port {endpoint.port} is in use: {error}; {advice}") from None
    except (StoreLostError, ForeignValueError) as error:
        raise StoreInUseError(
            f"port {endpoint.port} is in use by what is no store of this job ({error}); {advice}"
        ) from None


def _start(
    address: str, port: int, job: str, times: KeeperTimes, *flags: str
) -> tuple[subprocess.Popen[bytes], dict[str, Any]]:
    reading, writing = os.pipe()
    try:
        options = {
            "--address": address,
            "--port": port,
            "--job": job,
            "--starter": os.getpid(),
            "--idle-s": times.idle_s,
            "--report-fd": writing,
        }
        process = subprocess.Popen(
            [sys.executable, _PROGRAM, *(f"{k}={v}" for k, v in options.items()), *flags],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[writing],
            start_new_session=True,
            cwd="/",
            env={_RESOLVER: _QUICK, **os.environ},
        )
        os.close(writing)
        writing = -1
        return process, _read_report(reading, process, times.start_s)
    except OSError as error:
        raise KeeperStartError(f"the store's process does not start: {error}") from None
    finally:
        os.close(reading)
        if writing >= 0:
            os.close(writing)


def _read_report(
    reading: int, process: subprocess.Popen[bytes], timeout_s: float
) -> dict[str, Any]:
    deadline, text = time.monotonic() + timeout_s, b""
    while not text.endswith(b"\n") and len(text) < _LONGEST_REPORT:
        left_s = max(0.0, deadline - time.monotonic())
        if not select.select([reading], [], [], left_s)[0]:
            process.kill()
            return {"error": f"nothing was heard of it within {timeout_s:g} s"}
        part = os.read(reading, _LONGEST_REPORT)
        if not part:
            code = process.wait()
            return {"error": f"it ended with exit code {code}", "exit_code": code}
        text += part
    report: dict[str, Any] = json.loads(text)
    return report
