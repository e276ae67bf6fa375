# SPDX-License-Identifier: Apache-2.0
"""The job's store where it is served, and the thread that decides the rounds in it."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass

from nvidia_resiliency_ext.fault_tolerance._core.machine import Cause
from nvidia_resiliency_ext.fault_tolerance._rendezvous import store as stores
from nvidia_resiliency_ext.fault_tolerance._rendezvous.coordinator import CoordinatorRules
from nvidia_resiliency_ext.fault_tolerance._rendezvous.coordinator_loop import Coordinator
from nvidia_resiliency_ext.fault_tolerance._rendezvous.records import Entry, Phase
from nvidia_resiliency_ext.shared_utils.errors import NvrxError

logger = logging.getLogger("nvrx")


@contextlib.contextmanager
def served_store(  # noqa: PLR0913 - named, and each of them a fact of its own
    listener: socket.socket,
    host: str,
    port: int,
    prefix: str,
    secret: bytes | None,
    *,
    nodes: int,
    timeout_s: float,
    says: Mapping[str, str],
) -> Iterator[stores.JobStore]:
    """Serve a job's store on `listener`, and connect to it within `timeout_s`.

    Without a `secret` for digests one is made, and left in the store; `says` stands there first.
    """
    server = stores.serve(listener, host, nodes)
    secret = secret or stores.agree_on_secret(server, prefix)
    own = stores.connect(host, port, prefix, secret, timeout_s)
    try:
        own.put_all(says)
        yield own
    finally:
        own.cut()
        del server


@dataclass(eq=False, repr=False)
class CoordinatorThread(threading.Thread):
    """Decides the job's rounds; it ends, and the store with it, when the job is over for all."""

    # Gives the job's store for as long as it is needed; used in the thread.
    store: Callable[[], AbstractContextManager[stores.JobStore]]
    # Returns what decisions go by, once that is known; None: nothing will be decided.
    rules: Callable[[stores.JobStore, threading.Event], CoordinatorRules | None]
    # Makes the `Coordinator` of a store and these rules; further fields of it are given here.
    coordinator: Callable[..., Coordinator]
    on_end: Callable[[], None] = lambda: None  # Called in the thread.

    def __post_init__(self) -> None:
        super().__init__(name="nvrx-store-host", daemon=True)
        self._end_asked = threading.Event()
        self._host: Coordinator | None = None
        self.problem = ""
        self.outcome: Entry | None = None

    def run(self) -> None:
        """Serve until the job is over. A failure is seen by all nodes: their store is gone."""
        try:
            self._serve()
        except NvrxError as error:
            # Its text alone: an exception keeps frames, and with them the store.
            self.problem = str(error)
            logger.error("nobody decides this job's rounds any more: %s", self.problem)  # noqa: TRY400
        except Exception as error:
            self.problem = f"a defect in the rendezvous host: {error!r}"
            logger.exception("a defect in the rendezvous host ended the job's store")
        finally:
            self.on_end()

    def stop(self) -> None:
        """End within a second, though the job may go on elsewhere."""
        self._end_asked.set()

    def end_job(self, reason: str, cause: Cause) -> None:
        """End the job for everybody; from any thread, and in vain before its first round."""
        if self._host is not None:
            self._host.end_job(reason, cause)

    def _serve(self) -> None:
        with self.store() as store:
            rules = self.rules(store, self._end_asked)
            if rules is None:
                return
            epoch = os.urandom(8).hex()
            self._host = self.coordinator(store, rules, epoch=epoch, stop=self._end_asked)
            self._host.run()
            entry = self._host.entry
            self.outcome = entry if entry.phase is Phase.OVER else None
