# SPDX-License-Identifier: Apache-2.0
"""The program `nvrx-smonsvc`: flags and environment, log, signals."""

from __future__ import annotations

import argparse
import logging
import os
import signal
from collections.abc import Callable, Mapping
from typing import Any

from nvidia_resiliency_ext.services.smonsvc.monitor import SlurmJobMonitor
from nvidia_resiliency_ext.services.smonsvc.status_server import DEFAULT_STATUS_HOST
from nvidia_resiliency_ext.shared_utils.console import plain, write_err
from nvidia_resiliency_ext.shared_utils.errors import ConfigError, NvrxError

__all__ = ["get_args_parser", "main"]

_EXIT_USAGE = 2
_HIGHEST_PORT = 65535


def main(argv: list[str] | None = None) -> int:
    """Watch the cluster's jobs until SIGTERM or SIGINT.

    Args:
        argv: The arguments without the program's name; None: those of the process.

    Returns:
        0 at the end, 2 when a flag or a variable is wrong or Slurm is not there.
    """
    parser = get_args_parser()
    args = parser.parse_args(argv)
    logging.basicConfig(
        level=logging.DEBUG if args.verbose else logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    try:
        monitor = SlurmJobMonitor(**_settings(args, os.environ))
    except (NvrxError, OSError) as error:
        write_err(plain(f"nvrx-smonsvc: {error}") + "\n")
        return _EXIT_USAGE
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: monitor.stop())
    monitor.run()
    return 0


def get_args_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line.

    Example:
        >>> get_args_parser().parse_args(["--user", "ada", "--port", "8100"]).port
        '8100'
    """
    parser = argparse.ArgumentParser(
        prog="nvrx-smonsvc",
        description="Hand the logs of a Slurm cluster's jobs to the attribution service.",
        epilog="Each flag may be given as an environment variable instead. Further variables:"
        " NVRX_ATTRSVC_TOKEN_FILE (the service's token), NVRX_SMONSVC_TOKEN_FILE (asked for where"
        " jobs are shown).",
    )
    for flag, (variable, _, _, meaning) in _OPTIONS.items():
        name = flag.lstrip("-").replace("-", "_")
        parser.add_argument(flag, metavar=name.upper(), help=f"{meaning} ({variable})")
    parser.add_argument("-v", "--verbose", action="store_true", help="write debug lines too")
    return parser


def _settings(args: argparse.Namespace, environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the monitor's arguments: a flag wins over a variable.

    Raises:
        ConfigError: A value is wrong, or the service is not named.
    """
    found: dict[str, Any] = {}
    for flag, (variable, name, convert, _) in _OPTIONS.items():
        given = getattr(args, flag.lstrip("-").replace("-", "_"))
        source = flag
        if given is None:
            given, source = environ.get(variable) or None, variable
        if given is not None:
            try:
                found[name] = convert(given)
            except ValueError as error:
                raise ConfigError(f"{source} {given!r:.200}: {error}") from None
    if "attrsvc_url" not in found:
        raise ConfigError("--attrsvc-endpoint is missing: where does the attribution service run?")
    for variable, name in (
        ("NVRX_ATTRSVC_TOKEN_FILE", "token_file"),
        ("NVRX_SMONSVC_TOKEN_FILE", "status_token_file"),
    ):
        found[name] = environ.get(variable) or None
    return found


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise ValueError("must be seconds, more than 0")
    return value


def _port(text: str) -> int:
    if not (text.isascii() and text.isdigit()) or not 0 < int(text[:6]) <= _HIGHEST_PORT:
        raise ValueError("must be a port, 1 to 65535")
    return int(text)


def _names(text: str) -> list[str]:
    if text.startswith("-"):
        raise ValueError("must be names, with commas between them")
    return [name for name in text.replace(",", " ").split() if name]


def _path(text: str) -> str:
    if not os.path.isabs(text):
        raise ValueError("must be an absolute path")
    return text


_OPTIONS: dict[str, tuple[str, str, Callable[[str], Any], str]] = {
    "--attrsvc-endpoint": (
        "NVRX_ATTRSVC_ENDPOINT", "attrsvc_url", str,
        "the service: http://HOST:PORT, https://HOST:PORT or unix:///PATH; required",
    ),
    "--interval": (
        "NVRX_SMONSVC_INTERVAL", "poll_interval", _seconds,
        "seconds between two looks at the queue; 180",
    ),
    "--user": ("NVRX_SMONSVC_USER", "user", str, "only this user's jobs; those of all"),
    "--partitions": (
        "NVRX_SMONSVC_PARTITIONS", "partitions", _names,
        "only jobs in these, with commas between them, or '' for all; batch,batch_long",
    ),
    "--job-pattern": (
        "NVRX_SMONSVC_JOB_PATTERN", "job_pattern", str,
        "only jobs in whose name this regular expression is found",
    ),
    "--timeout": (
        "NVRX_SMONSVC_TIMEOUT", "timeout", _seconds,
        "seconds that one call of Slurm or one request may take; 60",
    ),
    "--host": (
        "NVRX_SMONSVC_HOST", "host", str,
        f"address at which jobs are shown; {DEFAULT_STATUS_HOST}",
    ),
    "--port": ("NVRX_SMONSVC_PORT", "port", _port, "port at which jobs are shown; none"),
    "--state-file": (
        "NVRX_SMONSVC_STATE_FILE", "state_file", _path,
        "file in which jobs outlive the monitor; none",
    ),
}  # fmt: skip
