# SPDX-License-Identifier: Apache-2.0
"""The program `nvrx-straggler`: see and change the straggler detection of a running job."""

from __future__ import annotations

import argparse
import json
import os
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict

from nvidia_resiliency_ext.shared_utils.console import plain, write_err, write_out
from nvidia_resiliency_ext.shared_utils.errors import ConfigError

from ._errors import ControlError
from ._session.control import DEFAULT_TIMEOUT_S, Change, Status, StatusRequest, ask, find_job

_LARGEST = 1 << 63  # of numbers that a message can carry


def integer(text: str) -> int:
    value = int(text)
    if not -_LARGEST <= value < _LARGEST:
        raise argparse.ArgumentTypeError(f"{text} is not a number from 1 to 1000000000")
    return value


def rank(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is not a rank, which is 0 or more")
    return value


def seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < threading.TIMEOUT_MAX / 3:
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds")
    return value


_OPTIONS: dict[str, tuple[str, Callable[[str], object], str]] = {
    "--report-interval": ("report_time_interval", float, "seconds between reports"),
    "--profiling-interval": ("profiling_interval", integer, "measure every Nth entry of a section"),
    "--ranks": ("ranks", str, "ranks that measure, such as 0-3,8, or all"),
    "--gpu-rel-threshold": ("gpu_rel_threshold", float, "relative GPU score of a straggler"),
    "--section-rel-threshold": ("section_rel_threshold", float, "relative section score"),
    "--gpu-indiv-threshold": ("gpu_indiv_threshold", float, "individual GPU score"),
    "--section-indiv-threshold": ("section_indiv_threshold", float, "individual section score"),
}


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="nvrx-straggler",
        description="See and change the straggler detection of a running job: on the host of rank"
        " 0, or with --store from any host. Changes take effect on all ranks at the next report.",
    )
    shared = argparse.ArgumentParser(add_help=False)
    place = shared.add_mutually_exclusive_group()
    place.add_argument("--run-dir", metavar="DIR", help="control directory, with several jobs")
    place.add_argument(
        "--store",
        metavar="HOST:PORT",
        type=_endpoint,
        help="the job's store: MASTER_ADDR and MASTER_PORT of its ranks",
    )
    shared.add_argument(
        "--token-file",
        metavar="FILE",
        default=os.environ.get("NVRX_STRAGGLER_TOKEN_FILE"),
        help="token of the job, for --store; default: NVRX_STRAGGLER_TOKEN_FILE",
    )
    shared.add_argument(
        "--first-rank",
        metavar="N",
        type=rank,
        help="with --store, of several detectors in a job the one whose process group begins with"
        " rank N of the job; default: 0",
    )
    shared.add_argument(
        "--timeout",
        metavar="S",
        type=seconds,
        default=DEFAULT_TIMEOUT_S,
        help="wait at most S seconds for the job, and again for its answer; default: %(default)g",
    )
    shared.add_argument("--json", action="store_true", help="print the state as JSON")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("status", parents=[shared], help="settings and last report")
    commands.add_parser("enable", parents=[shared], help="measure again")
    commands.add_parser("disable", parents=[shared], help="stop measuring; reports go on")
    change = commands.add_parser("set", parents=[shared], help="change settings")
    for flag, (name, kind, text) in _OPTIONS.items():
        change.add_argument(flag, dest=name, type=kind, default=None, help=text)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; exit code 0, 2 after a one-line error, 130 when it was interrupted."""
    parser = build_parser()
    options = parser.parse_args(argv)
    request = _request_of(options)
    if isinstance(request, Change) and not request.values:
        parser.error("set needs at least one setting")
    if options.store is not None and not options.token_file:
        parser.error("--store needs --token-file, as a store does not tell who asks")
    if options.first_rank is not None and options.store is None:
        parser.error("--first-rank needs --store; on the host of that rank, use --run-dir")
    try:
        status = _ask(options, request)
    except (ControlError, ConfigError) as error:
        write_err(f"nvrx-straggler: {plain(str(error))}\n")
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    write_out(json.dumps(asdict(status)) + "\n" if options.json else _text(status))
    return 0


def _ask(options: argparse.Namespace, request: StatusRequest | Change) -> Status:
    if options.store is None:
        return ask(find_job(options.run_dir), request, options.timeout)
    # Its client prints lines and frames of its own when a store is gone, and asks for the name of
    # the store's address: 10 s where no name server answers.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:2")
    from ._session.store_control import ask_through_store

    host, port = options.store
    first_rank = options.first_rank or 0
    return ask_through_store(host, port, options.token_file, request, options.timeout, first_rank)


def _endpoint(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or int(port) >= 1 << 16:
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT")
    return host.strip("[]"), int(port)


def _request_of(options: argparse.Namespace) -> StatusRequest | Change:
    if options.command == "status":
        return StatusRequest()
    if options.command == "set":
        given = {name: getattr(options, name) for name, _, _ in _OPTIONS.values()}
        return Change({name: value for name, value in given.items() if value is not None})
    return Change({"enabled": options.command == "enable"})


def _text(status: Status) -> str:
    job = f"job {status.job}, " if status.job else ""
    ranks = "1 rank" if status.world_size == 1 else f"{status.world_size} ranks"
    lines = [
        (
            f"{job}{ranks}, rank 0 is process {status.pid},"
            f" kernel timing on it: {status.cuda_profiling}"
        )
    ]
    for name, value in status.settings.items():
        wanted = status.pending.get(name)
        note = "" if wanted == value else f"  -> {wanted} from the next report on"
        if name != "version":
            lines.append(f"  {name} = {value}{note}")
    text = "\n".join(plain(line) for line in lines) + "\n"
    return text + "".join(f"{plain(line)}\n" for line in status.summary.splitlines())
