# SPDX-License-Identifier: Apache-2.0
"""Ending a rank at once on an uncaught exception, instead of in exit handlers that may hang."""

import logging
import os
import sys
from types import TracebackType

__all__ = ["get_rank", "install_exception_handler"]

logger = logging.getLogger("nvrx")


def get_rank() -> int:
    """Return this process's global rank: the process group's, else `RANK`'s.

    Raises:
        RuntimeError: neither knows a rank.
    """
    from nvidia_resiliency_ext.fault_tolerance.data import current_global_rank

    return current_global_rank()


def install_exception_handler() -> None:
    """Make an uncaught exception log itself, print its traceback and end the process with code 1.

    Ctrl-C keeps its present meaning. Installing twice changes nothing.
    """
    if isinstance(sys.excepthook, _ExitingHook):
        return
    sys.excepthook = _ExitingHook(sys.excepthook)


class _ExitingHook:
    def __init__(self, previous: object) -> None:
        self._previous = previous

    def __call__(
        self,
        kind: type[BaseException],
        error: BaseException,
        traceback: TracebackType | None,
    ) -> None:
        if issubclass(kind, KeyboardInterrupt):
            assert callable(self._previous)
            self._previous(kind, error, traceback)
            return
        try:
            _report(kind, error, traceback)
        finally:
            # Exit handlers of a broken rank may wait for peers that will never answer.
            os._exit(1)


def _report(
    kind: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    import traceback as formatting

    try:
        rank = str(get_rank())
    except RuntimeError:
        rank = "unknown"
    lines = "".join(formatting.format_exception(kind, error, traceback))
    logger.error("uncaught exception on rank %s: %s", rank, error)
    prefix = f"[rank {rank}] "
    text = "".join(prefix + line for line in lines.splitlines(keepends=True))
    sys.stdout.flush()
    sys.stderr.write(text)
    sys.stderr.flush()
