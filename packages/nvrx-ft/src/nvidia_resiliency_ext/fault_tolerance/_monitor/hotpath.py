# SPDX-License-Identifier: Apache-2.0
"""Owns what a rank does in every step: stores into its slot and longest intervals; no socket.

A call is a few stores and integer comparisons. `_words` is None whenever calls must be refused (no
session, a forked child, a lost monitor that counts), so that one test guards the path.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn

from nvidia_resiliency_ext.fault_tolerance._core.errors import RankMonitorClientError

from . import slot

if TYPE_CHECKING:
    from nvidia_resiliency_ext.fault_tolerance.timeouts_calc import TimeoutsCalc


logger = logging.getLogger("nvrx")

_MEGATRON_GLOBALS = "megatron.training.global_vars"
_FIRST_ITERATION = 1
_MAX_UNWATCHED = 64  # names made up in a loop must not fill memory or the log
_NS = 1e-9

_now_ns = time.monotonic_ns
_modules = sys.modules
# Bound here because a module's attribute costs a lookup on every call.
_HEARTBEAT_LAST = slot.W_HEARTBEAT_LAST
_HEARTBEAT_COUNT = slot.W_HEARTBEAT_COUNT
_ITERATION = slot.W_ITERATION
_OUT_OF_SECTION_START = slot.W_OUT_OF_SECTION_START
_STEP_COUNT = slot.W_STEP_COUNT
_SAVE_CALLS = slot.W_SAVE_CALLS
_SAVE = slot.W_SAVE


def training_iteration() -> int | None:
    """Return Megatron's iteration: 1 before its arguments are set, None when there is none."""
    module = _modules.get(_MEGATRON_GLOBALS)
    if module is None:
        return None
    arguments = getattr(module, "_GLOBAL_ARGS", None)
    if arguments is None:
        return _FIRST_ITERATION
    value = getattr(arguments, "curr_iteration", None)
    if value is None:
        value = getattr(arguments, "iteration", None)
    return value if isinstance(value, int) else None


