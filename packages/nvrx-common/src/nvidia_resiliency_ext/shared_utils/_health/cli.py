# SPDX-License-Identifier: Apache-2.0
"""The command line of the health checks: options, what to run, how it is printed."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from dataclasses import asdict

from nvidia_resiliency_ext.shared_utils.console import plain, write_out

from .check import Check, HealthResult, run_checks

_NAMES = ("gpu", "nvlink", "nic", "storage", "daemon")
_DEFAULT_DEADLINE_S = 60.0
_LONGEST_S = 86400.0


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m nvidia_resiliency_ext.shared_utils.health_check",
        description="Look at this node's GPUs, NVLinks, network adapters and storage.",
        epilog="Exit code: 0 nothing is unhealthy, 1 something is, 2 wrong arguments.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object per check")
    parser.add_argument(
        "--checks",
        type=_names,
        default=list(_NAMES),
        metavar="NAME,...",
        help=f"which of {','.join(_NAMES)} (default: all)",
    )
    parser.add_argument(
        "--expected-gpus", type=_count, metavar="N", help="fewer visible GPUs are unhealthy"
    )
    parser.add_argument(
        "--expected-ports", type=_count, metavar="N", help="fewer active ports are unhealthy"
    )
    parser.add_argument(
        "--storage-path",
        action="append",
        default=[],
        metavar="PATH",
        help="a file or folder that must be readable; may be given several times",
    )
    parser.add_argument(
        "--node-daemon", metavar="SOCKET", help="Unix socket of the node health daemon"
    )
    parser.add_argument(
        "--deadline",
        type=_seconds,
        default=_DEFAULT_DEADLINE_S,
        metavar="SECONDS",
        help="what has not ended by then is unhealthy (default: %(default)g)",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program on `argv` (None: the process's own) and return its exit code."""
    options = make_parser().parse_args(argv)
    # What the log would say is printed as results.
    logging.getLogger("nvrx").addHandler(logging.NullHandler())
    logging.getLogger("nvrx").propagate = False
    checks = [check for name in options.checks for check in _make(name, options)]
    results = run_checks(checks, options.deadline)
    write_out("".join(f"{_line(result, as_json=options.json)}\n" for result in results))
    return 0 if all(results) else 1


def _line(result: HealthResult, *, as_json: bool) -> str:
    if as_json:
        import json

        return json.dumps(asdict(result))
    text = result.reason or result.component
    return f"{result.status:<9} {result.name:<13} {plain(text)}"


def _make(name: str, options: argparse.Namespace) -> list[Check]:
    from . import gpu, nic, node_daemon, nvlink, storage

    if name == "gpu":
        return [gpu.GPUHealthCheck(expected_gpus=options.expected_gpus)]
    if name == "nvlink":
        return [nvlink.NVLHealthCheck()]
    if name == "nic":
        return [nic.NicLinkStateHealthCheck(expected_ports=options.expected_ports)]
    if name == "daemon":
        return [node_daemon.NodeHealthCheck(options.node_daemon or "/var/run/nvhcd/nvhcd.sock")]
    checks: list[Check] = [storage.DistributedStorageHealthCheck()]
    if options.storage_path:
        checks.append(storage.StoragePathHealthCheck(options.storage_path))
    return checks


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in _NAMES:
            known = ", ".join(_NAMES)
            raise argparse.ArgumentTypeError(f"{name!r} is none of {known}")
    if not names:
        raise argparse.ArgumentTypeError("no check is named")
    return list(dict.fromkeys(names))


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} is no number")
    return int(text[:9])


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value < _LONGEST_S:
        raise argparse.ArgumentTypeError(f"{text!r} is no time in seconds")
    return value
