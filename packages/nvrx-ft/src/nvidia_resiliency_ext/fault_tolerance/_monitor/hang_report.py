# SPDX-License-Identifier: Apache-2.0
"""What is learned of a hung process before it is killed, and the words that report it."""

from __future__ import annotations

import dataclasses
import logging
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nvidia_resiliency_ext.shared_utils import procfs
from nvidia_resiliency_ext.shared_utils.hang_culprit import RankState
from nvidia_resiliency_ext.shared_utils.rank_activity import Activity, Kernel

from .slot import SlotView

logger = logging.getLogger("nvrx")

_MAX_SAME_NAME = 1000
_CANNOT_ANSWER = frozenset("TtDZX?")


@dataclass(slots=True, eq=False)
class Evidence:
    """Evidence about a process of a hanging job; `before` is the first look at its slot."""

    kernel: Kernel
    before: SlotView
    stacks: bytearray = field(default_factory=bytearray)
    signalled_at: float | None = None
    rss_bytes: int | None = None
    stacks_path: str | None = None


def can_dump(pid: int, kernel: Kernel, dump_signal: int) -> bool:
    is_able = dump_signal > 0 and kernel.state not in _CANNOT_ANSWER
    return is_able and procfs.catches_signal(pid, dump_signal)


def save_evidence(
    directory: str, name: str, pid: int, kernel: Kernel, stacks: bytes
) -> tuple[int | None, str | None]:
    """Write evidence to a new file; return resident bytes and the path, None for what is unknown.

    May block for long, on a dead file system or a stuck process: only for a `WorkerThread`.
    """
    memory = procfs.memory(pid)
    rss_bytes = None if memory is None else memory.rss
    text = (
        f"pid {pid} state {kernel.state} wchan {kernel.wchan or '-'} rss_bytes {rss_bytes}\n"
        f"{'' if stacks else 'no stacks: the process is stopped or did not answer'}\n"
    )
    try:
        return rss_bytes, _write_new(directory, name, text.encode() + stacks)
    except OSError as exc:
        logger.warning("cannot write evidence into %s: %s", directory, exc)
        return rss_bytes, None


def _write_new(directory: str, name: str, data: bytes) -> str | None:
    if not directory:
        return None
    for attempt in range(_MAX_SAME_NAME):
        suffix = f".{attempt}" if attempt else ""
        path = f"{directory}/{name}{suffix}.txt"
        try:
            with open(path, "xb", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
                file.write(data)
        except FileExistsError:
            continue
        return path
    return None


_RULES = {
    "initial_heartbeat": "sent no first heartbeat",
    "heartbeat": "sent no heartbeat",
    "section": "was in section {section!r}",
    "out_of_section": "was outside all sections",
}
MAX_RANKS = 16
_NOT_OF_STATE = frozenset({"activity", "progress", "stacks"})
HEALTH_RULES = frozenset({"gpu_health", "nic_health"})  # Broken through no fault of the rank.


def plain_states(
    states: Sequence[RankState], stacks: Mapping[int, str | None]
) -> list[dict[str, Any]]:
    """Convert the states of ranks to JSON values, with the path of each rank's stacks or None."""
    return [
        {
            **dataclasses.asdict(state),
            "activity": state.activity.value,
            "stacks": stacks.get(state.rank),
        }
        for state in states
    ]


def states_of(plain: Sequence[Mapping[str, Any]]) -> tuple[RankState, ...]:
    """Rebuild the states of ranks from the values of `plain_states`, without their stacks."""
    return tuple(
        RankState(
            **{name: value for name, value in rank.items() if name not in _NOT_OF_STATE},
            activity=Activity(rank["activity"]),
            progress=None if rank["progress"] is None else tuple(rank["progress"]),
        )
        for rank in plain
    )


def found_in_words(report: Mapping[str, Any]) -> str:
    """Describe the culprit of a hang and the broken limit, or why an unfit rank was ended."""
    if report["rule"] in HEALTH_RULES:
        return f"rank {report['rank']} on host {report['host']} was ended: {report['reason']}"
    return f"{report['finding']} ({limit_in_words(report)})"


def limit_in_words(report: Mapping[str, Any]) -> str:
    rule = _RULES[report["rule"]].format(section=report["section"])
    limit = f"{rule} for {report['elapsed']:.2f} s, limit {report['limit']:.2f} s"
    return f"rank {report['trigger']} {limit}"


def describe(report: Mapping[str, Any]) -> str:
    iteration = "" if report["iteration"] is None else f", iteration {report['iteration']}"
    stacks = report["stacks"] or "none"
    return (
        f"{found_in_words(report)}; cycle {report['cycle']}{iteration}; ending rank"
        f" {report['rank']} (pid {report['pid']}, state {report['state']}, wchan"
        f" {report['wchan'] or '-'}, stacks: {stacks}) with"
        f" {signal.Signals(report['signal']).name}"
    )


def cause_kind(report: Mapping[str, Any]) -> str:
    if report["rule"] in HEALTH_RULES:
        return "unhealthy"
    if report["error_file"]:
        return "exception"
    return "hang_heartbeat" if "heartbeat" in report["rule"] else "hang_section"


def describe_evidence(report: Mapping[str, Any], is_kept: Callable[[str], bool]) -> str:
    """Describe the activity of each rank, a line each; name only stacks that `is_kept`."""
    lines = [
        f"rank {r['rank']} {r['words']}"
        + (f", stacks: {r['stacks']}" if r["stacks"] and is_kept(r["stacks"]) else "")
        for r in report["ranks"][:MAX_RANKS]
    ]
    more = len(report["ranks"]) - MAX_RANKS
    return "\n".join([*lines, f"and {more} more"] if more > 0 else lines)
