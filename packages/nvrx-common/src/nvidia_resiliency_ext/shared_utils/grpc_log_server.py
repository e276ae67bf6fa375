# SPDX-License-Identifier: Apache-2.0
"""The root of the log funnel: `python -m nvidia_resiliency_ext.shared_utils.grpc_log_server`.

It takes lines from nodes, or from leaves that collect them, and appends them to files below the
allowed roots. It needs the extra `grpc`.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ._funnel.server import chunks
from ._funnel.server.chunks import Chunk, Refusal
from ._funnel.server.funnel import Funnel
from ._funnel.server.process import CLOSE_S
from ._funnel.server.queue import FunnelOptions
from ._funnel.server.service import RefusalLog
from ._funnel.server.target import Source, Target
from .clock import Deadline

__all__ = ["LogAggregationServicer", "main", "serve"]

_logger = logging.getLogger("LogAggregationServer")

_PATIENCE_S = 5.0


class LogAggregationServicer:
    """Takes log chunks and appends them to the files that they name.

    Safe in all threads. It owns threads and open files from construction to `shutdown`.

    gRPC calls `StreamLogs`, `StreamLogsAcked`, `HealthCheck` and `Stats` with `request` or
    `request_iterator`, the client's messages, and `context`, the call.

    Args:
        max_buffer_size: A file with so many bytes waiting is written at once.
        graceful_shutdown_timeout: Seconds that `graceful_shutdown` waits for open streams.
        flush_interval: A file with less waiting is written so many seconds after its last write.
        completion_idle_timeout: Seconds without a chunk that make an old cycle's file complete.
        allowed_roots: Directories below which files may lie; `None`, for use in process: anywhere.
        options: All settings at once, for `serve`; it replaces what the others say.

    Raises:
        ValueError: `completion_idle_timeout` is negative, or another setting makes no sense.

    Example:
        >>> servicer = LogAggregationServicer(allowed_roots=["/var/log"])
        >>> servicer.shutdown()
    """

    def __init__(
        self,
        max_buffer_size: int = 1048576,
        graceful_shutdown_timeout: float = 60.0,
        flush_interval: float = 1.0,
        completion_idle_timeout: float = 10.0,
        *,
        allowed_roots: Iterable[str] | None = None,
        options: FunnelOptions | None = None,
    ) -> None:
        if completion_idle_timeout < 0:
            raise ValueError(f"completion_idle_timeout={completion_idle_timeout} is negative")
        self._options = options or FunnelOptions(
            allowed_roots=None if allowed_roots is None else tuple(allowed_roots),
            flush_bytes=max_buffer_size,
            flush_interval_s=flush_interval,
            completion_idle_s=completion_idle_timeout,
        )
        self.max_buffer_size = self._options.flush_bytes
        self.flush_interval = self._options.flush_interval_s
        self.graceful_shutdown_timeout = graceful_shutdown_timeout
        self.completion_idle_timeout = self._options.completion_idle_s
        self._funnel = Funnel(self._options)
        self.clients_lock = threading.Lock()  # guards `connected_clients`
        self._connected_clients = 0
        self._refusals = RefusalLog(_logger)
        self._nobody = threading.Event()
        self._nobody.set()

    @property
    def connected_clients(self) -> int:
        """Streams that are open; `graceful_shutdown` waits until there are none."""
        return self._connected_clients

    @connected_clients.setter
    def connected_clients(self, count: int) -> None:
        self._connected_clients = count
        if count:
            self._nobody.clear()
        else:
            self._nobody.set()

    @property
    def files(self) -> Mapping[str, Target]:
        """The files in use, by path."""
        return dict(self._funnel.queue.targets)

    @property
    def total_bytes_received(self) -> int:
        """Bytes of log data that came in."""
        return self._funnel.queue.received_bytes

    @property
    def total_chunks_received(self) -> int:
        """Chunks that came in."""
        return self._funnel.queue.received_chunks

    def StreamLogs(self, request_iterator: Iterable[Any], context: Any) -> Any:  # noqa: N802
        """Take a stream of LogChunk and answer with a StreamResponse when it is in its files."""
        pb = chunks.messages()
        sources: dict[str, Source] = {}
        # Who leaves must not keep a thread of gRPC's pool for as long as a file hangs.
        has_left = threading.Event()
        add_callback = getattr(context, "add_callback", lambda _call: True)  # a stand-in has none
        if not add_callback(lambda: self._funnel.leave(has_left)):
            has_left.set()

        def is_answered(source: Source) -> bool:
            return source.is_settled or source.refusal is not None or has_left.is_set()

        with self._counted_client():
            try:
                self._read(request_iterator, sources, has_left)
            except Refusal as refusal:
                return self._abort(context, sources, refusal)
            finally:
                for source in sources.values():
                    self._funnel.finish(source, is_clean=True)
            for source in sources.values():
                while not self._funnel.wait(source, is_answered, _PATIENCE_S):
                    if self._funnel.queue.has_ended:
                        ending = Refusal("UNAVAILABLE", "the server ended before all was written")
                        return self._abort(context, sources, ending)
                    if status := self._funnel.trouble_of(source):
                        written = sum(item.written_bytes for item in sources.values())
                        return pb.StreamResponse(status=status, bytes_received=written)
                if source.refusal is not None:
                    return self._abort(context, sources, source.refusal)
        received = sum(source.received_bytes for source in sources.values())
        seq = max((source.committed_seq for source in sources.values()), default=0)
        return pb.StreamResponse(status="OK", bytes_received=received, committed_seq=seq)

    def StreamLogsAcked(self, request_iterator: Iterable[Any], context: Any) -> Any:  # noqa: N802
        """Reply that this method is not implemented here; a client then uses StreamLogs."""
        import grpc

        del request_iterator
        context.abort(grpc.StatusCode.UNIMPLEMENTED, "not behind a server with threads")

    def HealthCheck(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Answer with a HealthResponse: healthy, and the number of open streams."""
        del request, context
        pb = chunks.messages()
        return pb.HealthResponse(healthy=True, connected_clients=self.connected_clients)

    def Stats(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Answer with a StatsResponse, without the single streams."""
        del request, context
        pb = chunks.messages()
        counts: dict[str, Any] = self._funnel.queue.stats()
        return pb.StatsResponse(**counts, connected_clients=self.connected_clients)

    def graceful_shutdown(self) -> None:
        """Wait until every stream has ended, at most `graceful_shutdown_timeout`; shut down."""
        self._nobody.wait(Deadline.after(self.graceful_shutdown_timeout).timeout())
        self.shutdown()

    def shutdown(self) -> None:
        """Write all waiting lines and close all files; harmless when repeated."""
        self._funnel.close(Deadline.after(CLOSE_S))

    @contextlib.contextmanager
    def _counted_client(self) -> Iterator[None]:
        with self.clients_lock:
            self.connected_clients += 1
        try:
            yield
        finally:
            with self.clients_lock:
                self.connected_clients -= 1

    def note_refusal(self, node_id: str, refusal: Refusal) -> None:
        """Log the `refusal` of client `node_id`, ever more seldom if there are many."""
        self._refusals.add(node_id, refusal)

    def _read(
        self, requests: Iterable[Any], sources: dict[str, Source], has_left: threading.Event
    ) -> None:
        def is_admitted(source: Source) -> bool:
            return source.waiting is None or self._funnel.queue.is_closed or has_left.is_set()

        for request in requests:
            # A test or a program in process may leave out what it does not use.
            stream_id = getattr(request, "stream_id", "")
            source = sources.get(stream_id)
            if source is None:
                source = sources[stream_id] = Source(_on_progress, stream_id, request.node_id)
                _logger.debug("node %r has connected", request.node_id)
            data = request.data
            chunk = Chunk(
                request.node_id, memoryview(data), request.file_path, stream_id,
                getattr(request, "seq", 0),
            )  # fmt: skip
            if not self._funnel.offer(source, chunk, len(data)):
                self._funnel.wait(source, is_admitted)
                if source.waiting is not None:
                    why = "the client has left" if has_left.is_set() else "the server is ending"
                    raise Refusal("UNAVAILABLE", why)
            if source.refusal is not None:
                raise source.refusal

    def _abort(self, context: Any, sources: Mapping[str, Source], refusal: Refusal) -> Any:
        import grpc

        node_id = next((source.node_id for source in sources.values()), "")
        self.note_refusal(node_id, refusal)
        context.abort(grpc.StatusCode[refusal.code], refusal.reason)
        # Only a stand-in for gRPC's context comes back from that.
        return chunks.messages().StreamResponse(status=refusal.code)


def _on_progress(source: Source) -> None:
    """Do nothing: the call's thread waits at the funnel's condition."""


def serve(
    host: str,
    port: int,
    max_workers: int = 100,
    graceful_shutdown_timeout: float = 60.0,
    completion_idle_timeout: float = 10.0,
    *,
    allowed_roots: Iterable[str],
) -> None:
    """Serve until SIGTERM or SIGINT, then until every stream has ended.

    Args:
        host: Address to listen on; `unix:PATH` for a Unix socket.
        port: Port to listen on; 0 for any.
        max_workers: Not used: a stream needs no worker.
        graceful_shutdown_timeout: Seconds to go on serving open streams when asked to end.
        completion_idle_timeout: Seconds without a chunk that make an old cycle's file complete.
        allowed_roots: Directories below which files may lie.

    Raises:
        ValueError: A setting makes no sense, or there is no root.
        OSError: It cannot listen there.
    """
    from ._funnel.server import root
    from ._funnel.server.process import ServerConfig
    from ._funnel.shared import Access

    del max_workers
    if allowed_roots is None:
        raise ValueError("serve() needs allowed_roots")
    root.run(
        ServerConfig(
            host=host, port=port, grace_s=graceful_shutdown_timeout, access=Access.for_server(host)
        ),
        FunnelOptions(
            allowed_roots=tuple(allowed_roots), completion_idle_s=completion_idle_timeout
        ),
    )


def main(arguments: list[str] | None = None) -> int:
    """Run the root server with `arguments` (None: `sys.argv[1:]`); return the exit code."""
    from ._funnel.server import command

    return command.run_program(command.root_parser(), command.serve_root, arguments)


if __name__ == "__main__":
    from ._funnel.server.command import leave

    leave(main())
