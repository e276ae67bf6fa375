# SPDX-License-Identifier: Apache-2.0
"""Reads the error counters of one NVLink port, by the first method that this hardware answers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .nvml_errors import NvmlCallError
from .nvml_session import session

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["CounterReader"]

# Field ids, with the port as scope: recovery events, PLR retry blocks, receive errors.
_SCOPED_FIELDS = {"recovery_events": 215, "plr_retry_blocks": 295, "receive_errors": 208}
_LANE_REPLAY_BASE = 46
_LANE_RECOVERY_BASE = 53
_LANE_PORTS = 6
_DL_COUNTERS = {"dl_replay": 0, "dl_recovery": 1}
_UNSUPPORTED = frozenset({NvmlCallError.INVALID_ARGUMENT, NvmlCallError.NOT_SUPPORTED})

Counters = dict[str, int]


class CounterReader:
    """Remembers per GPU and port which method works, and which ports are not there."""

    def __init__(self) -> None:
        self._methods: dict[tuple[int | str, int], int] = {}
        self._absent: set[tuple[int | str, int]] = set()

    def read(self, device: int | str, port: int) -> Counters:
        """Return the counters by name; none when they cannot be read.

        Raises:
            NvmlError: The driver hangs, or the device itself cannot be read.
        """
        key = (device, port)
        if key in self._absent:
            return {}
        known = self._methods.get(key)
        order = range(len(_METHODS)) if known is None else (known,)
        is_absent = known is None
        for number in order:
            counters = _METHODS[number](device, port)
            if counters:
                self._methods[key] = number
                return counters
            is_absent = is_absent and counters is not None
        if is_absent:
            self._absent.add(key)
        return {}


def _scoped(device: int | str, port: int) -> Counters | None:
    wanted = [[number, port] for number in _SCOPED_FIELDS.values()]
    return _fields(device, list(_SCOPED_FIELDS), wanted)


def _per_lane(device: int | str, port: int) -> Counters | None:
    if port >= _LANE_PORTS:
        return {}
    wanted = [[_LANE_REPLAY_BASE + port, 0], [_LANE_RECOVERY_BASE + port, 0]]
    return _fields(device, ["lane_replay", "lane_recovery"], wanted)


def _fields(device: int | str, names: list[str], wanted: list[list[int]]) -> Counters | None:
    """Return what could be read: nothing when unsupported, `None` when it failed for now."""
    try:
        values = session().ask("fields", device, wanted)
    except NvmlCallError as error:
        if error.is_unsupported:
            return {}
        raise
    found = {name: value for name, (code, value) in zip(names, values, strict=True) if code == 0}
    if not found and any(code not in _UNSUPPORTED for code, _ in values):
        return None
    return found


def _data_link(device: int | str, port: int) -> Counters | None:
    found: Counters = {}
    has_failed = False
    for name, counter in _DL_COUNTERS.items():
        try:
            found[name] = session().ask("link_error_counter", device, port, counter)
        except NvmlCallError as error:
            is_unsupported = error.is_unsupported or error.code in _UNSUPPORTED
            has_failed = has_failed or not is_unsupported
    return None if has_failed and not found else found


_METHODS: tuple[Callable[[int | str, int], Counters | None], ...] = (_scoped, _per_lane, _data_link)
