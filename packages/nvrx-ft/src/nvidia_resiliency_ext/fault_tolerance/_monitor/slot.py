# SPDX-License-Identifier: Apache-2.0
"""The layout and the memory of a rank's slot.

The rank writes it (`hotpath.HotPath`), the monitor and the launcher read it (`read_slot`). Every
field is one aligned 8-byte word, written by a single store; readers rely on no order between two
words. Times are CLOCK_MONOTONIC nanoseconds; 0 means "not yet".
"""

from __future__ import annotations

import fcntl
import mmap
import os
from dataclasses import dataclass, field

from nvidia_resiliency_ext.shared_utils.errors import NvrxError
from nvidia_resiliency_ext.shared_utils.os_utils import SEALS, shared_memory

STEP = "step"  # The section whose first end shows that training goes on.
MAGIC = 0x4E56_5258_0000_0002  # Identifies a slot and the version of this layout.

W_MAGIC = 0
W_SESSION_ID = 1
W_SESSION_START = 2
W_HEARTBEAT_LAST = 3
W_HEARTBEAT_FIRST = 4
W_HEARTBEAT_COUNT = 5
W_ITERATION = 6
W_FIRST_ITERATION = 7
W_OUT_OF_SECTION_START = 8
W_STEP_FIRST_OPEN = 9
W_STEP_FIRST_CLOSE = 10
W_STEP_COUNT = 11
W_SAVE_CALLS = 12
# Belongs to the monitor, also while a session begins or moves; the words before it to the rank.
W_SAVE = 13
HEADER_WORDS = 14

WORD_BYTES = 8
NO_ITERATION = -1  # Value of the iteration words while the rank has not reported an iteration.

SAVE_ASKED = -1
"""Value of `W_SAVE` while it is being agreed at which call ranks save: a number of 1 or more."""

_NS = 1e-9
_GET_SEALS = getattr(fcntl, "F_GET_SEALS", 1034)


class SlotError(NvrxError):
    """A descriptor does not hold a slot of the expected layout."""


@dataclass(frozen=True, slots=True)
class SlotLayout:
    """Where each field lives: a header, then one word per section, in sorted order."""

    sections: tuple[str, ...]
    index: dict[str, int] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        """Sort the names, so that all sides agree whatever order a mapping came in."""
        names = tuple(sorted(set(self.sections)))
        object.__setattr__(self, "sections", names)
        object.__setattr__(self, "index", {n: HEADER_WORDS + i for i, n in enumerate(names)})

    @property
    def size_bytes(self) -> int:
        return (HEADER_WORDS + len(self.sections)) * WORD_BYTES


@dataclass(frozen=True, slots=True)
class Steps:
    """How far a rank has come in its session, and when (monotonic s) it last said so."""

    iteration: int | None
    count: int
    last_at: float


NO_STEPS = Steps(None, 0, 0.0)


@dataclass(frozen=True, slots=True)
class SlotView:
    """Content of a slot at one moment; times in seconds of the monotonic clock."""

    session_id: int
    session_start: float | None
    heartbeat_last: float | None
    heartbeat_first: float | None
    heartbeat_count: int
    iteration: int | None
    first_iteration: int | None
    out_of_section_since: float | None
    step_first_open: float | None
    step_first_close: float | None
    step_count: int
    open_sections: dict[str, float]
    save_calls: int = 0

    @property
    def is_active(self) -> bool:
        """Whether the rank has sent a heartbeat or used a section in this session."""
        moved = self.out_of_section_since != self.session_start
        return self.heartbeat_last is not None or bool(self.open_sections) or moved

    @property
    def steps(self) -> Steps:
        """What the rank has done; heartbeats count where it opens no section `step`."""
        signs = [self.heartbeat_last, self.out_of_section_since, *self.open_sections.values()]
        last_at = max((at for at in signs if at is not None), default=0.0)
        return Steps(self.iteration, self.step_count or self.heartbeat_count, last_at)


def read_slot(words: memoryview, layout: SlotLayout) -> SlotView:
    opened = {name: words[at] * _NS for name, at in layout.index.items() if words[at]}
    iteration, first_iteration = words[W_ITERATION], words[W_FIRST_ITERATION]
    return SlotView(
        session_id=words[W_SESSION_ID],
        session_start=_seconds(words[W_SESSION_START]),
        heartbeat_last=_seconds(words[W_HEARTBEAT_LAST]),
        heartbeat_first=_seconds(words[W_HEARTBEAT_FIRST]),
        heartbeat_count=words[W_HEARTBEAT_COUNT],
        iteration=None if iteration < 0 else iteration,
        first_iteration=None if first_iteration < 0 else first_iteration,
        out_of_section_since=_seconds(words[W_OUT_OF_SECTION_START]),
        step_first_open=_seconds(words[W_STEP_FIRST_OPEN]),
        step_first_close=_seconds(words[W_STEP_FIRST_CLOSE]),
        step_count=words[W_STEP_COUNT],
        open_sections=opened,
        save_calls=words[W_SAVE_CALLS],
    )


def _seconds(nanoseconds: int) -> float | None:
    return nanoseconds * _NS if nanoseconds else None


def begin_slot(
    words: memoryview, session_id: int, now_ns: int, first_iteration: int = NO_ITERATION
) -> None:
    """Clear a slot for a new session; the session id is written last."""
    words[W_MAGIC] = MAGIC
    for at in range(W_SESSION_ID, len(words)):
        if at != W_SAVE:
            words[at] = 0
    words[W_ITERATION] = words[W_FIRST_ITERATION] = first_iteration
    words[W_SESSION_START] = words[W_OUT_OF_SECTION_START] = now_ns
    words[W_SESSION_ID] = session_id


class SlotMemory:
    """A slot's shared memory: the descriptor to hand over and the mapping of this process."""

    def __init__(self, fd: int, mapping: mmap.mmap, layout: SlotLayout) -> None:
        self.fd = fd
        self.layout = layout
        self.words = memoryview(mapping)[: layout.size_bytes].cast("q")

    @classmethod
    def create(cls, layout: SlotLayout, *, directory: str, name: str) -> SlotMemory:
        """Make fresh memory that no holder of the descriptor can shrink."""
        fd = shared_memory(name, layout.size_bytes, (directory,))
        try:
            memory = cls(fd, mmap.mmap(fd, layout.size_bytes), layout)
        except OSError:
            os.close(fd)
            raise
        memory.clear()
        return memory

    @classmethod
    def adopt(cls, fd: int, layout: SlotLayout, *, must_be_sealed: bool) -> SlotMemory:
        """Map a checked descriptor; the result owns it, with `SlotError` the caller still does."""
        try:
            if must_be_sealed and fcntl.fcntl(fd, _GET_SEALS) & SEALS != SEALS:
                problem = "the memory is not sealed"
            elif os.fstat(fd).st_size != layout.size_bytes:
                problem = "the memory has another size"
            else:
                memory = cls(fd, mmap.mmap(fd, layout.size_bytes), layout)
                if memory.words[W_MAGIC] == MAGIC:
                    return memory
                memory.words.release()
                problem = "the memory is no slot of this version"
        except (OSError, ValueError) as exc:
            problem = str(exc)
        raise SlotError(problem)

    def clear(self) -> None:
        for at in range(len(self.words)):
            self.words[at] = 0
        self.words[W_MAGIC] = MAGIC

    def close(self) -> None:
        """Close the descriptor; the mapping ends with its last reader."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
