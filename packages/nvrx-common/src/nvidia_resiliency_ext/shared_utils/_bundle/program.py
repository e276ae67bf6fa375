# SPDX-License-Identifier: Apache-2.0
"""Owns the command ``nvrx-report bundle``: its arguments, and what is added when."""

from __future__ import annotations

import os
import socket
import time
from typing import TYPE_CHECKING

from nvidia_resiliency_ext.shared_utils.console import plain, write_err, write_out

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["main"]

_MIB = 1024 * 1024
_DEFAULT_MIB = 32
_WRONG_INPUT = 2


def main(argv: Sequence[str], report_texts: Callable[[Sequence[str]], Mapping[str, str]]) -> int:
    """Make the archive and return the exit code: 0, or 2 where it cannot be made.

    Args:
        argv: The command line after `bundle`.
        report_texts: Gives the reports of the records under paths, by name.
    """
    from .archive import Archive
    from .collect import Collector

    options = _parse(argv)
    paths = options.paths or [path for path in (os.environ.get("NVRX_EVENT_DIR"),) if path]
    for path in (*paths, *options.config):
        if not os.path.exists(path):
            return _complain(f"{path}: there is no such file or directory")
    host = socket.gethostname()
    top = f"nvrx-bundle-{host}-{time.strftime('%Y%m%dT%H%M%S')}"
    target = options.output or f"{top}.tar.gz"
    archive = Archive(top, max(1, options.max_size) * _MIB)
    collector = Collector(archive)
    collector.add_machine(os.environ)
    for name, text in report_texts(paths).items():
        collector.add(name, text)
    for path in options.config:
        collector.add_path(path, "config")
    for number, path in enumerate(paths):
        collector.add_path(path, f"files-{number}")
    collector.finish()
    try:
        size = archive.write(target)
    except OSError as error:
        return _complain(f"{target}: {error.strerror}")
    write_out(
        f"{target}: {size / _MIB:.1f} MiB. Secrets that were recognised are taken out; please look"
        " through it before you send it to anybody.\n"
    )
    return 0


def _parse(argv: Sequence[str]) -> Namespace:
    from argparse import ArgumentParser

    parser = ArgumentParser(
        prog="nvrx-report bundle",
        description="Put what a bug report needs into one archive: the record of events, the"
        " report, versions, the self-check, settings and the ends of logs, without secrets.",
    )
    parser.add_argument(
        "paths",
        nargs="*",
        metavar="PATH",
        help="directory of records and logs (as --log-dir), or a file; default NVRX_EVENT_DIR",
    )
    parser.add_argument("-o", "--output", metavar="FILE", help="the archive; must not exist yet")
    parser.add_argument(
        "--config", action="append", default=[], metavar="FILE", help="a file of settings; repeat"
    )
    parser.add_argument(
        "--max-size",
        type=int,
        default=_DEFAULT_MIB,
        metavar="MIB",
        help=f"how much text to take at most; default {_DEFAULT_MIB}",
    )
    return parser.parse_args(argv)


def _complain(message: str) -> int:
    write_err(f"nvrx-report bundle: {plain(message)}\n")
    return _WRONG_INPUT
