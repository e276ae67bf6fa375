# SPDX-License-Identifier: Apache-2.0
"""Owns the thread that takes lines from a queue of the caller's and sends them to a log server."""

from __future__ import annotations

import logging
import queue
import threading

from nvidia_resiliency_ext.shared_utils.errors import NvrxError

from .sinks import FunnelAddress, FunnelPlace, Sink

__all__ = ["GrpcWriterThread"]

_CLOSE_S = 30.0


class GrpcWriterThread(threading.Thread):
    """Sends `(path, whole lines)` pairs of a queue to a log server, until it is shut down.

    The server's client keeps lines while the server is away. The queue is the caller's: it should
    have a limit.

    Args:
        write_queue: Where the pairs come from; lines are bytes, or text, which becomes UTF-8.
            None ends the thread, too.
        grpc_server_address: `host:port`.
        node_id: What the server calls this node.
        logger: Where problems are said.
    """

    def __init__(
        self,
        write_queue: queue.Queue[tuple[str, bytes | str] | None],
        grpc_server_address: str,
        node_id: str,
        logger: logging.Logger,
    ) -> None:
        super().__init__(name="nvrx-log-sender", daemon=True)
        self._queue = write_queue
        self._place = FunnelPlace(FunnelAddress(grpc_server_address, str(node_id)))
        self._logger = logger
        self._sinks: dict[str, Sink] = {}

    def shutdown(self) -> None:
        """Let it send what is in the queue now, and end; `join` waits for that.

        Raises:
            queue.Full: The queue has had no room for 30 s.
        """
        self._queue.put(None, timeout=_CLOSE_S)

    def run(self) -> None:
        """Send until None comes, then wait until the server has everything, 30 s at most."""
        while (item := self._queue.get()) is not None:
            path, lines = item
            if isinstance(lines, str):
                lines = lines.encode(errors="surrogateescape")
            try:
                if path not in self._sinks:
                    self._sinks[path] = self._place.open(path)
                self._sinks[path].write(memoryview(lines))
            except (OSError, NvrxError) as error:
                self._logger.error("lines for %s are lost: %s", path, error)  # noqa: TRY400
        if not self._place.close(_CLOSE_S):
            self._logger.error("the log server has not confirmed all lines")
