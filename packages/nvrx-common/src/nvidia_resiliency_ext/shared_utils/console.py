# SPDX-License-Identifier: Apache-2.0
"""Owns what a program writes to its standard streams, whatever state they are in."""

from __future__ import annotations

import os
import sys
from typing import TextIO

__all__ = ["open_missing_streams", "plain", "write_err", "write_out"]


def plain(text: str) -> str:
    r"""Return `text` as one line on which no terminal acts: `?` for what is not printable.

    Example:
        >>> plain("loss\x1b[31m")
        'loss?[31m'
    """
    return "".join(char if char.isprintable() else "?" for char in text)


def write_out(text: str) -> bool:
    """Write a program's result, `text` with its line ends, to stdout, if it has one.

    A reader that has seen enough (``head``) is no error, and neither is a closed stdout.

    Returns:
        False when the reader has left just now; what is written later goes nowhere.

    Raises:
        SystemExit: with 1, after a line on stderr, when it cannot be written, as on a full disk.
    """
    try:
        _write(sys.stdout, text)
    except BrokenPipeError:
        return False
    except OSError as error:
        write_err(f"the output cannot be written: {error.strerror}\n")
        sys.exit(1)
    return True


def write_err(text: str) -> None:
    """Write `text` with its line ends to stderr; do nothing if there is none or it fails."""
    try:
        _write(sys.stderr, text)
    except OSError:
        return


def open_missing_streams() -> None:
    """Open the null device for each closed standard stream, for this process and its children.

    Otherwise the next file or socket gets that number, and a native library prints into it.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            # The lowest free number is the missing one: those below it are open.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)


def _write(stream: TextIO | None, text: str) -> None:
    if stream is None:
        return
    try:
        stream.write(text)
        stream.flush()
    except OSError:
        # What is still buffered must not fail again when the interpreter ends.
        devnull = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        os.dup2(devnull, stream.fileno())
        os.close(devnull)
        raise
