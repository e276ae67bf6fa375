# SPDX-License-Identifier: Apache-2.0
"""Owns a rank's timeouts: calculated, kept in a checkpoint, sent to the monitor; not the session.

The first half of `RankMonitorClient`; the session's own half is in `client`.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from nvidia_resiliency_ext.fault_tolerance._core.errors import RankMonitorClientError
from nvidia_resiliency_ext.fault_tolerance.data import HeartbeatTimeouts, SectionTimeouts

from .hotpath import HotPath

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from nvidia_resiliency_ext.fault_tolerance.timeouts_calc import TimeoutsCalc

    from .link import RankLink


_HEARTBEAT = "heartbeat"
_SECTION = "section"


def write_state(
    heartbeat: HeartbeatTimeouts | None, section: SectionTimeouts | None
) -> dict[str, Any]:
    """Return the calculated timeouts as JSON-clean values; a part is left out if not calculated."""
    state: dict[str, Any] = {}
    if heartbeat is not None and heartbeat.were_calculated:
        state[_HEARTBEAT] = {
            "initial": heartbeat.initial,
            "subsequent": heartbeat.subsequent,
            "were_calculated": True,
        }
    if section is not None and (
        section.calculated_sections or section.is_out_of_section_calculated
    ):
        state[_SECTION] = {
            "section": {name: section.section[name] for name in sorted(section.section)},
            "out_of_section": section.out_of_section,
            "calculated_sections": sorted(section.calculated_sections),
            "is_out_of_section_calculated": section.is_out_of_section_calculated,
        }
    return state


def read_state(
    state: Mapping[str, Any],
) -> tuple[HeartbeatTimeouts | None, SectionTimeouts | None]:
    """Return what `write_state` wrote.

    Raises:
        TypeError: A part has fields that timeouts do not have.
    """
    heartbeat, section = state.get(_HEARTBEAT), state.get(_SECTION)
    return (
        None if heartbeat is None else HeartbeatTimeouts(**heartbeat),
        None if section is None else SectionTimeouts(**section),
    )


def only_known(loaded: SectionTimeouts, configured: SectionTimeouts) -> SectionTimeouts:
    """Return loaded timeouts for the configured sections; what was not loaded stays as it is."""
    section = dict(configured.section)
    section.update({name: value for name, value in loaded.section.items() if name in section})
    return SectionTimeouts(
        section=section,
        out_of_section=(
            loaded.out_of_section
            if loaded.is_out_of_section_calculated
            else configured.out_of_section
        ),
        calculated_sections=loaded.calculated_sections & section.keys(),
        is_out_of_section_calculated=loaded.is_out_of_section_calculated,
    )


def limits_of(
    heartbeat: HeartbeatTimeouts | None = None, section: SectionTimeouts | None = None
) -> dict[str, Any]:
    """Return timeouts as the keys of the configuration that the monitor takes."""
    limits: dict[str, Any] = {}
    if heartbeat is not None:
        limits["initial_rank_heartbeat_timeout"] = heartbeat.initial
        limits["rank_heartbeat_timeout"] = heartbeat.subsequent
    if section is not None:
        limits["rank_section_timeouts"] = dict(section.section)
        limits["rank_out_of_section_timeout"] = section.out_of_section
    return limits


ANSWER_LIMIT_S = 30.0


class ClientTimeouts(HotPath):
    """The limits in force for one rank, and where they come from."""

    CURRENT_TIMEOUTS_STATE_KEY = "current_timeouts"

    def __init__(self) -> None:
        """Know no timeouts yet."""
        super().__init__()
        self.logger = logging.getLogger("nvrx")
        self.is_initialized = False
        self.hb_timeouts: HeartbeatTimeouts | None = None
        self.section_timeouts: SectionTimeouts | None = None
        self.loaded_hb_timeouts: HeartbeatTimeouts | None = None
        self.loaded_section_timeouts: SectionTimeouts | None = None
        self._calc: TimeoutsCalc | None = None
        self._link: RankLink | None = None
        self._own_limits: dict[str, Any] = {}

    @property
    def timeouts_calc(self) -> TimeoutsCalc | None:
        """What was measured so far, up to date; None before the first session."""
        if self._calc is not None:
            self._flush(self._calc)
        return self._calc

    def calculate_and_set_hb_timeouts(self, skip_if_not_ready: bool = False) -> bool:
        """Set heartbeat timeouts from the longest intervals of all ranks; collective.

        Args:
            skip_if_not_ready: Return False when too few heartbeats were seen, instead of raising.

        Returns:
            Whether the timeouts were set, here and in the monitor.

        Raises:
            RankMonitorClientError: Not initialised, or too few heartbeats were seen.
            TimeoutsCalcError: There is no process group.
        """
        calc = self._synchronized_calc(counts_outside=False)
        if not calc.can_get_hb_timeouts():
            return self._not_ready("heartbeats", skip_if_not_ready=skip_if_not_ready)
        self.hb_timeouts = calc.get_hb_timeouts(self.hb_timeouts)
        self._send_limits(limits_of(heartbeat=self.hb_timeouts))
        return True

    def calculate_and_set_section_timeouts(
        self,
        selected_sections: Collection[str] | None = None,
        calc_out_of_section: bool = True,
        skip_if_not_ready: bool = False,
    ) -> bool:
        """Set section timeouts from the longest durations of all ranks; collective.

        Args:
            selected_sections: Sections to set; all if None. As in `start_section`, names that
                the configuration does not have are ignored.
            calc_out_of_section: Whether to set the timeout of the time outside sections, too.
            skip_if_not_ready: Return False when something was not measured, instead of raising.

        Returns:
            Whether the timeouts were set, here and in the monitor.

        Raises:
            RankMonitorClientError: Not initialised, or something was not measured.
            TimeoutsCalcError: There is no process group.
        """
        calc = self._synchronized_calc(counts_outside=calc_out_of_section)
        if selected_sections is not None:
            known = self.section_timeouts.section if self.section_timeouts else {}
            for name in selected_sections:
                if name not in known:
                    self._record_unwatched(name)
            selected_sections = [name for name in selected_sections if name in known]
        if not calc.can_get_section_timeouts(selected_sections, calc_out_of_section):
            return self._not_ready("sections", skip_if_not_ready=skip_if_not_ready)
        self.section_timeouts = calc.get_section_timeouts(
            selected_sections, calc_out_of_section, self.section_timeouts
        )
        self._send_limits(limits_of(section=self.section_timeouts))
        return True

    def state_dict(self) -> Mapping[str, Any]:
        """Return the calculated timeouts for a checkpoint; JSON-clean and equal on all ranks."""
        self._check_process()
        state = write_state(
            self.hb_timeouts if self.is_initialized else self.loaded_hb_timeouts,
            self.section_timeouts if self.is_initialized else self.loaded_section_timeouts,
        )
        return {self.CURRENT_TIMEOUTS_STATE_KEY: state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take timeouts out of a checkpoint; in a session they count at once.

        Args:
            state: What `state_dict` returned.
        """
        self._check_process()
        current = state.get(self.CURRENT_TIMEOUTS_STATE_KEY) or {}
        self.loaded_hb_timeouts, self.loaded_section_timeouts = read_state(current)
        if self.is_initialized:
            self._apply_loaded()

    def _keep_calculated(self) -> None:
        """Remember what was calculated, for a checkpoint after the end and for a later session."""
        calculated = write_state(self.hb_timeouts, self.section_timeouts)
        loaded = read_state(calculated)
        self.loaded_hb_timeouts, self.loaded_section_timeouts = loaded

    def _check_process(self) -> None:
        raise NotImplementedError

    def _synchronized_calc(self, *, counts_outside: bool) -> TimeoutsCalc:
        self._check_process()
        calc = self.timeouts_calc
        if not self.is_initialized or calc is None:
            self._refuse()
        if counts_outside:
            calc.maybe_bump_oos_time()
        calc.synchronize_all()
        return calc

    def _not_ready(self, what: str, *, skip_if_not_ready: bool) -> bool:
        if skip_if_not_ready:
            return False
        raise RankMonitorClientError(f"timeouts cannot be calculated: too few {what} were seen")

    def _apply_loaded(self) -> None:
        limits: dict[str, Any] = {}
        if self.loaded_hb_timeouts is not None:
            self.hb_timeouts = self.loaded_hb_timeouts
            limits |= limits_of(heartbeat=self.hb_timeouts)
        if self.loaded_section_timeouts is not None and self.section_timeouts is not None:
            self.section_timeouts = only_known(self.loaded_section_timeouts, self.section_timeouts)
            limits |= limits_of(section=self.section_timeouts)
        if limits:
            self._send_limits(limits)

    def _send_limits(self, limits: Mapping[str, Any]) -> None:
        """Change limits in the monitor; a new monitor gets them again."""
        from .messages import SetTimeouts

        self._own_limits = {**self._own_limits, **limits}
        link = self._link
        assert link is not None
        answer = link.request(lambda number: SetTimeouts(number, dict(limits)), ANSWER_LIMIT_S)
        if answer is None:
            self.logger.warning("the rank monitor did not take the new timeouts yet")
        elif answer.problem is not None:
            raise RankMonitorClientError(f"the rank monitor refused timeouts: {answer.problem}")
