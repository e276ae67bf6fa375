# SPDX-License-Identifier: Apache-2.0
"""Share memory between a rank and its monitor: stamps in 8-byte words, and a file for stacks.

The rank writes, each word by one store; the monitor only reads, through `pread`, so that nothing
that the rank does to the memory can hurt it. `faulthandler` writes the stacks of a rank that is
about to be killed, in a signal handler that needs neither the GIL nor memory.
"""

from __future__ import annotations

import contextlib
import enum
import faulthandler
import itertools
import logging
import mmap
import os
import struct
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from nvidia_resiliency_ext.inprocess._protocol.decision import ObservedActivity
from nvidia_resiliency_ext.shared_utils.errors import NvrxError
from nvidia_resiliency_ext.shared_utils.os_utils import shared_memory
from nvidia_resiliency_ext.shared_utils.rank_activity import (
    Frame,
    Kernel,
    classify,
    in_words,
    main_frames,
    stack_of,
)
from nvidia_resiliency_ext.shared_utils.unused_signal import unused_realtime_signal

_MAGIC = 0x4E56_5258_4950_0001
_W_MAGIC, _W_AUTO, _W_MANUAL, _W_UNPROTECTED, _W_PHASE, _W_EPOCH = range(6)
_LAYOUT = struct.Struct("=6q")
_SIZE_BYTES = _LAYOUT.size
_NS = 1e-9
_NAME = "nvrx-progress"

_now_ns = time.monotonic_ns


class PageError(NvrxError):
    """A descriptor does not hold a progress page."""


class Phase(enum.IntEnum):
    """Where in a call the rank is."""

    IDLE = 0
    """Outside of what timeouts are for."""
    GUARDED = 1
    """Between the start of an iteration and its end."""
    AT_BARRIER = 2
    """It waits for the others' arrival."""


@dataclass(frozen=True, slots=True)
class Stamps:
    """One look at a page, in seconds of the monotonic clock; `epoch` changes with every `rearm`.

    `manual_s` is the last ping of this iteration, None before the first.
    """

    auto_s: float
    manual_s: float | None
    is_protected: bool
    phase: Phase
    epoch: int


class _OwnDescriptor:
    """Own the descriptor `fd`; -1 once it was given back."""

    __slots__ = ("fd",)
    fd: int

    def close(self) -> None:
        """Close the descriptor; harmless when repeated."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


class ProgressPage(_OwnDescriptor):
    """The rank's side of the page; `stamp_auto` and `stamp_manual` are one store each.

    The memory goes with the object: stamps stay legal after `close`.
    """

    __slots__ = ("_lock", "_mapping", "_words", "stamp_manual")

    _words: memoryview[int]
    stamp_manual: Callable[[], None]
    """Stamp a ping; the manual timeout counts from the first one of an iteration."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._mapping = mmap.mmap(fd, _SIZE_BYTES)
        self._words = memoryview(self._mapping).cast("q")
        self._lock = threading.Lock()  # guards the depth of `unprotected`
        self.stamp_manual = _stamper(self._words, _W_MANUAL)
        self._words[_W_MAGIC] = _MAGIC
        self._words[_W_AUTO] = _now_ns()

    @classmethod
    def create(cls) -> ProgressPage:
        """Make a page that no process with its descriptor can shrink."""
        fd = shared_memory(_NAME, _SIZE_BYTES, _directories())
        try:
            return cls(fd)
        except BaseException:
            os.close(fd)
            raise

    def stamp_auto(self) -> None:
        self._words[_W_AUTO] = _now_ns()

    def stamp(self, auto_s: float | None, manual_s: float | None) -> None:
        """Store stamps made elsewhere, in seconds; an unknown automatic one leaves the page's."""
        if auto_s is not None:
            self._words[_W_AUTO] = round(auto_s / _NS)
        self._words[_W_MANUAL] = 0 if manual_s is None else round(manual_s / _NS)

    def rearm(self) -> None:
        """Start afresh: fresh stamps, no manual timeout, protection on."""
        with self._lock:
            words = self._words
            words[_W_AUTO] = _now_ns()
            words[_W_MANUAL] = 0
            words[_W_UNPROTECTED] = 0
            words[_W_EPOCH] += 1

    @property
    def phase(self) -> Phase:
        return Phase(self._words[_W_PHASE])

    @phase.setter
    def phase(self, phase: Phase) -> None:
        self._words[_W_PHASE] = phase

    def disable_timeouts(self) -> None:
        with self._lock:
            self._words[_W_UNPROTECTED] += 1

    def enable_timeouts(self) -> None:
        """Close a block without timeouts; time counts from now on when it was the last."""
        with self._lock:
            words = self._words
            words[_W_AUTO] = now = _now_ns()
            if words[_W_MANUAL]:
                words[_W_MANUAL] = now
            words[_W_UNPROTECTED] = max(words[_W_UNPROTECTED] - 1, 0)


