# SPDX-License-Identifier: Apache-2.0
"""The messages between launcher, monitor and rank; no bytes are moved here.

The launcher's end of the socketpair closing is the monitor's order to sweep and leave, unless the
configuration says `orphan_workers=keep`: then it leaves only.

A rank never sends what happens in a step (that is in its slot), only what happens once in a
session. Apart from the launcher's messages, because every worker pays for loading this.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from nvidia_resiliency_ext.shared_utils.wire import MessageSet


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Launcher to monitor, first of all: everything it needs to begin.

    `local_ranks` names the local rank of each socket (0, 1, ... when empty). Without a `run_id`
    the monitor stands alone: it sweeps nothing, removes no directory, and obeys signals.
    `save_word` is what the slots hold for `should_checkpoint` from the beginning.
    """

    config: dict[str, Any]
    socket_paths: list[str]
    run_id: str = ""
    run_dir: str = ""
    record_dir: str = ""
    cycle: int = 0
    host: str = ""
    local_ranks: list[int] = field(default_factory=list)
    is_restarter_logger: bool = False
    save_word: int = 0


@dataclass(frozen=True, slots=True)
class CycleChanged:
    """Launcher to monitor: reports belong to this cycle now. Sent back, as a sign of life."""

    cycle: int


@dataclass(frozen=True, slots=True)
class WorkersChanged:
    """Launcher to monitor: the process groups of the workers, for the sweep and for hangs.

    The rest is for finding the culprit of a hang: where each worker writes why it failed, in the
    order of `pgids`, which is that of local ranks; the local ranks that have left with exit code 0;
    the global rank of local rank 0, and the number of ranks of the job. Where that is larger than
    the number of workers here, a hang is not judged here alone: see `HangFound`.
    """

    cycle: int
    pgids: list[int]
    error_files: list[str] = field(default_factory=list)
    left: list[int] = field(default_factory=list)
    world_size: int = 0
    rank_offset: int = 0

    @property
    def are_all(self) -> bool:
        """Whether the job has no ranks on other nodes."""
        return not self.pgids or self.world_size <= len(self.pgids)


@dataclass(frozen=True, slots=True)
class Examine:
    """Launcher to monitor: look at all ranks, for a hang on another node; see `RanksSeen`."""


@dataclass(frozen=True, slots=True)
class EndRanks:
    """Launcher to monitor: the nodes have compared; these local ranks are to blame, others not."""

    local_ranks: list[int]


@dataclass(frozen=True, slots=True)
class LeaseHeld:
    """Launcher to monitor: this node may train until `until` (monotonic s) and no longer.

    The launcher stops the workers itself before that. When it is stopped or stuck, so that nothing
    newer comes, the monitor kills them: the other nodes go on without this one then.
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

    pid: int


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

    `finding` says it in a sentence, `culprits`, `candidates` and `waiting` are global ranks,
    `confidence` is that of `culprit.Confidence`, `is_elsewhere` says that all ranks here wait for
    one of another host. `ended` are the local ranks that the monitor is about to end. `ranks` has
    what each rank did: rank, host, activity, words, place, is_late, has_moved, progress, stacks.

    The remaining keys speak of the first culprit, or of the rank that broke the limit where there
    is none: rank, local_rank, pid, state, wchan, rss_bytes, stacks (path or None), error_file (path
    or None), signal, cycle, host, time (wall clock). `trigger` broke `rule`, with section, since
    (monotonic s), elapsed, limit, iteration and late_s.

    With `is_held` the job has ranks on other nodes: nobody is ended until `EndRanks` comes, or
    `inquiry.HOLD_S` have passed; then the report comes again without it.
    """

    report: dict[str, Any]


@dataclass(frozen=True, slots=True)
class RanksSeen:
    """Monitor to launcher, in answer to `Examine`: `ranks` as in `HangFound`."""

    ranks: list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class RankUnkillable:
    """Monitor to launcher: the process survived SIGKILL (it is in an uninterruptible call)."""

    local_rank: int
    rank: int
    pid: int
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
    FirstStep, RankJoined, RankLeft, HangFound, RanksSeen, RankUnkillable, SlotReplaced, LogLine,
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """Rank to monitor: opens the session; a slot's descriptor comes with it after a reconnect.

    `pid` counts only where the kernel cannot tell it (another pid namespace).
    """

    rank: int
    pid: int
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
    """Rank to monitor: look at my slot now; answered.

    Sent for each call when calls are answered, and without a wait (request 0) when a session has
    its first section, heartbeat or finished step.
    """

    request: int


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
