# SPDX-License-Identifier: Apache-2.0
"""The coordinator over a store that the caller brings, and who follows the cycles there."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nvidia_resiliency_ext.fault_tolerance._config.attribution import client_endpoint
from nvidia_resiliency_ext.fault_tolerance._hosting.services import evidence_of, nodes_of
from nvidia_resiliency_ext.fault_tolerance._logs.lines import cycle_log_file
from nvidia_resiliency_ext.fault_tolerance._rendezvous import keys
from nvidia_resiliency_ext.fault_tolerance._rendezvous.host import CoordinatorRules
from nvidia_resiliency_ext.fault_tolerance._rendezvous.host_loop import Coordinator, RoundFollower
from nvidia_resiliency_ext.fault_tolerance._rendezvous.store import (
    JobStore,
    agree_on_secret,
    another_client,
)
from nvidia_resiliency_ext.fault_tolerance.rdzv_utils import rdzv_config_get_as_bool
from nvidia_resiliency_ext.shared_utils.clock import Clock
from nvidia_resiliency_ext.shared_utils.errors import NvrxError

if TYPE_CHECKING:
    from nvidia_resiliency_ext.fault_tolerance._core.cause import Cause
    from nvidia_resiliency_ext.fault_tolerance._rendezvous.placement import Placement
    from nvidia_resiliency_ext.fault_tolerance._rendezvous.records import Entry
    from nvidia_resiliency_ext.fault_tolerance._report.cycle_files import CycleInfoReporter
    from nvidia_resiliency_ext.shared_utils.attribution_client import AttributionService


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


_LAST_WORDS_S = 0.3


@dataclass(frozen=True, slots=True)
class FollowerSettings:
    """What a rendezvous configuration asks for.

    Attributes:
        cycle_info_dir: Where files about cycles go; None: nowhere.
        cycle_log_prefix: What the names of cycle logs are made of.
        attribution_endpoint: The service that reads them; None: nobody.
        enforces_stop: Whether its STOP is to end the job.
        token_file: File with the job's token.
    """

    cycle_info_dir: str | None = None
    cycle_log_prefix: str | None = None
    attribution_endpoint: str | None = None
    enforces_stop: bool = False
    token_file: str | None = None


def follower_settings(conf: Mapping[str, Any]) -> FollowerSettings:
    """Return what `conf` asks for.

    Raises:
        ValueError: a value is unusable, or the service would have no logs to read.
    """
    endpoint = conf.get("attribution_endpoint") or None
    prefix = conf.get("cycle_log_prefix") or None
    if endpoint is not None and prefix is None:
        raise ValueError(
            "attribution_endpoint needs cycle_log_prefix: the service reads cycle logs"
        )
    return FollowerSettings(
        cycle_info_dir=conf.get("cycle_info_dir") or None,
        cycle_log_prefix=prefix,
        attribution_endpoint=None if endpoint is None else client_endpoint(endpoint),
        enforces_stop=bool(rdzv_config_get_as_bool(conf, "attribution_enforce_stop", False)),
        token_file=conf.get("rdzv_token_file") or None,
    )


class CycleFollowers(RoundFollower):
    """Tells both of a job's cycles. Any thread."""

    def __init__(self, settings: FollowerSettings, node_id: str) -> None:
        self._prefix = settings.cycle_log_prefix
        self._reporter: CycleInfoReporter | None = None
        self._service: AttributionService | None = None
        self._lock = threading.Lock()  # guards the next field
        self._is_open = False
        if settings.cycle_info_dir is not None:
            from nvidia_resiliency_ext.fault_tolerance._report.cycle_files import CycleInfoReporter

            self._reporter = CycleInfoReporter(settings.cycle_info_dir, self._prefix)
        if settings.attribution_endpoint is not None:
            from nvidia_resiliency_ext.shared_utils.attribution_client import AttributionService

            self._service = AttributionService(
                settings.attribution_endpoint,
                enforce_stop=settings.enforces_stop,
                token_file=settings.token_file,
                log_complete=False,  # the logs of other nodes may be on their way
            )
            self._service.start_poller(node_id)

    @property
    def stop_requested(self) -> bool:
        """Whether the service said STOP, and that is to be obeyed."""
        return self._service is not None and self._service.stop_requested()

    def closed(self, entry: Entry, placement: Placement, hosts: Mapping[str, str]) -> None:
        """Record that a round is closed: its workers start now."""
        self.ended()
        with self._lock:
            self._is_open = True
        if self._service is not None and self._prefix is not None:
            path = cycle_log_file(self._prefix, entry.round)
            self._service._submit_log(path, entry.round)  # noqa: SLF001 - its name is public
        reporter = self._reporter
        if reporter is not None:
            reporter.report_cycle_start(nodes_of(placement, hosts).snapshot(entry.round))

    def ended(self, round_: int | None = None, cause: Cause | None = None) -> None:
        """Record that the present round is over; harmless when repeated."""
        del round_  # There is no other.
        with self._lock:
            was_open, self._is_open = self._is_open, False
        if not was_open:
            return
        if self._service is not None:
            self._service.request_terminal_analysis(evidence_of(cause))
        reporter = self._reporter
        if reporter is not None:
            reporter.report_cycle_end()

    def end_cycle_info(self) -> None:
        """Write what is known of cycles, for 2 s at most; a cycle that is open ends."""
        reporter, self._reporter = self._reporter, None
        if reporter is not None:
            reporter.shutdown()

    def close(self) -> None:
        """End all of it."""
        self.ended()
        self.end_cycle_info()
        if self._service is not None:
            self._service.stop_poller(_LAST_WORDS_S)


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
