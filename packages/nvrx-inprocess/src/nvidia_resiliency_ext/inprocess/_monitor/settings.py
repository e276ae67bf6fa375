# SPDX-License-Identifier: Apache-2.0
"""What a rank tells its monitor about one call; values only, nothing is read or opened here."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["START_LIMIT_S", "MonitorSettings"]

START_LIMIT_S = 10.0
"""How long a rank waits for its monitor."""


@dataclass(frozen=True, slots=True)
class MonitorSettings:
    """Times and names of one call of a wrapped function; equal on all ranks.

    Attributes:
        prefix: What stands before every key of the call.
        store_factory: `module:qualname` of what makes the store.
        store_file: Source file of that module, for one that cannot be imported by name.
        store_kwargs: Arguments of the factory, as text (`factory.dump_kwargs`).
        log_file: Absolute path of the rank's log file, "" for none; `{rank}` is filled in.
        pid_file: Absolute path of the rank's pid file, "" for none; `{rank}` is filled in.
        interval_s: How often stamps are looked at.
        heartbeat_interval_s: How often a lease is renewed.
        heartbeat_timeout_s: Age of a lease at which a node counts as lost.
        soft_timeout_s: Age of a stamp at which a restart is asked for.
        hard_timeout_s: Age of a stamp at which the process is killed.
        barrier_timeout_s: How long ranks wait for each other.
        last_call_wait_s: How long faults are collected after the first one.
        termination_grace_s: From SIGTERM to SIGKILL.
    """

    prefix: str
    store_factory: str
    store_file: str = ""
    store_kwargs: str = "{}"
    log_file: str = ""
    pid_file: str = ""
    interval_s: float = 1.0
    heartbeat_interval_s: float = 1.0
    heartbeat_timeout_s: float = 30.0
    soft_timeout_s: float = 60.0
    hard_timeout_s: float = 90.0
    barrier_timeout_s: float = 120.0
    last_call_wait_s: float = 1.0
    termination_grace_s: float = 5.0
