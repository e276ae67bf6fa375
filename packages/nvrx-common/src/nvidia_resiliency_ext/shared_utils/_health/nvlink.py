# SPDX-License-Identifier: Apache-2.0
"""Owns the check of the NVLinks' state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .check import PeriodicCheck
from .devices import PynvmlMixin, device_label, selected_devices, whose
from .nvml_errors import NvmlCallError, NvmlError, NvmlUnavailableError
from .nvml_session import session
from .result import Finding, healthy, skipped, unhealthy

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

__all__ = ["NVLHealthCheck", "link_count"]

_MAX_LINKS = 36
_COUNT_FIELD = 91  # NVML_FI_DEV_NVLINK_LINK_COUNT


def link_count(device: int | str) -> int:
    """Return how many links a GPU has, or how many any may have where it does not tell.

    Raises:
        NvmlError: The driver cannot say.
    """
    try:
        code, value = session().ask("fields", device, [[_COUNT_FIELD, 0]])[0]
    except NvmlCallError as error:
        if not error.is_unsupported:
            raise
        return _MAX_LINKS
    return min(value, _MAX_LINKS) if code == 0 else _MAX_LINKS


class NVLHealthCheck(PeriodicCheck, PynvmlMixin):
    """Is every NVLink of the GPUs enabled?

    Args:
        device_index: Local rank whose GPU is looked at; `None` looks at all of the node.
        interval: Seconds between two looks of `async_check`.
        on_failure: Awaited by `async_check` after an unhealthy look.
    """

    name = "nvlink"

    def __init__(
        self,
        device_index: int | None = None,
        interval: float = 60,
        on_failure: Callable[[], Awaitable[object]] | None = None,
    ) -> None:
        super().__init__(interval, on_failure)
        self.device_index = device_index

    @property
    def component(self) -> str:
        """What is looked at."""
        return f"NVLinks of {whose(self.device_index)}"

    def _examine(self) -> Finding:
        problems: list[str] = []
        evidence: dict[str, Any] = {}
        try:
            for device in selected_devices(self.device_index):
                _look(device, problems, evidence)
        except NvmlUnavailableError as error:
            return skipped(str(error))
        except NvmlError as error:
            return unhealthy(str(error), evidence)
        if problems:
            return unhealthy("; ".join(problems), evidence)
        if not any(evidence.values()):
            return skipped("no NVLink is there", evidence)
        return healthy(evidence=evidence)


def _look(device: int | str, problems: list[str], evidence: dict[str, Any]) -> None:
    label = device_label(device)
    states: dict[str, str] = {}
    evidence[label] = states
    try:
        for link in range(link_count(device)):
            state = _state(device, link)
            if state is not None:
                states[str(link)] = "up" if state else "disabled"
    except NvmlCallError as error:
        problems.append(f"{label}: {error}")
        return
    disabled = [link for link, state in states.items() if state == "disabled"]
    if disabled:
        problems.append(f"{label}: links {', '.join(disabled)} are disabled")


def _state(device: int | str, link: int) -> int | None:
    try:
        state: int = session().ask("link_state", device, link)
    except NvmlCallError as error:
        # A link beyond the last one is an invalid argument, once the device itself was found.
        if error.is_unsupported or error.code == NvmlCallError.INVALID_ARGUMENT:
            return None
        raise
    return state
