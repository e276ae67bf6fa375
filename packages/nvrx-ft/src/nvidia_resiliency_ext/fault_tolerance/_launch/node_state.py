# SPDX-License-Identifier: Apache-2.0
"""Where a node stands: what `decide` keeps from one event to the next. Values only."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .cause import Cause
from .leaving import Leaving

if TYPE_CHECKING:
    from .node_events import RoundClosed

EXIT_OK = 0
EXIT_FAILURE = 1


class Phase(enum.Enum):
    """Where a node stands in the life of one cycle."""

    JOINING = "joining"
    RUNNING = "running"
    STOPPING = "stopping"
    WAITING = "waiting"
    FINISHED = "finished"


class Outcome(enum.Enum):
    """What follows once the workers are stopped."""

    RESTART = "restart"
    FAIL = "fail"
    NO_RESTART = "no_restart"
    SIGNALLED = "signalled"
    LEAVE = "leave"
    OVER = "over"
    TOLERATED = "tolerated"


class Request(enum.Enum):
    """What a rank asked the launcher to do at the next rendezvous."""

    EXCLUDE_NODE = "exclude_node"
    SHUTDOWN = "shutdown"


@dataclass(frozen=True, slots=True)
class Assignment:
    """This node's place in a round: what rendezvous decided."""

    cycle: int
    group_rank: int
    group_world_size: int
    rank_offset: int
    world_size: int
    master_addr: str
    master_port: int
    restart_ages_s: tuple[float, ...] = ()
    clock_off_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Policy:
    """The numbers a decision needs, and what this node is in the job."""

    max_restarts: int
    stop_grace_s: float
    signal_grace_s: float
    no_restart_exit_code: int
    many_nodes: bool = False
    is_store_host: bool = False
    min_healthy: bool = False
    host: str = ""

    @property
    def serves_others(self) -> bool:
        """Whether the job of other nodes ends with this launcher."""
        return self.many_nodes and self.is_store_host


@dataclass(frozen=True, slots=True)
class Node:
    """The state of this node. `running` holds the local ranks that have not exited."""

    policy: Policy
    phase: Phase = Phase.JOINING
    cycle: int = 0
    running: frozenset[int] = frozenset()
    unclean: frozenset[int] = frozenset()
    outcome: Outcome | None = None
    cause: Cause | None = None
    stop_signal: int | None = None
    requests: tuple[tuple[Request, str], ...] = ()
    group_world_size: int = 1
    over: RoundClosed | None = None
    budget: int | None = None
    leaving: Leaving | None = None

    @property
    def must_go(self) -> bool:
        """Whether this node itself was told to leave: it takes part in no further round."""
        return self.leaving is not None and self.leaving.is_own


def restarts_left(node: Node) -> int:
    """Return how many restarts the job still has; the cycle number is global to the job."""
    if node.budget is not None:
        return node.budget
    return max(0, node.policy.max_restarts - node.cycle)
