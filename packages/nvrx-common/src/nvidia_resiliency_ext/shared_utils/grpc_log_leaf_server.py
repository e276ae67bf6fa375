# SPDX-License-Identifier: Apache-2.0
"""A leaf of the log funnel: `python -m nvidia_resiliency_ext.shared_utils.grpc_log_leaf_server`.

It takes lines from many nodes and passes them to the root over one stream, so that the root has a
few connections in place of thousands. It writes no file. It needs the extra `grpc`.
"""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["main", "serve"]


def serve(  # noqa: PLR0913 - the signature is given
    host: str,
    port: int,
    upstream: str,
    max_workers: int = 100,
    max_queue_chunks: int = 8192,
    graceful_shutdown_timeout: float = 60.0,
    *,
    allowed_roots: Iterable[str],
) -> None:
    """Serve until SIGTERM or SIGINT, then until every stream has ended.

    Args:
        host: Address to listen on; `unix:PATH` for a Unix socket.
        port: Port to listen on; 0 for any.
        upstream: `HOST:PORT` of the root, which must be healthy within 120 s.
        max_workers: Not used: a stream needs no worker.
        max_queue_chunks: The most chunks that wait for the root's word; then senders wait.
        graceful_shutdown_timeout: Seconds to go on serving open streams when asked to end.
        allowed_roots: Directories below which the root writes; others are refused here already.

    Raises:
        ValueError: A setting makes no sense.
        OSError: It cannot listen there, or there is no healthy root.
    """
    from nvidia_resiliency_ext.shared_utils._funnel.server import leaf
    from nvidia_resiliency_ext.shared_utils._funnel.shared import Access

    del max_workers
    if allowed_roots is None:
        raise ValueError("serve() needs allowed_roots")
    config = leaf.LeafConfig(
        host=host,
        port=port,
        upstream=upstream,
        grace_s=graceful_shutdown_timeout,
        access=Access.for_server(host),
        allowed_roots=tuple(allowed_roots),
        max_chunks=max_queue_chunks,
    )
    leaf.run(config)


def main(arguments: list[str] | None = None) -> int:
    """Run the leaf server with `arguments` (None: `sys.argv[1:]`); return the exit code."""
    from nvidia_resiliency_ext.shared_utils._funnel.server import command

    return command.run_program(command.leaf_parser(), command.serve_leaf, arguments)


if __name__ == "__main__":
    from nvidia_resiliency_ext.shared_utils._funnel.server.command import leave

    leave(main())