class HotPath:
    """The calls of the training loop.

    Sections may be used from several threads: `_lock` guards `_open` and all figures of sections.
    A heartbeat takes no lock; beats of several threads at once can at worst miscount an interval.
    """

    # A subclass has them: let the monitor look and wait for that, whether to save in this of
    # `calls` while somebody asks for it, and send a message without an answer.
    _ask: Callable[[], None]
    _should_save: Callable[[int], bool]
    _post: Callable[[object], None]

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._words: memoryview | None = None
        self._is_answered = False
        self._index: dict[str, int] = {}
        self._unwatched: set[str] = set()
        self._reset_figures(0)

    def _reset_figures(self, now: int) -> None:
        self._heartbeat_first = 0
        self._heartbeat_last = 0
        self._heartbeat_count = 0
        self._heartbeat_longest = 0
        self._open: dict[str, int] = {}
        self._longest: dict[str, int] = {}
        self._outside_since = now
        self._outside_longest = -1
        self._has_closed = False
        self._steps = 0
        self._save_calls = 0
        self._step_at = self._index.get(slot.STEP, 0)
        self._never_opened = set(self._index.values())
        self._is_first_step_due = True
        self._has_shown_life = False

    def send_heartbeat(self) -> None:
        """Send a heartbeat of this rank.

        Raises:
            RankMonitorClientError: Not initialised; or the monitor is lost and that counts.
        """
        words = self._words
        if words is None:
            self._refuse()
        now = _now_ns()
        words[_HEARTBEAT_LAST] = now
        self._heartbeat_count = count = self._heartbeat_count + 1
        words[_HEARTBEAT_COUNT] = count
        gap = now - self._heartbeat_last
        self._heartbeat_last = now
        if gap > self._heartbeat_longest:
            self._record_long_gap(words, now, gap)
        if self._is_answered:
            self._ask()

    def start_section(self, section: str) -> None:
        """Open `section`; sections may nest and overlap.

        A name that has no configured timeout is ignored; the first use of one is logged, as a
        warning when it looks like a misspelt one.

        Raises:
            RankMonitorClientError: The client is not initialised, or the section is open.
            TypeError: The name is no text.
        """
        if self._words is None:
            self._refuse()
        at = self._index.get(section)
        if at is None:
            _refuse_other_names(section)
            self._record_unwatched(section)
            return
        with self._lock:
            words = self._words  # again: the link's thread may just have moved to another slot
            if words is None:
                self._refuse()
            if _MEGATRON_GLOBALS in _modules:
                self._record_iteration(words)
            opened = self._open
            if section in opened:
                raise RankMonitorClientError(f"section {section!r} is open already")
            now = _now_ns()
            if not opened and now - self._outside_since > self._outside_longest:
                self._outside_longest = now - self._outside_since
            opened[section] = now
            words[at] = now
            if at in self._never_opened:
                self._record_first_open(words, at, now)
        if self._is_answered:
            self._ask()

    def end_section(self, section: str) -> None:
        """Close `section`.

        Raises:
            RankMonitorClientError: The client is not initialised, or the section is not open.
            TypeError: The name is no text.
        """
        if self._words is None:
            self._refuse()
        at = self._index.get(section)
        if at is None:
            _refuse_other_names(section)
            return
        with self._lock:
            words = self._words
            if words is None:
                self._refuse()
            if _MEGATRON_GLOBALS in _modules:
                self._record_iteration(words)
            self._close(words, section, at, _now_ns())
        if self._is_answered:
            self._ask()

    def end_all_sections(self) -> None:
        """Close every open section; harmless when there is none.

        Raises:
            RankMonitorClientError: Not initialised.
        """
        with self._lock:
            words = self._words
            if words is None:
                self._refuse()
            now = _now_ns()
            for section in list(self._open):
                self._close(words, section, self._index[section], now)
        if self._is_answered:
            self._ask()

    def should_checkpoint(self) -> bool:
        """Return whether to save a checkpoint now and leave: the job or this node ends soon.

        All ranks get True at the same call, counted from the session's start, without a collective:
        every rank calls it at the same places of the program, such as once at the end of each
        step, from one thread. While nothing is announced a call is two words of shared memory.
        The first call after an announcement waits until all ranks have come as far.

        Raises:
            RankMonitorClientError: Not initialised.
        """
        words = self._words
        if words is None:
            self._refuse()
        self._save_calls = calls = self._save_calls + 1
        words[_SAVE_CALLS] = calls
        if not words[_SAVE]:
            return False
        return self._should_save(calls)

    @contextmanager
    def section(self, section: str) -> Iterator[None]:
        """Open `section` for the length of a block; it is closed also if the block raises."""
        self.start_section(section)
        try:
            yield
        finally:
            self.end_section(section)

    def _record_unwatched(self, section: str) -> None:
        """Log once that a section has no timeout, where others have one."""
        if section in self._unwatched or not self._index or len(self._unwatched) >= _MAX_UNWATCHED:
            return
        self._unwatched.add(section)
        from nvidia_resiliency_ext.fault_tolerance._core.errors import nearest

        hint = nearest(section, self._index)
        level = logging.WARNING if hint else logging.INFO
        logger.log(level, "section %r has no timeout, so it is not watched%s", section, hint)

    def _refuse(self) -> NoReturn:
        raise RankMonitorClientError("the rank monitor client is not initialised")

    def _show(self) -> None:
        """Let the monitor look: the slot has the session's first section, heartbeat or step."""
        from .messages import Ask

        self._post(Ask(0))

    def _begin(self, words: memoryview, layout: slot.SlotLayout, *, is_answered: bool) -> int:
        """Let calls through into a slot that was just begun; return when that is."""
        self._index = layout.index
        self._is_answered = is_answered
        now = _now_ns()
        self._reset_figures(now)
        self._words = words
        return now

    def _move(self, words: memoryview) -> None:
        """Go on in another slot of the same layout, with all that the present one shows."""
        with self._lock:
            old = self._words
            if old is None:
                return
            for at in range(slot.W_SESSION_ID, slot.W_SAVE):
                words[at] = old[at]
            self._words = words
            for section, at in self._index.items():
                words[at] = self._open.get(section, 0)
            # A heartbeat takes no lock: one that came meanwhile went into the old slot.
            words[_HEARTBEAT_LAST] = self._heartbeat_last
            words[_HEARTBEAT_COUNT] = self._heartbeat_count

    def _stop(self) -> None:
        self._words = None

    def _close(self, words: memoryview, section: str, at: int, now: int) -> None:
        opened = self._open
        started = opened.pop(section, None)
        if started is None:
            raise RankMonitorClientError(f"section {section!r} is not open")
        took = now - started
        if took > self._longest.get(section, -1):
            self._longest[section] = took
        if not opened:
            self._outside_since = now
            self._has_closed = True
            # Before the section's own word: a rank stopped between the two stores must not look as
            # if it had been outside sections since the previous stretch.
            words[_OUT_OF_SECTION_START] = now
        words[at] = 0
        if at == self._step_at:
            self._steps = steps = self._steps + 1
            words[_STEP_COUNT] = steps
        if self._is_first_step_due and (at == self._step_at or not self._step_at):
            self._is_first_step_due = False
            words[slot.W_STEP_FIRST_CLOSE] = now
            self._show()

    def _record_long_gap(self, words: memoryview, now: int, gap: int) -> None:
        if not self._heartbeat_first:
            self._heartbeat_first = now
            words[slot.W_HEARTBEAT_FIRST] = now
            self._show()
        else:
            self._heartbeat_longest = gap

    def _record_first_open(self, words: memoryview, at: int, now: int) -> None:
        self._never_opened.discard(at)
        if at == self._step_at:
            words[slot.W_STEP_FIRST_OPEN] = now
        if not self._has_shown_life:
            self._has_shown_life = True
            self._show()

    def _record_iteration(self, words: memoryview) -> None:
        iteration = training_iteration()
        if iteration is not None:
            words[_ITERATION] = iteration
            if words[slot.W_FIRST_ITERATION] < 0:
                words[slot.W_FIRST_ITERATION] = iteration

    def _flush(self, calc: TimeoutsCalc) -> None:
        """Transfer the measured times to `calc` as if it had received every event."""
        with self._lock:
            if self._heartbeat_first:
                if calc.count == 0:
                    calc.update_on_heartbeat(self._heartbeat_first * _NS)
                longest_s = self._heartbeat_longest * _NS
                if longest_s:
                    calc.subsequent_max_time = max(calc.subsequent_max_time, longest_s)
                calc.count = self._heartbeat_count
                calc.prev_hb_time = self._heartbeat_last * _NS
                self._heartbeat_longest = 0
            for section, longest in self._longest.items():
                before_s = calc.section_to_max_time[section]
                calc.section_to_max_time[section] = max(before_s, longest * _NS)
            if self._outside_longest >= 0:
                outside_s = self._outside_longest * _NS
                calc.out_of_section_max_time = max(calc.out_of_section_max_time, outside_s)
            if self._has_closed:
                calc.last_section_close_time = self._outside_since * _NS
            calc.open_sections = {name: since * _NS for name, since in self._open.items()}
            self._longest = {}
            self._outside_longest = -1


def _refuse_other_names(section: object) -> None:
    if not isinstance(section, str):
        raise TypeError(f"a section's name is a text, not {section!r}")
