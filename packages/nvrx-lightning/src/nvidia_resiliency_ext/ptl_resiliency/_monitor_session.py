# SPDX-License-Identifier: Apache-2.0
"""One run's session with its rank monitor, and the file that keeps calculated timeouts.

A monitor that is lost never fails a training step and never hides the exception of the user.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from nvidia_resiliency_ext.shared_utils.os_utils import atomic_write, read_regular_file

from ._framework import require

if TYPE_CHECKING:
    from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient

__all__ = ["LOSS_POLICIES", "MonitorSession", "write_timeouts"]

LOSS_POLICIES = ("warn", "raise")
SCHEMA = "nvrx_ft_timeouts.v1"
_STATE_KEY = "current_timeouts"
_LARGEST_FILE_BYTES = 1 << 20
_FIRST_RETRY_S = 1.0
_LONGEST_RETRY_S = 60.0
_MALFORMED = (ValueError, TypeError, KeyError, AttributeError, RecursionError)


class MonitorSession:
    """Send heartbeats and sections of one run; reconnect when the monitor is lost.

    Args:
        logger: Gets one line when the monitor is lost and one when it is found again.
        on_loss: `warn` goes on without a monitor and tries again after 1 s, 2 s, ... 60 s;
            `raise` lets the client's error through.
        min_heartbeat_interval: Least seconds between two heartbeats; others are dropped.

    Attributes:
        client: The `RankMonitorClient`.

    Raises:
        RankMonitorClientError: The first connection failed, whatever `on_loss` says.
    """

    def __init__(self, logger: logging.Logger, on_loss: str, min_heartbeat_interval: float) -> None:
        ft = require("fault_tolerance", "ft")
        self.client: RankMonitorClient = ft.RankMonitorClient()
        self._error: type[Exception] = ft.RankMonitorClientError
        self._logger = logger
        self._raises = on_loss == "raise"
        self._min_interval = min_heartbeat_interval
        self._last_heartbeat = -float("inf")
        self._retry_at: float | None = None
        self._retry_wait = _FIRST_RETRY_S
        self.client.init_workload_monitoring()

    @property
    def is_connected(self) -> bool:
        """Whether the last call reached the monitor."""
        return self._retry_at is None

    def heartbeat(self) -> bool:
        """Send a heartbeat; return whether one was sent."""
        now = time.monotonic()
        if now - self._last_heartbeat < self._min_interval:
            return False
        if not self.call(self.client.send_heartbeat):
            return False
        self._last_heartbeat = now
        return True

    def call(self, function: Callable[..., object], *args: Any) -> bool:
        """Call a method of the client; return whether it succeeded.

        Raises:
            RankMonitorClientError: The monitor is lost, and the policy is `raise`.
        """
        if self._retry_at is not None and not self._reconnected():
            return False
        try:
            function(*args)
        except self._error as error:
            if self._raises:
                raise
            self._lost(error)
            return False
        return True

    def load_timeouts(self, path: str) -> dict[str, Any] | None:
        """Take the timeouts that an earlier run wrote, and return them; None when there are none.

        A file that is truncated or something else is renamed to `<path>.corrupt`, with a warning,
        so that the timeouts are learned again.

        Args:
            path: The JSON file. One without `schema`, as other programs write it, is accepted.

        Raises:
            OSError: The file is there and cannot be read.
        """
        try:
            state = json.loads(read_regular_file(path, _LARGEST_FILE_BYTES))
            if state.get("schema", SCHEMA) != SCHEMA:
                raise ValueError(f"its schema is {state['schema']!r}, not {SCHEMA!r}")
            timeouts = {_STATE_KEY: state[_STATE_KEY]}
            self.client.load_state_dict(timeouts)
        except FileNotFoundError:
            return None
        except (*_MALFORMED, self._error) as error:
            os.replace(path, f"{path}.corrupt")
            self._logger.warning(
                "the timeouts in %s are of no use and are learned again (%s: %s); the file is now"
                " %s.corrupt", path, type(error).__name__, error, path,
            )  # fmt: skip
            return None
        return timeouts

    def close(self) -> None:
        """End the session; harmless when repeated."""
        try:
            self.client.shutdown_workload_monitoring()
        except self._error:
            self._logger.warning("the rank monitor's session did not end cleanly", exc_info=True)

    def _lost(self, error: Exception) -> None:
        self._logger.warning("the rank monitor is lost, training goes on: %s", error)
        self._retry_at = time.monotonic() + self._retry_wait

    def _reconnected(self) -> bool:
        assert self._retry_at is not None
        if time.monotonic() < self._retry_at:
            return False
        try:
            self.client.shutdown_workload_monitoring()
            self.client.init_workload_monitoring()
        except self._error as error:
            self._logger.debug("the rank monitor is still lost: %s", error)
            self._retry_wait = min(2 * self._retry_wait, _LONGEST_RETRY_S)
            self._retry_at = time.monotonic() + self._retry_wait
            return False
        self._logger.warning("connected to a rank monitor again")
        self._retry_at, self._retry_wait = None, _FIRST_RETRY_S
        return True


def write_timeouts(path: str, state: dict[str, Any]) -> None:
    """Replace the file by the client's state, so that readers see the old file or the new.

    Args:
        path: The JSON file; its directory must exist.
        state: What `RankMonitorClient.state_dict` returns.

    Raises:
        OSError: It cannot be written; the old file is then untouched.
    """
    data = json.dumps({"schema": SCHEMA, **state}, indent=1).encode()
    atomic_write(path, data, mode=0o644)
