# SPDX-License-Identifier: Apache-2.0
"""The control plane at work: serves the store, learns the job's rules from its launchers, decides.

It keeps nothing on disk. When it is started again it asks the launchers, which go on training
meanwhile, where the job stands.
"""

from __future__ import annotations

import logging
import os
import threading

from nvidia_resiliency_ext.fault_tolerance._rendezvous import keys
from nvidia_resiliency_ext.fault_tolerance._rendezvous.agreement import (
    read_settings,
    write_settings,
)
from nvidia_resiliency_ext.fault_tolerance._rendezvous.endpoint import claim, read_token
from nvidia_resiliency_ext.fault_tolerance._rendezvous.host_loop import Host
from nvidia_resiliency_ext.fault_tolerance._rendezvous.rules import rules_from_settings
from nvidia_resiliency_ext.fault_tolerance._rendezvous.store import (
    JobStore,
    connect,
    load_torch,
    serve,
    share_secret,
)
from nvidia_resiliency_ext.shared_utils.clock import SystemClock

from .plan import ControlPlan

logger = logging.getLogger("nvrx")

# It starts no workers that would inherit a high limit of open files.
MOST_NODES = 4096
LOOK_S = 1.0


class ControlPlane:
    """Serves one job; use it as a context manager.

    Args:
        plan: What to serve.
        stop: Set to leave before the job is over; the launchers then wait for another.

    Raises:
        EndpointError: the endpoint cannot be served here.
        ConfigError: the token file is unusable.
    """

    def __init__(self, plan: ControlPlan, stop: threading.Event) -> None:
        self._plan = plan
        self._stop = stop
        self._clock = SystemClock()

    def __enter__(self) -> ControlPlane:  # noqa: PYI034  # Self is not in Python 3.10
        """Begin to listen, and serve the store."""
        plan = self._plan
        prefix = keys.prefix(plan.run_id)
        secret = read_token(plan.token_file) if plan.token_file else None
        # Before anybody can connect: who waits in the queue of a port is not told that no store is
        # there yet, and its lease does not stand still.
        load_torch()
        listener = claim(plan.host, plan.port, is_host=True)
        assert listener is not None
        self._server = serve(listener, plan.host, MOST_NODES)
        secret = secret or share_secret(self._server, prefix)
        self._store = connect(plan.host, plan.port, prefix, secret, LOOK_S)
        self._store.put(keys.CONTROL_SETTINGS, write_settings("nvrx-control", plan.settings()))
        logger.info("nvrx-control serves job %r at %s:%d", plan.run_id, plan.host, plan.port)
        return self

    def __exit__(self, *_: object) -> None:
        """Let the store go."""
        del self._store, self._server

    def run(self) -> None:
        """Decide the job's rounds until it is over or `stop` is set.

        Raises:
            NvrxError: the job cannot be served.
        """
        settings = self._wait_for_settings(self._store)
        if settings is None:
            return
        host = Host(
            self._store,
            rules_from_settings(settings),
            me="nvrx-control",
            epoch=os.urandom(8).hex(),
            clock=self._clock,
            is_controlled=True,
            stop=self._stop,
        )
        host.run()
        entry = host.entry
        if entry.phase is entry.phase.OVER:
            what = entry.cause.what if entry.cause else entry.reason
            logger.info("the job is over after %d restarts: %s", entry.round, what)

    def _wait_for_settings(self, store: JobStore) -> dict[str, str] | None:
        """Wait for the first launcher, which tells what all launchers go by."""
        while not self._stop.is_set():
            text = store.wait_for(keys.SETTINGS, LOOK_S)
            if text is not None:
                return read_settings(text)
        return None
