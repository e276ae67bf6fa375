# SPDX-License-Identifier: Apache-2.0
"""A real store for tests of the rendezvous, and a host that serves a job in it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from nvidia_resiliency_ext.fault_tolerance._core.machine import Cause
from nvidia_resiliency_ext.fault_tolerance._rendezvous import endpoint, keys, store
from nvidia_resiliency_ext.fault_tolerance._rendezvous.coordinator import CoordinatorRules
from nvidia_resiliency_ext.fault_tolerance._rendezvous.coordinator_loop import Coordinator
from nvidia_resiliency_ext.fault_tolerance._rendezvous.placement import PlacementRules
from nvidia_resiliency_ext.fault_tolerance._rendezvous.records import Arrival
from nvidia_resiliency_ext.fault_tolerance._rendezvous.restarts import Budget
from nvidia_resiliency_ext.shared_utils.clock import SystemClock

SECRET = b"a secret of the tests"
PREFIX = keys.prefix("job")
CAUSE = Cause("exit", "a worker failed")


class _Answered:
    """A client whose writes wait: the store answers none, but it takes all calls in their order."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._client, name)
        if name not in {"set", "append", "multi_set"}:
            return call

        def write(*args: Any) -> None:
            call(*args)
            self._client.check(["nobody sets it"])

        return write


class Served:
    """A store in this process, with connections that are cut at the end."""

    def __init__(self) -> None:
        listener = endpoint.claim("127.0.0.1", 0, None)
        assert listener is not None
        self.port = listener.getsockname()[1]
        self._server = store.serve(listener, "127.0.0.1", nodes=8)
        self._made: list[store.JobStore] = []

    def connect(self, secret: bytes = SECRET, prefix: str = PREFIX) -> store.JobStore:
        """Return a connection to the job's keys."""
        made = store.connect("127.0.0.1", self.port, prefix, secret, 30.0)
        self._made.append(made)
        return made

    def raw(self) -> Any:
        """Return a client as a foreign program has it; what it has written is there for others."""
        return _Answered(self.connect()._client)

    def kill(self) -> None:
        """End the store."""
        self._server = None

    def close(self) -> None:
        """End everything."""
        for made in self._made:
            made.cut()
        self._made.clear()
        self.kill()


def rules(nodes: int, **fields: Any) -> CoordinatorRules:
    """Return rules for a job of so many nodes, of which none is lost while a test runs."""
    most = fields.pop("most", nodes)
    placement = PlacementRules(min_nodes=nodes, max_nodes=most)
    return CoordinatorRules(
        placement, Budget(1000), **{"lease_s": 20.0, "last_call_s": 0.05, **fields}
    )


def arrival(index: int) -> Arrival:
    """Return what node number `index` offers."""
    return Arrival(node=name(index), addr=f"10.0.0.{index}", host=f"node{index}")


def name(index: int) -> str:
    """Return the identity of node number `index`."""
    return f"10.0.0.{index}_{1000 + index}_0"


@contextlib.contextmanager
def hosted(
    served: Served, by: CoordinatorRules, clock: SystemClock | None = None
) -> Iterator[Coordinator]:
    """Run a host beside the test; whatever it raises is raised at the end."""
    stop, failed = threading.Event(), []
    clock = clock or SystemClock()
    host = Coordinator(served.connect(), by, me="host", epoch="e", clock=clock, stop=stop)

    def run() -> None:
        try:
            host.run()
        except Exception as error:  # noqa: BLE001 - raised again below
            if not stop.is_set():
                failed.append(error)

    thread = threading.Thread(target=run, name="host")
    thread.start()
    try:
        yield host
    finally:
        stop.set()
        host.store.cut()
        thread.join(60)
    assert not thread.is_alive()
    if failed:
        raise failed[0]
