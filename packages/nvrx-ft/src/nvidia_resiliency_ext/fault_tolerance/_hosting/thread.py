# SPDX-License-Identifier: Apache-2.0
"""The thread that serves a job's store and decides its rounds; it ends when the job is over."""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nvidia_resiliency_ext.fault_tolerance._rendezvous import keys
from nvidia_resiliency_ext.fault_tolerance._rendezvous.coordinator_loop import Coordinator
from nvidia_resiliency_ext.fault_tolerance._rendezvous.records import Phase
from nvidia_resiliency_ext.fault_tolerance._rendezvous.store import (
    JobStore,
    connect,
    serve,
    share_secret,
)
from nvidia_resiliency_ext.shared_utils.errors import NvrxError

if TYPE_CHECKING:
    from nvidia_resiliency_ext.fault_tolerance._core.cause import Cause
    from nvidia_resiliency_ext.fault_tolerance._rendezvous.coordinator import CoordinatorRules
    from nvidia_resiliency_ext.fault_tolerance._rendezvous.records import Entry
    from nvidia_resiliency_ext.fault_tolerance._rendezvous.restarts import Denylist
    from nvidia_resiliency_ext.shared_utils.clock import Clock

    from .services import CoordinatorServices


logger = logging.getLogger("nvrx")


@dataclass(frozen=True, slots=True, kw_only=True)
class StorePlan:
    """The store that is served.

    Attributes:
        listener: The socket that it listens on, which becomes the store's.
        host: Its address, as clients reach it.
        prefix: Before all keys of the job.
        secret: Key of the digests; None: one is made, and left in the store.
        nodes: How many nodes it is for.
        timeout_s: How long connecting to it may take.
        is_controlled: Whether it outlives the nodes: it is not in a launcher.
        says: What stands in it before anything is decided, by key.
    """

    listener: socket.socket
    host: str
    port: int
    prefix: str
    secret: bytes | None
    nodes: int
    timeout_s: float
    is_controlled: bool = False
    says: Mapping[str, str] = field(default_factory=dict)


class CoordinatorThread(threading.Thread):
    """Serves the store and decides the job's rounds; it ends when the job is over for all.

    Args:
        plan: The store.
        rules: Returns what decisions go by, once that is known; None where nothing will be
            decided. Called in the thread, and given the event that says to give up.
        me: Name under which decisions are signed.
        services: Who follows the rounds.
        on_bad_node: Called with a node that is lost, named, or that failed again and again.
        denylist: Hosts that are to have no place where that can be.
        on_end: Called in the thread when it ends.

    Attributes:
        problem: What ended it before the job was over.
        outcome: The decision that ended the job, once there is one.
    """

    def __init__(  # noqa: PLR0913 - named, and each of them a fact of its own
        self,
        plan: StorePlan,
        rules: Callable[[JobStore, threading.Event], CoordinatorRules | None],
        *,
        me: str,
        clock: Clock,
        services: CoordinatorServices,
        on_bad_node: Callable[[Cause], None],
        denylist: Denylist,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(name="nvrx-store-host", daemon=True)
        self._plan = plan
        self._rules = rules
        self._me = me
        self._clock = clock
        self._services = services
        self._on_bad_node = on_bad_node
        self._denylist = denylist
        self._on_end = on_end
        self._end_asked = threading.Event()
        self._host: Coordinator | None = None
        self.problem: Exception | None = None
        self.outcome: Entry | None = None

    def run(self) -> None:
        """Serve until the job is over. A failure is seen by all nodes: their store is gone."""
        try:
            self._serve()
        except NvrxError as error:
            self.problem = error
            logger.error("the job's store ended: %s", error)  # noqa: TRY400 - one line says it
        except Exception as error:
            self.problem = error
            logger.exception("a defect in the rendezvous host ended the job's store")
        finally:
            self._on_end()

    def stop(self) -> None:
        """End within a second, though the job may go on elsewhere."""
        self._end_asked.set()

    def end_job(self, reason: str, cause: Cause) -> None:
        """End the job for everybody; from any thread, and in vain before its first round."""
        if self._host is not None:
            self._host.end_job(reason, cause)

    def _serve(self) -> None:
        plan = self._plan
        server = serve(plan.listener, plan.host, plan.nodes)
        secret = plan.secret or share_secret(server, plan.prefix)
        own = connect(plan.host, plan.port, plan.prefix, secret, plan.timeout_s)
        try:
            own.put_all({keys.LOG_TOKEN: self._services.log_token, **plan.says})
            rules = self._rules(own, self._end_asked)
            if rules is None:
                return
            self._host = Coordinator(
                own,
                rules,
                me=self._me,
                epoch=os.urandom(8).hex(),
                clock=self._clock,
                is_controlled=plan.is_controlled,
                follower=self._services,
                on_bad_node=self._on_bad_node,
                denylist=self._denylist,
                stop=self._end_asked,
            )
            self._host.run()
            entry = self._host.entry
            self.outcome = entry if entry.phase is Phase.OVER else None
        finally:
            own.cut()
            del server
