# SPDX-License-Identifier: Apache-2.0
"""Attribution while a job runs: cycle logs go to the service, its verdicts come to the launcher.

Nothing here waits for the service, and nothing that it does or fails to do reaches the job, but
for two words: STOP, and the names of bad nodes, and these only where that was asked for.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from nvidia_resiliency_ext.fault_tolerance._logs.lines import cycle_log_file
from nvidia_resiliency_ext.shared_utils.attribution_wire import ACTION_STOP
from nvidia_resiliency_ext.shared_utils.errors import NvrxError

if TYPE_CHECKING:
    from nvidia_resiliency_ext.shared_utils.attribution_client import AttributionService
    from nvidia_resiliency_ext.shared_utils.event_loop import EventLoop

    from .service import AttributionManager

__all__ = ["AttributionWatch"]

logger = logging.getLogger("nvrx")

LAST_WORDS_S = 0.3


class AttributionWatch:
    """Follows the cycles of a job on its store host. `begin` and `ended` may come from any thread.

    Args:
        manager: Where the service is; it is started here, if this launcher runs it.
        base_log_file: Prefix of the cycle logs.
        token_file: File with the job's token, or None.
        node_id: This node's name in profiling events.
        job_id: The job's name at the service; None: the scheduler's, if there is one.
        log_complete: Whether a cycle's log is whole when the cycle has ended: nobody else writes
            to it.
        loop: Where verdicts are handed over.
        on_stop: Called on the loop with the reason of the first STOP that is to be obeyed.
        on_nodes: Called in any thread with the nodes that are to have no place any more, and why;
            None: their names are only logged.
    """

    def __init__(  # noqa: PLR0913 - named, and each of them a fact of its own
        self,
        manager: AttributionManager,
        *,
        base_log_file: str,
        token_file: str | None,
        node_id: str,
        loop: EventLoop,
        on_stop: Callable[[str], None],
        on_nodes: Callable[[tuple[str, ...], str], None] | None = None,
        job_id: str | None = None,
        log_complete: bool = False,
    ) -> None:
        self._manager = manager
        self._base_log_file = base_log_file
        self._token_file = token_file
        self._node_id = node_id
        self._job_id = job_id
        self._log_complete = log_complete
        self._loop = loop
        self._on_nodes = on_nodes
        self._on_stop = on_stop
        self._lock = threading.Lock()
        self._client: AttributionService | None = None
        self._cycle: int | None = None
        self._has_ended = False
        # The first cycle that ended before there was a client, and what is known of its end.
        self._missed: tuple[int, tuple[str, ...]] | None = None
        self._is_closed = False

    def start(self) -> None:
        """Start the service or find it; what goes wrong is one line, and the job goes on."""
        try:
            must_wait = self._manager.launch()
        except (NvrxError, OSError, ValueError) as error:
            logger.error("attribution is off: %s", error)  # noqa: TRY400 - one line says it
            return
        if must_wait:
            threading.Thread(
                target=self._connect_when_ready, name="nvrx-attribution-start", daemon=True
            ).start()
        else:
            self._connect()

    def begin(self, cycle: int) -> None:
        """Take note that the workers of a cycle start: its log is there to be read."""
        with self._lock:
            if cycle == self._cycle or self._is_closed:
                return
            self._end()
            self._cycle, self._has_ended = cycle, False
            if self._client is not None:
                self._submit(self._client, cycle)

    def ended(self, evidence: tuple[str, ...] = ()) -> None:
        """Take note that the present cycle is over.

        Args:
            evidence: What is known of its end, as lines of a log.
        """
        with self._lock:
            self._end(evidence)

    def close(self, *, asks: bool = True) -> None:
        """End the service and stop asking; what is still to be sent has a moment.

        Args:
            asks: Whether the present cycle ends here, so that a last verdict is asked for.
        """
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            if asks:
                self._end()
            client, self._client = self._client, None
        if client is not None:
            client.stop_poller(LAST_WORDS_S)
        self._manager.stop()

    def _end(self, evidence: tuple[str, ...] = ()) -> None:
        """Ask for the verdict on the present cycle, once; the lock is held."""
        if self._cycle is not None and not self._has_ended:
            self._has_ended = True
            if self._client is not None:
                self._client.request_terminal_analysis(evidence)
            elif self._missed is None:
                self._missed = self._cycle, evidence

    def _submit(self, client: AttributionService, cycle: int) -> None:
        path = cycle_log_file(self._base_log_file, cycle)
        client._submit_log(path, cycle)  # noqa: SLF001 - its name is public

    def _catch_up(self, client: AttributionService) -> None:
        """Submit the first cycle that has ended, and the one that runs; the lock is held."""
        if self._missed is not None:
            cycle, evidence = self._missed
            self._submit(client, cycle)
            client.request_terminal_analysis(evidence)
        if self._cycle is not None and not self._has_ended:
            self._submit(client, self._cycle)

    def _connect_when_ready(self) -> None:
        try:
            self._manager.wait_ready()
        except TimeoutError as error:
            if not self._is_closed:
                logger.error("attribution is off: %s", error)  # noqa: TRY400 - one line says it
            return
        self._connect()

    def _connect(self) -> None:
        endpoint = self._manager.endpoint
        if endpoint is None:
            return
        from nvidia_resiliency_ext.shared_utils.attribution_client import AttributionService

        client = AttributionService(
            endpoint.endpoint,
            enforce_stop=endpoint.enforce_stop,
            token_file=self._token_file,
            job_id=self._job_id,
            log_complete=self._log_complete,
            on_verdict=self._heard,
            on_nodes=self._heard_of_nodes,
        )
        client.start_poller(self._node_id)
        with self._lock:
            is_late = self._is_closed
            if not is_late:
                self._client = client
                self._catch_up(client)
        if is_late:
            # Nobody else knows of it. Its poller takes the lock.
            client.stop_poller(0.0)

    def _heard(self, action: str, log_path: str, reason: str) -> None:
        """Take a verdict, in the client's thread."""
        client = self._client
        if action != ACTION_STOP or client is None:
            return
        count = client.stop_verdict_count()
        logger.error(
            "attribution: STOP, a restart is useless (%d so far): %s: %s", count, log_path, reason
        )
        if client.stop_requested():
            self._loop.post(partial(self._stop_unless_closed, reason or log_path))

    def _heard_of_nodes(self, nodes: tuple[str, ...], log_path: str, reason: str) -> None:
        """Take the names of bad nodes, in the client's thread."""
        names = ", ".join(nodes)
        if self._on_nodes is None:
            logger.warning("attribution: bad nodes: %s: %s: %s", names, log_path, reason)
        else:
            self._on_nodes(nodes, reason or log_path)

    def _stop_unless_closed(self, reason: str) -> None:
        if not self._is_closed:
            self._on_stop(reason)
