# SPDX-License-Identifier: Apache-2.0
"""The job's keys in the store, the identity of a launcher, and the age limits of its lease."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

_TEXT: Final = re.compile(r"(.{1,255})_([0-9]{1,10})_([0-9]{1,10})")


class NodeIdentity(NamedTuple):
    """Which launcher, ordered by address, then process, then number."""

    addr: str
    pid: int
    number: int

    def __str__(self) -> str:
        return f"{self.addr}_{self.pid}_{self.number}"

    @classmethod
    def parse(cls, text: str) -> NodeIdentity:
        """Return the identity in a text; the address may contain underscores. Raises ValueError."""
        match = _TEXT.fullmatch(text)
        if match is None or not text.isprintable():
            raise ValueError(f"{text[:300]!r} is no identity such as 'node001_4242_0'")
        addr, pid, number = match.groups()
        return cls(addr, int(pid), int(number))


HEAD = "head"
NOTIFY = "notify"
HOST = "host"  # Who decides the rounds, where several could: the first that names itself here.
# What the first launcher was started with, and what the control plane was, where there is one.
SETTINGS = "settings"
CONTROL_SETTINGS = "control-settings"
# What the log servers ask for: a token, or that a file has it, or that there are none.
LOG_TOKEN = "log-token"  # noqa: S105 - the name of a key


_PREFIX = "ft_rendezvous_barrier:"


def prefix(run_id: str) -> str:
    return f"{_PREFIX}{run_id}:"


def run_id(prefix: str) -> str:
    return prefix.removeprefix(_PREFIX).removesuffix(":")


# One decision.
log: Final = "log/{}".format
# Of a round: messages to the host, the counter of nodes that arrived, and that of nodes whose
# workers all succeeded.
messages: Final = "messages/{}".format
arrivals: Final = "arrivals/{}".format
successes: Final = "successes/{}".format
# Of a node: its part in the last closed round, and the counter that it raises while it lives.
assignment: Final = "assignment/{}".format
lease: Final = "lease/{}".format

LEASES_IN_DOUBT = 1.5  # A living node's lease is never older than this.
LEASES_TO_FENCE = 2.0  # A node that cannot renew it stops its workers then, before peers act.
FENCE_STOP_LEASES = 0.5  # So long have its workers between SIGTERM and SIGKILL.
LEASES_TO_KILL = 2.6  # The rank monitor kills them then, if their launcher is stopped or stuck.
LEASES_TO_EXPIRY = 3.0  # The host counts the node as lost then, and the node itself gives up.
