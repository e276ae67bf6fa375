# SPDX-License-Identifier: Apache-2.0
"""The program that merges the log files of a node's processes into one file.

``python -m nvidia_resiliency_ext.shared_utils.log_aggregator --log-dir DIR`` reads the directory in
``NVRX_NODE_LOCAL_TMPDIR`` until SIGTERM, SIGINT or the wait file ends it.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
from typing import TYPE_CHECKING

from .console import write_err
from .event_loop import SignalQueue
from .log_manager import LogConfig
from .log_node_local_tmp import NodeLogAggregator

if TYPE_CHECKING:
    from argparse import Namespace

__all__ = ["main"]

_WRONG_SETTING = 2


def main() -> None:
    """Run the program; its arguments are those of the process.

    Raises:
        RuntimeError: A directory is not given, or another aggregator works there.
        OSError: A directory cannot be used.
    """
    options = _parse()
    if not options.log_dir:
        raise RuntimeError("--log-dir is missing: where should the merged log go?")
    temp_dir = LogConfig.get_node_local_tmp_dir()
    if not temp_dir:
        raise RuntimeError("NVRX_NODE_LOCAL_TMPDIR is not set: which logs should be merged?")
    log_file, max_size = LogConfig.get_log_file(), LogConfig.get_max_file_size()
    aggregator = NodeLogAggregator(
        options.log_dir, temp_dir, log_file, max_size, options.en_chronological_ordering
    )
    signals = SignalQueue((signal.SIGTERM, signal.SIGINT))
    with contextlib.closing(signals), signals.installed():
        try:
            aggregator.start_aggregator()
            _wait(signals, options.wait_file, options.check_interval)
        finally:
            aggregator.shutdown()


def _wait(signals: SignalQueue, wait_file: str | None, check_interval_s: float) -> None:
    """Return at a signal, or when the file exists."""
    timeout_s = max(0.05, check_interval_s) if wait_file else None
    while not (wait_file and os.path.exists(wait_file)):
        if select.select([signals], [], [], timeout_s)[0]:
            return


def _parse() -> Namespace:
    from argparse import ArgumentParser

    parser = ArgumentParser(
        prog="python -m nvidia_resiliency_ext.shared_utils.log_aggregator",
        description="Merge the log files of this node's processes into one file.",
        epilog="NVRX_NODE_LOCAL_TMPDIR names the directory of the processes' files."
        " SIGTERM or SIGINT: everything is merged, then the program ends with exit code 0.",
    )
    parser.add_argument("--log-dir", metavar="DIR", help="directory of the merged file")
    parser.add_argument(
        "--en-chronological-ordering",
        action="store_true",
        help="merge records of different processes by their times",
    )
    parser.add_argument("--wait-file", metavar="FILE", help="end when this file exists")
    parser.add_argument(
        "--check-interval",
        type=float,
        default=1.0,
        metavar="SEC",
        help="how often to look for the wait file; default 1",
    )
    return parser.parse_args()


if __name__ == "__main__":
    try:
        main()
    except (RuntimeError, OSError) as problem:
        write_err(f"log_aggregator: {problem}\n")
        sys.exit(_WRONG_SETTING)
