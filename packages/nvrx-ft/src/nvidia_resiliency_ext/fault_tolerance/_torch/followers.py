# SPDX-License-Identifier: Apache-2.0
"""The coordinator over a store that the caller brings, and who follows the cycles there."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping
from typing import Any

from nvidia_resiliency_ext.fault_tolerance._config.attribution import (
    AttributionConfig,
    client_endpoint,
)
from nvidia_resiliency_ext.fault_tolerance._hosting.services import ServicesPlan
from nvidia_resiliency_ext.fault_tolerance._plan.log_plan import LogPlan
from nvidia_resiliency_ext.fault_tolerance._rendezvous import keys
from nvidia_resiliency_ext.fault_tolerance._rendezvous.coordinator import CoordinatorRules
from nvidia_resiliency_ext.fault_tolerance._rendezvous.coordinator_loop import (
    Coordinator,
    RoundFollower,
)
from nvidia_resiliency_ext.fault_tolerance._rendezvous.store import (
    JobStore,
    agree_on_secret,
    another_client,
)
from nvidia_resiliency_ext.fault_tolerance.rdzv_utils import rdzv_config_get_as_bool
from nvidia_resiliency_ext.shared_utils.clock import Clock
from nvidia_resiliency_ext.shared_utils.errors import NvrxError


def connect_guest(client: Any, prefix: str, secret: bytes | None) -> JobStore:
    """Return the job's keys in the store of `client`, over a connection of their own.

    Args:
        client: The caller's store; it stays theirs.
        prefix: Before all keys of the job.
        secret: Key of the digests; None takes the one that the first node left in the store.

    Raises:
        StoreLostError: the store is gone, or not what this needs.
    """
    own = another_client(client)
    return JobStore(own, prefix, agree_on_secret(own, prefix) if secret is None else secret)


def follower_plan(conf: Mapping[str, Any]) -> ServicesPlan:
    """Return what the node that decides the rounds runs beside that, as `conf` asks for it.

    Raises:
        ValueError: a value is unusable, or the service would have no logs to read.
    """
    endpoint = conf.get("attribution_endpoint") or None
    prefix = conf.get("cycle_log_prefix") or None
    if endpoint is not None and prefix is None:
        raise ValueError(
            "attribution_endpoint needs cycle_log_prefix: the service reads cycle logs"
        )
    enforces = rdzv_config_get_as_bool(conf, "attribution_enforce_stop", False)
    return ServicesPlan(
        logs=LogPlan(applog_prefix=prefix),
        cycle_info_dir=conf.get("cycle_info_dir") or None,
        attribution=AttributionConfig(
            None if endpoint is None else client_endpoint(endpoint),
            stop_action="no-restart" if enforces else "log",
        ),
        token_file=conf.get("rdzv_token_file") or None,
    )


logger = logging.getLogger("nvrx")


class RoundsThread(threading.Thread):
    """Decides the rounds of a job until it is over; ends at once where another node does so."""

    def __init__(
        self,
        connect: Callable[[], JobStore],
        rules: CoordinatorRules,
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
                Coordinator(
                    store,
                    self._rules,
                    me=self._node,
                    epoch=epoch,
                    clock=self._clock,
                    follower=self._follower,
                ).run()
            finally:
                store.cut()
        except NvrxError as error:
            logger.error("nobody decides this job's rounds any more: %s", str(error))  # noqa: TRY400
