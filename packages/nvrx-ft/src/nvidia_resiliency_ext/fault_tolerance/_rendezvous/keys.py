# SPDX-License-Identifier: Apache-2.0
"""Names of the job's keys in the store."""

from __future__ import annotations

HEAD = "head"
BELL = "bell"
# Who decides the rounds, where several could: the first one that names itself here.
HOST = "host"
# What the first launcher was started with, and what the control plane was, where there is one.
SETTINGS = "settings"
CONTROL_SETTINGS = "control-settings"
# What the log servers ask for: a token, or that a file has it, or that there are none.
LOG_TOKEN = "log-token"  # noqa: S105 - the name of a key
# Nobody sets it: to wait for it is to wait.
NEVER = "never"


_PREFIX = "ft_rendezvous_barrier:"


def prefix(run_id: str) -> str:
    """Return what stands before all keys of a job."""
    return f"{_PREFIX}{run_id}:"


def run_id(prefix: str) -> str:
    """Return the job whose keys these are."""
    return prefix.removeprefix(_PREFIX).removesuffix(":")


def log(seq: int) -> str:
    """Return the key of one decision."""
    return f"log/{seq}"


def inbox(round_: int) -> str:
    """Return the key of the notes to the host in a round."""
    return f"inbox/{round_}"


def arrivals(round_: int) -> str:
    """Return the counter of nodes that arrived in a round."""
    return f"arrivals/{round_}"


def successes(round_: int) -> str:
    """Return the counter of nodes whose workers all succeeded in a round."""
    return f"successes/{round_}"


def place(node: str) -> str:
    """Return the key of a node's part in the last closed round."""
    return f"place/{node}"


def lease(node: str) -> str:
    """Return the counter that a living node raises."""
    return f"lease/{node}"
