# SPDX-License-Identifier: Apache-2.0
"""Is a GPU fit for work? Pure judgement of what the driver said."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .result import Finding, healthy, skipped, unhealthy

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["MIN_DRIVER_MAJOR", "GpuReading", "driver_major", "judge_gpus"]

MIN_DRIVER_MAJOR = 570
"""The first driver that tells which recovery action a GPU needs."""

_ACTIONS = {
    1: "reset the GPU",
    2: "reboot the node",
    3: "drain peer-to-peer traffic",
    4: "drain and reset the GPU",
    5: "recover the IMEX domain",
    6: "reset the bus",
    7: "reboot the system",
}


@dataclass(frozen=True, slots=True)
class GpuReading:
    """What was read of one GPU; `None` is what could not be told.

    Attributes:
        label: Its name in messages.
        recovery_action: What the driver wants done; 0 is nothing.
        error: Why it could not be read.
        numbers: ECC and row remapping counters by name.
        bus_id: PCI address.
    """

    label: str
    recovery_action: int | None = None
    error: str | None = None
    numbers: Mapping[str, int] = field(default_factory=dict)
    bus_id: str | None = None

    @property
    def problem(self) -> str | None:
        """What is wrong with it, if anything."""
        if self.error is not None:
            return f"{self.label}: {self.error}"
        if self.recovery_action:
            action = _ACTIONS.get(self.recovery_action, f"unknown action {self.recovery_action}")
            return f"{self.label}: the driver asks to {action}"
        if self.numbers.get("remap_failure"):
            return f"{self.label}: remapping a row of memory has failed"
        return None


def driver_major(version: str) -> int | None:
    """Return the first number of a driver's version, `None` if it has none."""
    first = version.partition(".")[0].strip()
    return int(first) if first.isascii() and first.isdigit() else None


def judge_gpus(readings: Sequence[GpuReading], expected: int | None) -> Finding:
    """Return what to think of these GPUs.

    Args:
        readings: One of each GPU that was looked at.
        expected: How many there must be, where that matters.
    """
    evidence: dict[str, Any] = {
        "gpus": [_evidence(reading) for reading in readings],
    }
    problems = [reading.problem for reading in readings if reading.problem is not None]
    if expected is not None and len(readings) < expected:
        evidence["expected_gpus"] = expected
        problems.insert(0, f"{len(readings)} GPUs are visible, {expected} are expected")
    if problems:
        return unhealthy("; ".join(problems), evidence)
    if not readings:
        return skipped("no GPU is visible")
    if all(reading.recovery_action is None for reading in readings):
        return skipped("these GPUs do not tell which recovery action they need", evidence)
    return healthy(evidence=evidence)


def _evidence(reading: GpuReading) -> dict[str, Any]:
    found: dict[str, Any] = {"gpu": reading.label, **reading.numbers}
    if reading.bus_id is not None:
        found["bus_id"] = reading.bus_id
    if reading.recovery_action is not None:
        found["recovery_action"] = reading.recovery_action
    if reading.error is not None:
        found["error"] = reading.error
    return found
