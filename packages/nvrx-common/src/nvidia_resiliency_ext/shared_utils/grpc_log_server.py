# SPDX-License-Identifier: Apache-2.0
"""The root of the log funnel: `python -m nvidia_resiliency_ext.shared_utils.grpc_log_server`.

It takes lines from nodes, or from leaves that collect them, and appends them to files below the
allowed roots. It needs the extra `grpc`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nvidia_resiliency_ext.shared_utils._funnel.server.servicer import LogAggregationServicer

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["LogAggregationServicer", "main", "serve"]


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
    from nvidia_resiliency_ext.shared_utils._funnel.server import root
    from nvidia_resiliency_ext.shared_utils._funnel.server.settings import (
        FunnelOptions,
        ServerConfig,
    )
    from nvidia_resiliency_ext.shared_utils._funnel.shared import Access

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
    """Run the root server; return the exit code.

    Args:
        arguments: The arguments without the program's name; None: those of the process.
    """
    from nvidia_resiliency_ext.shared_utils._funnel.server import command

    return command.run_program(command.root_parser(), command.serve_root, arguments)


if __name__ == "__main__":
    from nvidia_resiliency_ext.shared_utils._funnel.server.command import leave

    leave(main())
