# SPDX-License-Identifier: Apache-2.0
"""The role of the store host over a caller's store: one node of the job decides its rounds."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable

from nvidia_resiliency_ext.fault_tolerance._rendezvous import keys
from nvidia_resiliency_ext.fault_tolerance._rendezvous.host import HostRules
from nvidia_resiliency_ext.fault_tolerance._rendezvous.host_loop import Host, RoundFollower
from nvidia_resiliency_ext.shared_utils.clock import Clock
from nvidia_resiliency_ext.shared_utils.errors import NvrxError

from .guest_store import BellStore

logger = logging.getLogger("nvrx")


class RoundsThread(threading.Thread):
    """Decides the rounds of a job until it is over; ends at once where another node does so.

    Args:
        connect: Makes a connection for this thread.
        rules: What decisions go by.
        node: This node's identity.
        clock: Where the time is read.
        follower: Who is told of rounds.
    """

    def __init__(
        self,
        connect: Callable[[], BellStore],
        rules: HostRules,
        node: str,
        clock: Clock,
        follower: RoundFollower | None = None,
    ) -> None:
        super().__init__(name="nvrx-store-host", daemon=True)
        self._connect = connect
        self._rules = rules
        self._node = node
        self._clock = clock
        self._follower = follower

    def run(self) -> None:
        """Decide until the job is over. A failure is seen by all nodes: nobody answers them."""
        try:
            store = self._connect()
            try:
                first = store.create(keys.HOST, self._node)
                if first != self._node:
                    logger.info("another node decides this job's rounds: %s", first)
                    return
                epoch = os.urandom(8).hex()
                Host(
                    store,
                    self._rules,
                    me=self._node,
                    epoch=epoch,
                    clock=self._clock,
                    follower=self._follower,
                ).run()
            finally:
                store.close()
        except NvrxError as error:
            logger.error("nobody decides this job's rounds any more: %s", str(error))  # noqa: TRY400
