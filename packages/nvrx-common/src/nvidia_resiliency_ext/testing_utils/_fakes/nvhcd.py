# SPDX-License-Identifier: Apache-2.0
"""A node health daemon that says what it is told to, over real gRPC on a Unix socket."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["FakeNodeDaemon"]

_METHOD = "RunHealthCheck"
_SERVICE = "nvhcd.HealthCheckService"


class FakeNodeDaemon:
    """Serves until it is closed; it is a context manager.

    Needs grpcio and protobuf (``nvrx-common[grpc]``).

    Args:
        socket_path: Where to listen.
        answer: Fields of the answer: success, exit_code, output, error.
        handler: Called with the arguments of each request before it is answered; it may return
            bytes to be sent in place of an answer, or wait.
    """

    def __init__(
        self,
        socket_path: str | os.PathLike[str],
        answer: dict[str, Any] | None = None,
        handler: Callable[[list[str]], bytes | None] | None = None,
    ) -> None:
        import grpc

        self.socket_path = os.fspath(socket_path)
        self.answer: dict[str, Any] = answer or {"success": True, "output": "{}"}
        self.requests: list[list[str]] = []
        self._handler = handler
        self._executor = ThreadPoolExecutor(2)
        self._server = grpc.server(self._executor)
        method = grpc.unary_unary_rpc_method_handler(self._serve)
        service = grpc.method_handlers_generic_handler(_SERVICE, {_METHOD: method})
        self._server.add_generic_rpc_handlers((service,))
        self._server.add_insecure_port(f"unix:{self.socket_path}")
        self._server.start()

    def close(self) -> None:
        """Stop serving."""
        self._server.stop(None).wait()
        self._executor.shutdown()

    def __enter__(self) -> FakeNodeDaemon:  # noqa: PYI034 - Self is newer than Python 3.10
        """Return itself; leaving the block closes it."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()

    def _serve(self, request: bytes, _context: Any) -> bytes:
        from nvidia_resiliency_ext.shared_utils.proto import nvhcd_pb2

        arguments = list(nvhcd_pb2.HealthCheckRequest.FromString(request).args)
        self.requests.append(arguments)
        instead = None if self._handler is None else self._handler(arguments)
        if instead is not None:
            return instead
        answer: bytes = nvhcd_pb2.HealthCheckResponse(**self.answer).SerializeToString()
        return answer
