# SPDX-License-Identifier: Apache-2.0
"""The hot path: timed sections of the training loop and timed callables.

Every entry reads the `SectionRegistry`, which holds the switches that may change while the job
runs. Nothing here takes a lock: samples are appended to deques, which is atomic.
"""

from __future__ import annotations

import functools
import inspect
import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

from nvidia_resiliency_ext.attribution.straggler.statistics import SummaryTable, summarize

if TYPE_CHECKING:
    from nvidia_resiliency_ext.shared_utils.attribute_wrapping import WrappedAttribute

    from .kernel_capture import KernelCapture

MAX_SAMPLES = 8192
"""Samples of a section that are kept for one window; the newest win."""
MAX_SECTIONS = 4096
"""Sections of a rank that have a name of their own; all others share `OTHER_SECTIONS`."""
OTHER_SECTIONS = "<other sections>"

logger = logging.getLogger("nvrx")
# Of the two such functions the cheaper one; what is exported may be timed.
_is_compiling = torch.compiler.is_dynamo_compiling


@dataclass(slots=True)
class CustomSection:
    """A named section and its samples of the present window.

    Attributes:
        name: The name.
        location: Where it was entered first, `file:line`.
        total_entry_cnt: How often it was entered, measured or not.
        max_elapseds_len: Samples that are kept.
        cpu_elapsed_times: Wall times of measured entries, ms.
    """

    name: str
    location: str
    total_entry_cnt: int = 0
    max_elapseds_len: int = MAX_SAMPLES
    cpu_elapsed_times: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_SAMPLES))
    _has_warned: bool = field(default=False, repr=False, compare=False)

    def drain(self) -> list[float]:
        """Return the samples and forget them; those that arrive meanwhile stay."""
        take = self.cpu_elapsed_times.popleft
        return [take() for _ in range(len(self.cpu_elapsed_times))]

    def warn_of_place(self, frame: FrameType) -> None:
        """Warn once if the section is entered at another line than the first time.

        Args:
            frame: The frame that enters the section.
        """
        if self._has_warned:
            return
        place = _place_of(frame)
        if place != self.location:
            self._has_warned = True
            logger.warning(
                "straggler section %r is entered at %s and at %s: their times are mixed",
                self.name,
                self.location,
                place,
            )


class SectionRegistry:
    """Switches and sections of one detector; read at every entry.

    Attributes:
        is_paused: Entries pass without being counted.
        interval: Entry n of a section is measured if n is a multiple of it.
        capture: Times kernels; None where that is impossible or not wanted.
        sections: Sections by name.
    """

    __slots__ = ("_lock", "_unnamed", "capture", "interval", "is_paused", "sections")

    def __init__(self, interval: int, capture: KernelCapture | None) -> None:
        self.is_paused = False
        self.interval = interval
        self.capture = capture
        self.sections: dict[str, CustomSection] = {}
        self._unnamed: dict[tuple[object, int], CustomSection] = {}
        self._lock = threading.Lock()

    def add(self, name: str, location: str) -> CustomSection:
        """Return the section of this name, a new one if there is none and there may be more."""
        with self._lock:
            if name in self.sections or len(self.sections) < MAX_SECTIONS:
                return self.sections.setdefault(name, CustomSection(name, location))
            if OTHER_SECTIONS not in self.sections:
                others = CustomSection(OTHER_SECTIONS, location, _has_warned=True)
                self.sections[OTHER_SECTIONS] = others
                logger.warning(
                    "straggler: more than %d sections, such as %.80r: the times of new ones are"
                    " mixed; use names that do not change from step to step",
                    MAX_SECTIONS,
                    name,
                )
            return self.sections[OTHER_SECTIONS]

    def at_frame(self, frame: FrameType) -> CustomSection:
        """Return the section that is named after a place in the code."""
        key = (frame.f_code, frame.f_lineno)
        section = self._unnamed.get(key)
        if section is None:
            place = _place_of(frame)
            section = self._unnamed[key] = self.add(place, place)
        return section

    def named_at_frame(self, name: str, frame: FrameType) -> CustomSection:
        """Return a new section with this name, entered here for the first time.

        Raises:
            TypeError: The name is no text.
        """
        if not isinstance(name, str):
            raise TypeError(
                f"detection_section: name={name!r}: must be text, or None for the place of the call"
            )
        return self.add(name, _place_of(frame))

    def drain(self) -> SummaryTable:
        """Return the summaries of the window, of sections with samples, and begin a new one."""
        with self._lock:
            sections = list(self.sections.values())
        drained = [(section.name, section.drain()) for section in sections]
        measured = [(name, summarize(samples)) for name, samples in drained if samples]
        return SummaryTable([name for name, _ in measured], [row for _, row in measured])