class PageView(_OwnDescriptor):
    """The monitor's side of the page, and of the rank's stack file, if it has one."""

    __slots__ = ("_dump_fd",)

    def __init__(self, fd: int, dump_fd: int = -1) -> None:
        """Take over descriptors; a PageError, and closed, if the first is no page."""
        self.fd, self._dump_fd = fd, dump_fd
        try:
            self.read()
        except PageError:
            self.close()
            raise

    def read(self) -> Stamps:
        """Read the page; a PageError if the memory was shrunk or overwritten."""
        try:
            data = os.pread(self.fd, _SIZE_BYTES, 0)
        except OSError as error:
            raise PageError(f"a progress page cannot be read: {error}") from error
        if len(data) < _SIZE_BYTES:
            raise PageError("a progress page is too short")
        magic, auto, manual, unprotected, phase, epoch = _LAYOUT.unpack(data)
        if magic != _MAGIC or not Phase.IDLE <= phase <= Phase.AT_BARRIER:
            raise PageError("the memory is no progress page of this version")
        return Stamps(
            auto_s=auto * _NS,
            manual_s=manual * _NS if manual else None,
            is_protected=unprotected <= 0,
            phase=Phase(phase),
            epoch=epoch,
        )

    def read_dump(self) -> str:
        """Return the stacks that the rank has written, "" for nothing."""
        data = b""
        if self._dump_fd >= 0:
            with contextlib.suppress(OSError):
                data = os.pread(self._dump_fd, _LONGEST_DUMP, 0)
        return data.decode(errors="replace")

    def close(self) -> None:
        super().close()
        dump_fd, self._dump_fd = self._dump_fd, -1
        if dump_fd >= 0:
            os.close(dump_fd)


def _stamper(words: memoryview[int], at: int) -> Callable[[], None]:
    # A function over local names: a method would look up two attributes on every call.
    now_ns = _now_ns

    def stamp() -> None:
        words[at] = now_ns()

    return stamp


logger = logging.getLogger("nvrx")
_STACKS_NAME = "nvrx-stacks"
_LONGEST_DUMP = 1 << 16
_FRAMES_SHOWN = 8
_WRAPPER = "/inprocess/_call/loop.py"


class StackDump(_OwnDescriptor):
    """The rank's stack file and the signal that writes it; 0 and -1 where there is none."""

    def __init__(self) -> None:
        self.number, self.fd = 0, -1
        try:
            number = unused_realtime_signal()
            self.fd = shared_memory(_STACKS_NAME, 0, _directories())
            faulthandler.register(number, file=self.fd, all_threads=True, chain=False)
            self.number = number
        except (OSError, RuntimeError) as error:
            logger.debug("a hang will be reported without stacks: %s", error)
            self.close()

    def close(self) -> None:
        number, self.number = self.number, 0
        if number:
            faulthandler.unregister(number)
        super().close()


def observed_before_end(kernel: Kernel, dump: str) -> ObservedActivity:
    """Return a rank's activity, from the kernel's view of its process and the stacks it wrote."""
    frames = main_frames(dump)
    stack = stack_of(frames)
    activity = classify(kernel, stack)
    words = in_words(activity, kernel, stack)
    # Up to the wrapper: who called that is of no interest.
    named = [*itertools.takewhile(lambda frame: not frame[0].endswith(_WRAPPER), frames)]
    if named:
        words += f", stack: {' < '.join(map(_in_words, named[:_FRAMES_SHOWN]))}"
    return ObservedActivity(activity, stack.place, words)


def _in_words(frame: Frame) -> str:
    return f"{frame[0].rpartition('/')[2]}:{frame[1]} in {frame[2]}"


def _directories() -> tuple[str, str]:
    return "/dev/shm", tempfile.gettempdir()  # noqa: S108 - the file has no name there
