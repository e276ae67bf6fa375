# SPDX-License-Identifier: Apache-2.0
"""Owns this process's own stdout and stderr while they go into a log."""

from __future__ import annotations

import contextlib
import os
import sys

from .pipes import open_pipe

__all__ = ["CapturedStreams"]

_STREAMS = (1, 2)


class CapturedStreams:
    """Both streams lead into a pipe until `restore`.

    Attributes:
        fd: The reading end; whoever reads it owns it.
    """

    def __init__(self) -> None:
        self.fd, writing = open_pipe()
        _flush()
        self._old = [os.dup(stream) for stream in _STREAMS]
        for stream in _STREAMS:
            os.dup2(writing, stream)
        os.close(writing)

    def restore(self) -> None:
        """Give the streams back; harmless when repeated."""
        _flush()
        old, self._old = self._old, []
        for stream, fd in zip(_STREAMS, old, strict=False):
            os.dup2(fd, stream)
            os.close(fd)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
