# SPDX-License-Identifier: Apache-2.0
"""The messages between launcher, monitor and rank. Every worker loads this, so it imports little.

A rank sends what happens once in a session; what happens in every step is in its slot.
The launcher's end of the socketpair closing is the monitor's order to sweep and leave, unless the
configuration says `orphan_workers=keep`: then it leaves only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from nvidia_resiliency_ext.shared_utils.wire import MessageSet


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Launcher to monitor, first of all: everything it needs to begin."""

    config: dict[str, Any]
    socket_paths: list[str]
    # Without it the monitor stands alone: it sweeps nothing, removes no directory, obeys signals.
    run_id: str = ""
    run_dir: str = ""
    record_dir: str = ""
    cycle: int = 0
    host: str = ""
    local_ranks: list[int] = field(default_factory=list)  # Of each socket; 0, 1, ... when empty.
    is_restarter_logger: bool = False
    save_word: int = 0  # What slots hold for `should_checkpoint` from the beginning.


@dataclass(frozen=True, slots=True)
class CycleChanged:
    """Launcher to monitor: reports belong to this cycle now. Sent back, as a sign of life."""

    cycle: int


@dataclass(frozen=True, slots=True)
class WorkersChanged:
    """Launcher to monitor: the workers, for the sweep and for hangs."""

    cycle: int
    pgids: list[int]  # Process groups by local rank.
    error_files: list[str] = field(default_factory=list)  # Where each writes why it failed.
    left: list[int] = field(default_factory=list)  # Local ranks that left with exit code 0.
    world_size: int = 0
    rank_offset: int = 0  # The global rank of local rank 0.

    @property
    def are_all(self) -> bool:
        """Whether the job has no ranks on other nodes."""
        return not self.pgids or self.world_size <= len(self.pgids)


@dataclass(frozen=True, slots=True)
class Examine:
    """Launcher to monitor: look at all ranks, for a hang on another node; see `RankStates`."""


@dataclass(frozen=True, slots=True)
class EndRanks:
    """Launcher to monitor: the nodes have compared; these local ranks are to blame, others not."""

    local_ranks: list[int]


@dataclass(frozen=True, slots=True)
class LeaseHeld:
    """Launcher to monitor: kill the workers at `until` (monotonic s) if no newer one has come.

    The launcher stops them before that, unless it is stopped or stuck.
    """

    until: float


@dataclass(frozen=True, slots=True)
class Save:
    """Launcher to monitor: the word for `should_checkpoint` of all ranks. Sent back once stored."""

    word: int


@dataclass(frozen=True, slots=True)
class Leave:
    """Launcher to monitor: sweep whatever `orphan_workers` says, remove the run directory, exit."""


@dataclass(frozen=True, slots=True)
class Ready:
    """Monitor to launcher: sockets listen; the slots' descriptors come with it, in order."""


@dataclass(frozen=True, slots=True)
class FirstStep:
    """Monitor to launcher: the rank's first heartbeat or first finished step (monotonic s)."""

    local_rank: int
    t: float


@dataclass(frozen=True, slots=True)
class RankJoined:
    """Monitor to launcher: a rank opened its session."""

    local_rank: int
    rank: int
    pid: int


@dataclass(frozen=True, slots=True)
class RankLeft:
    """Monitor to launcher: a session ended, with the last iteration known."""

    local_rank: int
    iteration: int | None


@dataclass(frozen=True, slots=True)
class HangFound:
    """Monitor to launcher, before the kill: one hang of this node's ranks, and whom to blame.

    `Inquiry._report` makes it. `finding` says it in a sentence, `culprits`, `candidates` and
    `waiting` are global ranks, `confidence` is that of `hang_culprit.Confidence`, `is_elsewhere`
    says that all ranks here wait for one of another host. `ended` are the local ranks that the
    monitor is about to end, `ranks` what `plain_states` returns.

    `trigger`, a global rank, broke `rule`, with section, since (monotonic s), elapsed, limit,
    iteration and late_s. The remaining keys speak of the first culprit, or of `trigger` where there
    is none; its stacks and error_file are paths or None, `time` is wall clock.

    With `is_held` the job has ranks on other nodes: nobody is ended until `EndRanks` comes, or
    `inquiry.HOLD_S` have passed; then the report comes again without it.
    """

    report: dict[str, Any]


@dataclass(frozen=True, slots=True)
class RankStates:
    """Monitor to launcher, in answer to `Examine`: `ranks` as in `HangFound`."""

    ranks: list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class RankUnkillable:
    """Monitor to launcher: the process survived SIGKILL (it is in an uninterruptible call)."""

    local_rank: int
    state: str
    wchan: str


@dataclass(frozen=True, slots=True)
class SlotReplaced:
    """Monitor to launcher: a rank handed its slot back to this new monitor; descriptor attached."""

    local_rank: int


@dataclass(frozen=True, slots=True)
class LogLine:
    """Monitor to launcher: a line for the launcher's log (it owns the handlers)."""

    level: int
    text: str


LAUNCHER_MESSAGES = MessageSet(
    Start, CycleChanged, WorkersChanged, Examine, EndRanks, LeaseHeld, Save, Leave, Ready,
    FirstStep, RankJoined, RankLeft, HangFound, RankStates, RankUnkillable, SlotReplaced, LogLine,
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """Rank to monitor: opens the session; a slot's descriptor comes with it after a reconnect."""

    rank: int
    pid: int  # Counts only where the kernel cannot tell it (another pid namespace).
    num_warmup_iters: int | None = None
    dump_signal: int = 0
    hands_back_slot: bool = False


@dataclass(frozen=True, slots=True)
class Accepted:
    """Monitor to rank: the session is open; slot and dump pipe are attached, in this order."""

    session_id: int
    config: dict[str, Any]
    sections: list[str]


@dataclass(frozen=True, slots=True)
class Refused:
    """Monitor to rank: no session, and why."""

    reason: str


@dataclass(frozen=True, slots=True)
class SetTimeouts:
    """Rank to monitor: keys of the configuration that change for this rank; answered."""

    request: int
    config: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Ask:
    """Rank to monitor: look at my slot now; answered."""

    request: int  # 0: no answer is waited for, at a session's first section, heartbeat or step.


@dataclass(frozen=True, slots=True)
class HeldForSave:
    """Rank to monitor: waits in `should_checkpoint`; answered when it is agreed where to save."""

    request: int


@dataclass(frozen=True, slots=True)
class Answer:
    """Monitor to rank: the request was carried out, or why not."""

    request: int
    problem: str | None = None


RANK_MESSAGES = MessageSet(Hello, Accepted, Refused, SetTimeouts, Ask, HeldForSave, Answer)
