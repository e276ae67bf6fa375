# SPDX-License-Identifier: Apache-2.0
"""Owns how timeouts become a checkpoint's state, come back, and travel; it measures nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nvidia_resiliency_ext.fault_tolerance.data import HeartbeatTimeouts, SectionTimeouts

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["limits_of", "only_known", "read_state", "write_state"]

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
