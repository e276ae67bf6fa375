# SPDX-License-Identifier: Apache-2.0
"""Names of the keys of a wrapped call; nothing else may spell them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class IterationKeys:
    """Keys of one iteration.

    Attributes:
        outcome: `completed`, or `interrupted;` and the records of the first who said so; set once.
        completions: List of who has completed.
        completed: How often somebody has completed.
        interruption_records: List of the records that came after the first.
        reported: How many ranks have reported, or arrived and do not go on.
        all_reported: Set, to all records, when every participant has.
        arrivals: List of who has arrived, in which form.
        arrived: How often somebody has arrived.
        decision: Who goes on; set once.
    """

    outcome: str
    completions: str
    completed: str
    interruption_records: str
    reported: str
    all_reported: str
    arrivals: str
    arrived: str
    decision: str

    def lists(self) -> tuple[str, ...]:
        """Return every key but those of the values that are set once."""
        kept = ("outcome", "decision")
        return tuple(getattr(self, name) for name in self.__slots__ if name not in kept)


def job_of(prefix: str) -> str:
    """Return the job's name out of what stands before the keys of a call; "" where it has none."""
    return "".join(prefix.split("/")[1:2])


def iteration_prefix(iteration: int) -> str:
    """Return what stands before all keys of an iteration, below those of the call."""
    return f"_inprocess_{iteration}"


def iteration_keys(prefix: str, iteration: int) -> IterationKeys:
    """Return the keys of an iteration of the call whose keys begin with `prefix`."""
    below = f"{prefix}{iteration_prefix(iteration)}/"
    return IterationKeys(*(below + name for name in IterationKeys.__slots__))


def nodes_key(prefix: str) -> str:
    """Return the key of the list of nodes."""
    return f"{prefix}nodes"


def lease_key(prefix: str, node_id: int) -> str:
    """Return the key of a node's lease, a counter."""
    return f"{prefix}lease_{node_id}"


def oldest_key(prefix: str) -> str:
    """Return the key of the oldest iteration of which outcome and decision are kept."""
    return f"{prefix}oldest"
