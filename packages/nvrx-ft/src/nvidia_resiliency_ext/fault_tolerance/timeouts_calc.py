# SPDX-License-Identifier: Apache-2.0
"""Measured times of one rank and the timeouts calculated from them; sends nothing to a monitor."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING

from ._core.errors import TimeoutsCalcError
from .data import HeartbeatTimeouts, SectionAction, SectionTimeouts

if TYPE_CHECKING:
    import torch

__all__ = ["TimeoutsCalc", "TimeoutsCalcError"]

_NO_DATA = -1.0


class TimeoutsCalc:
    """Longest intervals seen so far between heartbeats, in each section and outside all sections.

    All times are seconds of one monotonic clock; -1 means "not measured yet". Not thread-safe: it
    belongs to the thread that runs the training loop.

    Example:
        >>> calc = TimeoutsCalc(sections=["step"], start_time=0.0, safety_factor=2.0)
        >>> calc.update_on_section_event("step", SectionAction.OPEN, 1.0)
        >>> calc.update_on_section_event("step", SectionAction.CLOSE, 4.0)
        >>> calc.get_section_timeouts().section["step"]
        6.0

    Args:
        sections: names of the sections that are timed.
        start_time: when the rank started; now if None.
        safety_factor: a timeout is this many times the longest interval seen.
        clock: source of the time wherever a method is not given one.
    """

    def __init__(
        self,
        sections: Iterable[str] | None = None,
        start_time: float | None = None,
        safety_factor: float = 5.0,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self.start_time: float = clock() if start_time is None else start_time
        self.safety_factor = safety_factor
        self.prev_hb_time: float | None = None
        self.count = 0
        self.initial_max_time = _NO_DATA
        self.subsequent_max_time = _NO_DATA
        self.open_sections: dict[str, float] = {}
        self.last_section_close_time: float | None = None
        self.out_of_section_max_time = _NO_DATA
        self.section_to_max_time: dict[str, float] = dict.fromkeys(sections or (), _NO_DATA)

    @property
    def is_out_of_section(self) -> bool:
        """Whether no section is open."""
        return not self.open_sections

    def reset_start_time(self) -> None:
        """Begin the time to the first heartbeat, and the first out-of-section time, now."""
        self.start_time = self._clock()

    def update_on_heartbeat(self, hb_time: float | None = None) -> None:
        """Take a heartbeat at `hb_time` (now if None) into account."""
        now = self._clock() if hb_time is None else hb_time
        previous = self.prev_hb_time
        if previous is None:
            self.initial_max_time = max(self.initial_max_time, now - self.start_time)
        else:
            self.subsequent_max_time = max(self.subsequent_max_time, now - previous)
        self.count += 1
        self.prev_hb_time = now

    def update_on_section_event(
        self, section: str | None, action: SectionAction, event_time: float | None = None
    ) -> None:
        """Add an OPEN or CLOSE `action` of a `section`, or CLOSE_ALL of all, to the measurements.

        It was at `event_time`, monotonic time in seconds; None: now.

        Raises:
            TimeoutsCalcError: The section is unknown, open already, or not open.
        """
        now = self._clock() if event_time is None else event_time
        if action is SectionAction.CLOSE_ALL:
            for name in list(self.open_sections):
                self._close(name, now)
            return
        if section is None or section not in self.section_to_max_time:
            names = sorted(self.section_to_max_time)
            raise TimeoutsCalcError(f"section {section!r} is unknown; known sections: {names}")
        if action is not SectionAction.OPEN:
            self._close(section, now)
            return
        if section in self.open_sections:
            raise TimeoutsCalcError(f"section {section!r} is open already")
        self.maybe_bump_oos_time(now)
        self.open_sections[section] = now

    def _close(self, section: str, now: float) -> None:
        opened = self.open_sections.pop(section, None)
        if opened is None:
            raise TimeoutsCalcError(f"section {section!r} is not open")
        self.section_to_max_time[section] = max(self.section_to_max_time[section], now - opened)
        if not self.open_sections:
            self.last_section_close_time = now

    def maybe_bump_oos_time(self, curr_time: float | None = None) -> None:
        """Count the current out-of-section time, if any, up to `curr_time` (now if None)."""
        if self.open_sections:
            return
        now = self._clock() if curr_time is None else curr_time
        last_close = self.last_section_close_time
        stretch_start = self.start_time if last_close is None else last_close
        self.out_of_section_max_time = max(self.out_of_section_max_time, now - stretch_start)

    def synchronize_all(self) -> None:
        """Replace every measured value by its maximum over all ranks of the default process group.

        A collective: one all-reduce. All ranks must have the same sections, in any order.

        Raises:
            TimeoutsCalcError: torch.distributed is not initialised, or sections differ by rank.
        """
        names = sorted(self.section_to_max_time)
        own = [self.initial_max_time, self.subsequent_max_time, self.out_of_section_max_time]
        own += [self.section_to_max_time[name] for name in names]
        initial, subsequent, out_of_section, *sections = max_over_ranks(own, names)
        self.initial_max_time = initial
        self.subsequent_max_time = subsequent
        self.out_of_section_max_time = out_of_section
        self.section_to_max_time.update(zip(names, sections, strict=True))

    def can_get_hb_timeouts(self) -> bool:
        """Return whether both kinds of heartbeat interval were measured."""
        return self.initial_max_time >= 0 and self.subsequent_max_time >= 0

    def get_hb_timeouts(self, current: HeartbeatTimeouts | None = None) -> HeartbeatTimeouts:
        """Return heartbeat timeouts; the mean with `current`'s when those were calculated too.

        Raises:
            TimeoutsCalcError: too few heartbeats were seen, or calculated `current` lacks one.
        """
        if not self.can_get_hb_timeouts():
            raise TimeoutsCalcError(
                f"heartbeat timeouts need at least two heartbeats, {self.count} were seen"
            )
        initial = self.initial_max_time * self.safety_factor
        subsequent = self.subsequent_max_time * self.safety_factor
        if current is not None and current.were_calculated:
            if not current.are_valid:
                raise TimeoutsCalcError(
                    f"the present heartbeat timeouts were calculated, but one is missing: {current}"
                )
            initial = _mean(initial, current.initial)
            subsequent = _mean(subsequent, current.subsequent)
        return HeartbeatTimeouts(initial, subsequent, were_calculated=True)

    def can_get_section_timeouts(
        self, selected_sections: Collection[str] | None = None, calc_out_of_section: bool = True
    ) -> bool:
        """Return if `get_section_timeouts(selected_sections, calc_out_of_section)` would succeed.

        Raises:
            TimeoutsCalcError: A selected section is unknown.
        """
        return not self._unmeasured(selected_sections, calc_out_of_section)

    def get_section_timeouts(
        self,
        selected_sections: Collection[str] | None = None,
        calc_out_of_section: bool = True,
        current: SectionTimeouts | None = None,
    ) -> SectionTimeouts:
        """Return section timeouts, merged into `current`.

        Selected timeouts are calculated, as the mean with `current`'s value if that was also
        calculated; all others keep `current`'s value (None without one).

        Args:
            selected_sections: Names of the sections to calculate; None: all.
            calc_out_of_section: Whether to calculate the timeout outside all sections, too.
            current: The timeouts in force; None: no timeouts.

        Raises:
            TimeoutsCalcError: A selected section is unknown, or a time was not measured.
        """
        unmeasured = self._unmeasured(selected_sections, calc_out_of_section)
        if unmeasured:
            raise TimeoutsCalcError(f"never measured: {', '.join(unmeasured)}")
        before = SectionTimeouts() if current is None else current
        selected = set(self._selected(selected_sections))
        section: dict[str, float | None] = dict.fromkeys(self.section_to_max_time)
        section.update(before.section)
        for name in selected:
            value = self.section_to_max_time[name] * self.safety_factor
            is_mean = name in before.calculated_sections
            section[name] = _mean(value, before.section.get(name)) if is_mean else value
        out_of_section = before.out_of_section
        if calc_out_of_section:
            value = self.out_of_section_max_time * self.safety_factor
            is_mean = before.is_out_of_section_calculated
            out_of_section = _mean(value, before.out_of_section) if is_mean else value
        return SectionTimeouts(
            section=section,
            out_of_section=out_of_section,
            calculated_sections=before.calculated_sections | selected,
            is_out_of_section_calculated=before.is_out_of_section_calculated or calc_out_of_section,
        )

    def _selected(self, selected_sections: Collection[str] | None) -> Collection[str]:
        if selected_sections is None:
            return self.section_to_max_time.keys()
        unknown = sorted(set(selected_sections) - self.section_to_max_time.keys())
        if unknown:
            names = sorted(self.section_to_max_time)
            raise TimeoutsCalcError(f"sections {unknown} are unknown; known sections: {names}")
        return selected_sections

    def _unmeasured(
        self, selected_sections: Collection[str] | None, calc_out_of_section: bool
    ) -> list[str]:
        selected = sorted(self._selected(selected_sections))
        missing = [f"section {name!r}" for name in selected if self.section_to_max_time[name] < 0]
        if calc_out_of_section and self.out_of_section_max_time < 0:
            missing.append("the time out of sections")
        return missing


def _mean(new: float, old: float | None) -> float:
    return new if old is None else 0.5 * new + 0.5 * old


_FIRST_VALUES = 253  # with the three words of the head, 2 KiB


def reduction_device_type(backend_config: str) -> str:
    """Choose from "device:backend,...": the CPU, if it is there, forces no context on a device."""
    backends = dict(part.split(":", 1) for part in backend_config.split(",") if ":" in part)
    if "cpu" in backends or not backends:
        return "cpu"
    return next(iter(backends))


def max_over_ranks(values: Sequence[float], names: Sequence[str]) -> list[float]:
    """Return the maxima of `values`, called `names`, over the default process group.

    Raises TimeoutsCalcError where names differ by rank or torch.distributed is not initialised.
    """
    # A program that has not imported torch has no process group, and need not wait for the import.
    dist = sys.modules.get("torch.distributed")
    if dist is None or not (dist.is_available() and dist.is_initialized()):
        raise TimeoutsCalcError(
            "timeouts of all ranks cannot be combined: torch.distributed is not initialised"
        )
    import hashlib

    import torch

    device_type = reduction_device_type(dist.get_backend_config())
    device = torch.device(device_type)
    if device_type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())

    encoded_names = json.dumps(list(names)).encode()
    # Six bytes: a float64 holds them exactly.
    digest = hashlib.blake2b(encoded_names, digest_size=6).digest()
    fingerprint = float(int.from_bytes(digest, "big"))
    padding = [_NO_DATA] * (_FIRST_VALUES - len(values))
    first = torch.tensor(
        [fingerprint, -fingerprint, float(len(encoded_names)), *values[:_FIRST_VALUES], *padding],
        dtype=torch.float64,
        device=device,
    )
    dist.all_reduce(first, op=dist.ReduceOp.MAX)
    largest, negated_smallest, longest_names, *maxima = first.tolist()
    if largest != -negated_smallest:
        raise TimeoutsCalcError(
            _describe_difference(_gather_names(encoded_names, int(longest_names), device))
        )
    if len(values) <= _FIRST_VALUES:
        return maxima[: len(values)]
    rest = torch.tensor(values[_FIRST_VALUES:], dtype=torch.float64, device=device)
    dist.all_reduce(rest, op=dist.ReduceOp.MAX)
    return maxima + [float(value) for value in rest.tolist()]


def _gather_names(
    encoded_names: bytes, longest_names: int, device: torch.device
) -> list[list[str]]:
    """Return every rank's names. Called by all ranks or by none."""
    import torch
    import torch.distributed as dist

    padded = encoded_names.ljust(longest_names, b" ")
    own = torch.tensor(list(padded), dtype=torch.uint8, device=device)
    gathered = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, own)
    return [json.loads(bytes(tensor.tolist())) for tensor in gathered]


def _describe_difference(names_of_ranks: Sequence[Sequence[str]]) -> str:
    from nvidia_resiliency_ext.shared_utils.rank_sets import format_ranks

    ranks_by_names: dict[tuple[str, ...], list[int]] = {}
    for rank, names in enumerate(names_of_ranks):
        ranks_by_names.setdefault(tuple(names), []).append(rank)
    groups = "; ".join(
        f"ranks {format_ranks(ranks)} have {list(names)}" for names, ranks in ranks_by_names.items()
    )
    common = set(names_of_ranks[0]).intersection(*names_of_ranks)
    different = sorted(set().union(*names_of_ranks) - common)
    return f"sections {different} are not configured on all ranks: {groups}"
