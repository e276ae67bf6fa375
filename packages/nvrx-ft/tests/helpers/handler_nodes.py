# SPDX-License-Identifier: Apache-2.0
"""Nodes of a job whose rendezvous handlers live in one process, over a real store."""

import concurrent.futures
import os
import threading
from collections.abc import Callable
from typing import Any

from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous.api import RendezvousParameters

DEADLINE_S = 60

# torch asks for the name of every address that it connects to or accepts; where nobody answers
# that costs 5 s each time, unless the resolver is told to give up.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")


class Nodes:
    """Makes handlers, and calls them in threads.

    Args:
        create: `create_handler` of the module under test.
        min_nodes: How many work.
        max_nodes: How many may.
        conf: Settings of all nodes.
    """

    def __init__(
        self, create: Callable[..., Any], min_nodes: int, max_nodes: int, **conf: Any
    ) -> None:
        self._create = create
        self._nodes = (min_nodes, max_nodes)
        self._conf = {"last_call_timeout": 0, "join_timeout": DEADLINE_S, **conf}
        self.server: TCPStore | None = TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False
        )
        self.handlers: list[Any] = []
        self._pool = concurrent.futures.ThreadPoolExecutor(16)

    def close(self) -> None:
        """End the job, and let go of stores and threads."""
        list(self._pool.map(lambda handler: handler.shutdown(), self.handlers))
        self._pool.shutdown()
        self.handlers.clear()
        self.server = None
        # Those of a node that left alone end with the store.
        for thread in threading.enumerate():
            if thread.name.startswith("nvrx-"):
                thread.join(DEADLINE_S)

    def store(self) -> TCPStore:
        """Return a connection to the store."""
        assert self.server is not None
        return TCPStore("127.0.0.1", self.server.port, is_master=False, wait_for_workers=False)

    def add(self, *, host: bool = False, prefix: str = "", **conf: Any) -> Any:
        """Return the handler of one more node."""
        number = len(self.handlers)
        store = PrefixStore(prefix, self.store()) if prefix else self.store()
        params = RendezvousParameters(
            "c10d", "", "job", *self._nodes, local_addr=f"127.0.0.{number + 2}",
            **{"is_store_host": host, **self._conf, **conf},
        )  # fmt: skip
        handler = self._create(store, None, params)
        self.handlers.append(handler)
        return handler

    def call(self, function: Callable[[], Any]) -> "concurrent.futures.Future[Any]":
        """Call a function in a thread."""
        return self._pool.submit(function)

    def join(self, *handlers: Any) -> list[Any]:
        """Let nodes take part in the next round together; return their places."""
        calls = [self.call(handler.next_rendezvous) for handler in handlers]
        return [call.result(DEADLINE_S) for call in calls]
