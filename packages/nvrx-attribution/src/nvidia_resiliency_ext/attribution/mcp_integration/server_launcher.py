# SPDX-License-Identifier: Apache-2.0
"""The program `nvrx-mcp-analysis`: the MCP server on stdin and stdout."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from importlib.metadata import PackageNotFoundError, version

from nvidia_resiliency_ext.shared_utils.console import plain, write_err
from nvidia_resiliency_ext.shared_utils.errors import ConfigError, MissingExtraError

__all__ = ["build_parser", "main"]

ALLOWED_ROOT_VARIABLE = "NVRX_ATTRSVC_ALLOWED_ROOT"
DEFAULT_SERVER_NAME = "nvidia-resiliency-attribution"

_EXIT_USAGE = 2
_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the program's command line.

    Example:
        >>> build_parser().parse_args(["--allowed-root", "/logs"]).server_name
        'nvidia-resiliency-attribution'
    """
    parser = argparse.ArgumentParser(
        prog="nvrx-mcp-analysis",
        description="Offer the analyses of logs and traces to assistants, by MCP on stdin and"
        " stdout.",
    )
    parser.add_argument(
        "--allowed-root",
        metavar="DIR",
        default=os.environ.get(ALLOWED_ROOT_VARIABLE),
        help=f"nothing outside of this directory is read (default: {ALLOWED_ROOT_VARIABLE})",
    )
    parser.add_argument(
        "--server-name",
        metavar="NAME",
        default=DEFAULT_SERVER_NAME,
        help="name that clients see (%(default)s)",
    )
    parser.add_argument(
        "--modules",
        nargs="+",
        metavar="NAME",
        help="analyses to offer: log_analyzer, fr_analyzer, log_fr_analyzer (default: all)",
    )
    parser.add_argument(
        "--log-level",
        choices=_LEVELS,
        type=str.upper,
        default="INFO",
        help="level of the log on stderr (%(default)s)",
    )
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the server until stdin ends.

    Args:
        argv: The arguments without the program's name; None: those of the process.

    Returns:
        0; 2 for wrong arguments or without the library `mcp`.
    """
    args = build_parser().parse_args(argv)
    logging.basicConfig(level=args.log_level, format="%(levelname)s %(name)s: %(message)s")
    # A thread waits for stdin: only the default action ends the program at once.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if not args.allowed_root:
        text = f"no allowed root: give --allowed-root or {ALLOWED_ROOT_VARIABLE}"
        write_err(f"nvrx-mcp-analysis: {text}\n")
        return _EXIT_USAGE
    try:
        import asyncio

        from nvidia_resiliency_ext.attribution.mcp_integration import server

        tools = server.AttributionTools(args.allowed_root, args.modules)
        asyncio.run(server.serve_stdio(tools, args.server_name, _version()))
    except (ConfigError, MissingExtraError) as error:
        write_err(plain(f"nvrx-mcp-analysis: {error}") + "\n")
        return _EXIT_USAGE
    return 0


def _version() -> str:
    try:
        return version("nvrx-attribution")
    except PackageNotFoundError:  # run from a checkout
        return "0"


if __name__ == "__main__":
    sys.exit(main())
