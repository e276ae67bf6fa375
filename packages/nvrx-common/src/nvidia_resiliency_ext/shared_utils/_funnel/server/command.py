# SPDX-License-Identifier: Apache-2.0
"""Owns the command lines of both servers: flags, their checks, and exit codes."""

from __future__ import annotations

import argparse
import logging
import math
import os
import sys
from collections.abc import Callable, Sequence

from nvidia_resiliency_ext.shared_utils import console
from nvidia_resiliency_ext.shared_utils._funnel.shared import Access
from nvidia_resiliency_ext.shared_utils.errors import ConfigError

from . import leaf, process, root
from .queue import FSYNC_POLICIES, FunnelOptions
from .service import AddressError

_MAX_PORT = 65535
_EXIT_CONFIG = 2


def _base_parser(program: str, description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m nvidia_resiliency_ext.shared_utils.{program}",
        description=description,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on, or unix:PATH (%(default)s)"
    )
    parser.add_argument(
        "--max-workers", type=_at_least(1), default=100,
        help="accepted for older command lines; a stream needs no worker here",
    )  # fmt: skip
    parser.add_argument(
        "--graceful-shutdown-timeout", type=_seconds, default=60.0, metavar="S",
        help="seconds to go on serving open streams after SIGTERM (%(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--allowed-root", action="append", required=True, metavar="DIR",
        help="files may lie below this directory; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--max-buffered-bytes", type=_at_least(1 << 20), default=32 << 20, metavar="N",
        help="most bytes that wait in memory (%(default)s)",
    )  # fmt: skip
    tls = parser.add_argument_group(
        "access", "The job's token comes from the file named by NVRX_LOG_FUNNEL_TOKEN_FILE."
    )
    tls.add_argument("--tls-cert", metavar="PEM", help="certificate of this server")
    tls.add_argument("--tls-key", metavar="PEM", help="its key")
    tls.add_argument(
        "--tls-ca", metavar="PEM", help="who signs certificates; clients must have one"
    )
    tls.add_argument(
        "--insecure-no-auth", action="store_true",
        help="listen beyond this machine without a token and client certificates",
    )  # fmt: skip
    return parser


def root_parser() -> argparse.ArgumentParser:
    parser = _base_parser(
        "grpc_log_server", "Collects log lines of all nodes and appends them to files."
    )
    parser.add_argument("--port", type=_port, default=50051, help="port to listen on (%(default)s)")
    parser.add_argument(
        "--completion-idle-timeout", type=_seconds, default=10.0, metavar="S",
        help="seconds without a chunk after which an old cycle's file is complete (%(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--fsync", choices=FSYNC_POLICIES, default="never",
        help="when to wait for the disk: never, each second, or before each answer (%(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--max-files", type=_at_least(1), default=4096, metavar="N",
        help="most files in use at one time (%(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--max-stream-files", type=_at_least(1), default=64, metavar="N",
        help="most files that one stream may write at once (%(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--max-stream-bytes", type=_at_least(0), default=0, metavar="N",
        help="most bytes that one stream may send; 0 for any number (%(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--verify-node-prefix", action="store_true",
        help="refuse lines with a rank prefix that another node has used in the same file",
    )  # fmt: skip
    return parser


def leaf_parser() -> argparse.ArgumentParser:
    parser = _base_parser(
        "grpc_log_leaf_server", "Collects log lines of some nodes and passes them to the root."
    )
    parser.add_argument("--port", type=_port, required=True, help="port to listen on")
    parser.add_argument(
        "--upstream", type=_upstream, required=True, metavar="HOST:PORT", help="where the root is"
    )
    parser.add_argument(
        "--max-queue-chunks", type=_at_least(1), default=8192, metavar="N",
        help="most chunks that wait for the root; then senders wait (%(default)s)",
    )  # fmt: skip
    return parser


def serve_root(options: argparse.Namespace) -> int:
    config = process.ServerConfig(
        host=options.host,
        port=options.port,
        grace_s=options.graceful_shutdown_timeout,
        access=_access_of(options),
    )
    return root.run(
        config,
        FunnelOptions(
            allowed_roots=tuple(options.allowed_root),
            completion_idle_s=options.completion_idle_timeout,
            max_buffered_bytes=options.max_buffered_bytes,
            max_files=options.max_files,
            max_stream_files=options.max_stream_files,
            max_stream_bytes=options.max_stream_bytes,
            verify_node_prefix=options.verify_node_prefix,
            fsync=options.fsync,
        ),
    )


def serve_leaf(options: argparse.Namespace) -> int:
    return leaf.run(
        leaf.LeafConfig(
            host=options.host,
            port=options.port,
            upstream=options.upstream,
            grace_s=options.graceful_shutdown_timeout,
            access=_access_of(options),
            allowed_roots=tuple(options.allowed_root),
            max_chunks=options.max_queue_chunks,
            max_bytes=options.max_buffered_bytes,
        )
    )


def _access_of(options: argparse.Namespace) -> Access:
    return Access.for_server(
        options.host,
        insecure=options.insecure_no_auth,
        certificate=options.tls_cert,
        key=options.tls_key,
        authority=options.tls_ca,
    )


def run_program(
    parser: argparse.ArgumentParser,
    serve: Callable[[argparse.Namespace], int],
    arguments: Sequence[str] | None = None,
) -> int:
    """Parse the command line and serve; wrong settings are one line and exit code 2."""
    console.open_missing_streams()
    try:
        options = parser.parse_args(arguments)
    except SystemExit as end:
        return int(end.code or 0)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    process.raise_file_limit()
    try:
        return serve(options)
    except (ConfigError, AddressError, ModuleNotFoundError) as error:
        hint = "; install nvrx-common[grpc]" if isinstance(error, ModuleNotFoundError) else ""
        console.write_err(f"{parser.prog.rpartition('.')[2]}: {error}{hint}\n")
        return _EXIT_CONFIG if isinstance(error, ConfigError) else 1


def leave(code: int) -> None:
    """End the process now: a thread that a dead file system holds must not delay it."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            try:
                stream.flush()
            except OSError:
                continue
    os._exit(code)


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number of seconds, 0 or more, not {text}")
    return value


def _port(text: str) -> int:
    value = int(text)
    if not 0 <= value <= _MAX_PORT:
        raise argparse.ArgumentTypeError(f"must be a port from 0 to {_MAX_PORT}, not {text}")
    return value


def _upstream(text: str) -> str:
    host, _, port = text.rpartition(":")
    if not text.startswith("unix:") and not (host and 0 < _port(port) <= _MAX_PORT):
        raise argparse.ArgumentTypeError(f"must be HOST:PORT, not {text}")
    return text


def _at_least(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"must be {least} or more, not {text}")
        return value

    return number
