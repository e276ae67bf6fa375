# SPDX-License-Identifier: Apache-2.0
"""The end of a program of ours, whose process is its own."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
from typing import NoReturn

__all__ = ["end_program"]


def end_program(code: int, *, is_own: bool) -> NoReturn:
    """End the program with an exit code.

    torch cannot be told to stop connecting to a store, and a thread that comes back from it while
    the interpreter is taken down aborts the process (SIGABRT). So where threads are left, that is
    left out: all that programs ask for at their end is done first.

    Args:
        code: The exit code.
        is_own: Whether the process is the program's. Else its caller has still to do things.
    """
    if is_own and any(thread.daemon for thread in threading.enumerate()):
        with contextlib.suppress(Exception):
            threading._shutdown()  # type: ignore[attr-defined]  # noqa: SLF001 - as the interpreter
        atexit._run_exitfuncs()  # noqa: SLF001
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(AttributeError, OSError, ValueError):
                stream.flush()
        os._exit(code)
    sys.exit(code)
