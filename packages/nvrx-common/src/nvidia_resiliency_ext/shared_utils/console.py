# SPDX-License-Identifier: Apache-2.0
"""Owns the writing of a program's result to stdout; says nothing on its own."""

from __future__ import annotations

import os
import sys

__all__ = ["write_out"]


def write_out(text: str) -> None:
    """Write text to stdout; a reader that has seen enough (``head``) is no error."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        # What is still buffered must not fail again when the interpreter ends.
        devnull = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        os.dup2(devnull, sys.stdout.fileno())
        os.close(devnull)
