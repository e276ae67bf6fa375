# SPDX-License-Identifier: Apache-2.0
"""The stacks of a rank that is about to be ended: written by the rank, read by its monitor.

The rank lends a signal to `faulthandler`, whose handler needs neither the GIL nor memory, so that
a rank that waits for the GIL in C code can still say where. It writes to a file without a name,
which the monitor holds, too, and reads when the process has ended.
"""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import logging
import os
import tempfile

from nvidia_resiliency_ext.inprocess._protocol.hang import Seen
from nvidia_resiliency_ext.shared_utils.rank_activity import (
    Frame,
    Kernel,
    classify,
    in_words,
    main_frames,
    stack_of,
)
from nvidia_resiliency_ext.shared_utils.unused_signal import unused_realtime_signal

__all__ = ["StackDump", "read_dump", "seen_before_end"]

logger = logging.getLogger("nvrx")

_NAME = "nvrx-stacks"
_LONGEST_DUMP = 1 << 16
_FRAMES_TOLD = 8
_WRAPPER = "/inprocess/_call/loop.py"


class StackDump:
    """The rank's side, for one call.

    Attributes:
        number: The signal; 0 when there is none to lend, or no file.
        fd: The file; -1 when there is none.
    """

    def __init__(self) -> None:
        self.number, self.fd = 0, -1
        try:
            number, self.fd = unused_realtime_signal(), _make_file()
            faulthandler.register(number, file=self.fd, all_threads=True, chain=False)
            self.number = number
        except (OSError, RuntimeError) as error:
            logger.debug("a hang will be told without stacks: %s", error)
            self.close()

    def close(self) -> None:
        """Give signal and file back; harmless when repeated."""
        number, self.number = self.number, 0
        if number:
            faulthandler.unregister(number)
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


def read_dump(fd: int) -> str:
    """Return what a rank has written, "" for nothing."""
    data = b""
    with contextlib.suppress(OSError):
        data = os.pread(fd, _LONGEST_DUMP, 0)
    return data.decode(errors="replace")


def seen_before_end(kernel: Kernel, dump: str) -> Seen:
    """Return what a rank did, from a look at its process and the stacks that it wrote."""
    frames = main_frames(dump)
    stack = stack_of(frames)
    activity = classify(kernel, stack)
    words = in_words(activity, kernel, stack)
    # Up to the wrapper: who called that is of no interest.
    told = [*itertools.takewhile(lambda frame: not frame[0].endswith(_WRAPPER), frames)]
    if told:
        words += f", stack: {' < '.join(map(_in_words, told[:_FRAMES_TOLD]))}"
    return Seen(activity, stack.place, words)


def _in_words(frame: Frame) -> str:
    return f"{frame[0].rpartition('/')[2]}:{frame[1]} in {frame[2]}"


def _make_file() -> int:
    if os.environ.get("NVRX_FORCE_NO_MEMFD") != "1" and hasattr(os, "memfd_create"):
        with contextlib.suppress(OSError):  # seccomp or an old kernel
            return os.memfd_create(_NAME, os.MFD_CLOEXEC)
    fd, path = tempfile.mkstemp(prefix=_NAME)
    os.unlink(path)
    return fd