class _SkippedEntry:
    """An entry that is not measured; one object serves all."""

    __slots__ = ()

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        pass


SKIPPED = _SkippedEntry()


class TimedEntry:
    """One measured entry without kernel timing; an exception in the body leaves no sample."""

    __slots__ = ("_append", "_begin")

    def __init__(self, append: Callable[[float], None]) -> None:
        self._append = append

    def __enter__(self) -> None:
        self._begin = perf_counter()

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        end = perf_counter()
        if kind is None:
            self._append((end - self._begin) * 1e3)


class CapturedEntry:
    """One measured entry with kernel timing: on before the clock starts, off after it stops."""

    __slots__ = ("_append", "_begin", "_capture", "_is_on")

    def __init__(self, append: Callable[[float], None], capture: KernelCapture) -> None:
        self._append = append
        self._capture = capture

    def __enter__(self) -> None:
        self._is_on = self._capture.start()
        self._begin = perf_counter()

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        end = perf_counter()
        if kind is None:
            self._append((end - self._begin) * 1e3)
        if self._is_on:
            self._capture.stop()


def timed_callable(
    function: Callable[..., Any],
    section: CustomSection,
    registry: SectionRegistry,
    wrapped: WrappedAttribute,
    *,
    profile_cuda: bool,
) -> Callable[..., Any]:
    """Return a function that does the same, timed as an entry of the section while switched on.

    Coroutine functions are timed until their result, generator functions until their end. Under
    `torch.compile` the function itself is traced, untimed.

    Raises:
        TypeError: It is an asynchronous generator function.
    """
    if inspect.isasyncgenfunction(function):
        raise TypeError(f"{function!r} is an asynchronous generator, which cannot be timed")
    append = section.cpu_elapsed_times.append

    if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
        return _timed_until_its_end(function, section, registry, wrapped, profile_cuda=profile_cuda)

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if registry.is_paused or not wrapped.is_active or _is_compiling():
            return function(*args, **kwargs)
        count = section.total_entry_cnt
        section.total_entry_cnt = count + 1
        if count % registry.interval:
            # Passing on no keywords costs a dictionary.
            return function(*args, **kwargs) if kwargs else function(*args)
        capture = registry.capture
        if profile_cuda and capture is not None:
            with CapturedEntry(append, capture):
                return function(*args, **kwargs)
        begin = perf_counter()
        result = function(*args, **kwargs)
        append((perf_counter() - begin) * 1e3)
        return result

    return run


def _timed_until_its_end(
    function: Callable[..., Any],
    section: CustomSection,
    registry: SectionRegistry,
    wrapped: WrappedAttribute,
    *,
    profile_cuda: bool,
) -> Callable[..., Any]:
    """Return a coroutine or generator function whose whole run is one entry."""

    def entry() -> TimedEntry | CapturedEntry | _SkippedEntry:
        if registry.is_paused or not wrapped.is_active:
            return SKIPPED
        count = section.total_entry_cnt
        section.total_entry_cnt = count + 1
        if count % registry.interval:
            return SKIPPED
        append, capture = section.cpu_elapsed_times.append, registry.capture
        if profile_cuda and capture is not None:
            return CapturedEntry(append, capture)
        return TimedEntry(append)

    if inspect.isgeneratorfunction(function):

        @functools.wraps(function)
        def run_generator(*args: Any, **kwargs: Any) -> Any:
            with entry():
                return (yield from function(*args, **kwargs))

        return run_generator

    @functools.wraps(function)
    async def run_coroutine(*args: Any, **kwargs: Any) -> Any:
        with entry():
            return await function(*args, **kwargs)

    return run_coroutine


def _place_of(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
