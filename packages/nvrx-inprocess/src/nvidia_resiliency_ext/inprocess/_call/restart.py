# SPDX-License-Identifier: Apache-2.0
"""What makes the main thread leave the function for a restart. It raises nothing by itself."""

from __future__ import annotations

import logging
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import FrameType

__all__ = ["RankShouldRestart"]

logger = logging.getLogger("nvrx")

_OUR_FOLDER = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


class RankShouldRestart(BaseException):
    """Raised in the main thread: the function must be left, and will be called again.

    It is no `Exception`, so that `except Exception` in the function lets it through. Code that
    catches it must raise it again. On level DEBUG a line tells where one has been swallowed.
    """

    __module__ = "nvidia_resiliency_ext.inprocess.monitor_thread"

    gate: object = None  # through which it came; None for one that the user's code raises

    def __del__(self) -> None:
        # At the end of the interpreter modules are already empty.
        if not sys.is_finalizing() and logger.isEnabledFor(logging.DEBUG):
            _tell_where(sys._getframe(1), self.args)  # noqa: SLF001 - the one way to a frame


def _tell_where(frame: FrameType | None, args: tuple[object, ...]) -> None:
    if frame is None or frame.f_code.co_filename.startswith(_OUR_FOLDER):
        return
    logger.debug(
        "a restart request ended at %s:%d in %s, outside the wrapper: %r",
        frame.f_code.co_filename,
        frame.f_lineno,
        frame.f_code.co_name,
        args,
    )
