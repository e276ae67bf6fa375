# SPDX-License-Identifier: Apache-2.0
"""A small log server with real gRPC whose behaviour a test chooses; it writes to real files."""

import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc

from nvidia_resiliency_ext.shared_utils.proto import log_aggregation_pb2 as messages
from nvidia_resiliency_ext.shared_utils.proto import log_aggregation_pb2_grpc as services

_DEADLINE_S = 60.0


class FunnelPeer(services.LogAggregationServiceServicer):
    """Appends chunks to their files, drops those that it has, and confirms.

    Args:
        knows_acks: False for a server of an older kind.
        token: What callers must show.
        refuses: Why a path is refused, None to take it.
        answer: Makes the confirmation of a chunk; None for no confirmation.
    """

    def __init__(
        self,
        *,
        knows_acks: bool = True,
        token: str | None = None,
        refuses: Callable[[str], tuple[grpc.StatusCode, str] | None] = lambda _: None,
        answer: Callable[[Any], Any] = lambda chunk: messages.Ack(
            stream_id=chunk.stream_id, committed_seq=chunk.seq
        ),
    ) -> None:
        self.knows_acks = knows_acks
        self.token = token
        self.refuses = refuses
        self.answer = answer
        self.calls = 0
        self.chunks: list[Any] = []
        self.has_called = threading.Condition()
        self.may_read = threading.Event()
        self.may_read.set()
        self.may_end = threading.Event()
        self.may_end.set()
        self._committed: dict[str, int] = {}
        self._server: Any = None
        self._threads: Any = None
        self.endpoint = ""

    def start(self, address: str = "127.0.0.1:0", credentials: Any = None) -> "FunnelPeer":
        """Listen."""
        self._threads = futures.ThreadPoolExecutor(32, thread_name_prefix="funnel-peer")
        self._server = grpc.server(self._threads, options=[("grpc.so_reuseport", 0)])
        services.add_LogAggregationServiceServicer_to_server(self, self._server)
        if credentials is None:
            port = self._server.add_insecure_port(address)
        else:
            port = self._server.add_secure_port(address, credentials)
        self.endpoint = address if address.startswith("unix:") else f"127.0.0.1:{port}"
        self._server.start()
        return self

    def stop(self) -> None:
        """End all calls at once."""
        self.may_read.set()
        self.may_end.set()
        if self._server is not None:
            self._server.stop(0).wait(_DEADLINE_S)
            self._server = None
            self._threads.shutdown(wait=True)

    def wait_for_calls(self, count: int) -> None:
        """Wait until that many streams have been opened."""
        with self.has_called:
            assert self.has_called.wait_for(lambda: self.calls >= count, _DEADLINE_S)

    def wait_for_chunks(self, count: int) -> None:
        """Wait until that many chunks have come."""
        with self.has_called:
            assert self.has_called.wait_for(lambda: len(self.chunks) >= count, _DEADLINE_S)

    def StreamLogsAcked(self, request_iterator: Iterator[Any], context: Any) -> Iterator[Any]:  # noqa: N802
        """Take chunks and confirm each."""
        self._check(context)
        if not self.knows_acks:
            context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
        for chunk in request_iterator:
            self._take(chunk, context)
            answer = self.answer(chunk)
            if answer is not None:
                yield answer
        self.may_end.wait(_DEADLINE_S)

    def StreamLogs(self, request_iterator: Iterator[Any], context: Any) -> Any:  # noqa: N802
        """Take chunks and confirm all at the end."""
        self._check(context)
        size = 0
        for chunk in request_iterator:
            # An older server knows nothing of numbers.
            chunk.stream_id, chunk.seq = "", 0
            self._take(chunk, context)
            size += len(chunk.data)
        return messages.StreamResponse(status="OK", bytes_received=size)

    def _check(self, context: Any) -> None:
        with self.has_called:
            self.calls += 1
            self.has_called.notify_all()
        shown = dict(context.invocation_metadata()).get("authorization")
        if self.token is not None and shown != f"Bearer {self.token}":
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "wrong token")

    def _take(self, chunk: Any, context: Any) -> None:
        self.may_read.wait(_DEADLINE_S)
        refusal = self.refuses(chunk.file_path)
        if refusal is not None:
            context.abort(*refusal)
        with self.has_called:
            self.chunks.append(chunk)
            if not chunk.seq or chunk.seq > self._committed.get(chunk.stream_id, 0):
                with Path(chunk.file_path).open("ab") as file:
                    file.write(chunk.data)
                self._committed[chunk.stream_id] = chunk.seq
            self.has_called.notify_all()
