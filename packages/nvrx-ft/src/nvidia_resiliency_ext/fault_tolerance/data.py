# SPDX-License-Identifier: Apache-2.0
"""The plain data that a rank, its monitor and the launcher exchange; not its transport.

Nothing here does I/O. The encoding is in `_core/messages.py`, the sockets are in `ipc_connector`.
"""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from . import _env
from ._env import FT_LAUNCHER_IPC_SOCKET as FT_LAUNCHER_IPC_SOCKET_ENV_VAR
from ._env import FT_RANK_MONITOR_IPC_SOCKET as FT_RANK_MONITOR_IPC_SOCKET_ENV_VAR

__all__ = [
    "FT_LAUNCHER_IPC_SOCKET_ENV_VAR", "FT_RANK_MONITOR_IPC_SOCKET_ENV_VAR", "AuthkeyMsg",
    "ErrorMsg", "HeartbeatMsg", "HeartbeatTimeouts", "InitMsg", "OkMsg", "RankInfo",
    "SectionAction", "SectionMsg", "SectionTimeouts", "UpdateConfigMsg", "WorkloadAction",
    "WorkloadControlRequest",
]  # fmt: skip


def get_rank() -> int:
    """Return this process's global rank: the process group's, else `RANK`'s.

    Raises:
        RuntimeError: neither knows a rank.
    """
    # torch is asked only when the program has already imported it.
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank())
    rank = os.environ.get(_env.RANK, "")
    try:
        return int(rank)
    except ValueError:
        raise RuntimeError(
            "the global rank is unknown: torch.distributed is not initialised and the environment"
            f" variable RANK is {rank!r}; start the program with ft_launcher or set RANK"
        ) from None


@dataclass
class RankInfo:
    """A rank in the job (`global_rank`) and on its node (`local_rank`), its `host` and `pid`."""

    global_rank: int
    local_rank: int
    host: str
    pid: int

    @staticmethod
    def get_for_current_rank() -> "RankInfo":
        """Describe this process; RuntimeError: the global rank is unknown."""
        return RankInfo(
            global_rank=get_rank(),
            local_rank=int(os.environ.get(_env.LOCAL_RANK, "-1")),
            host=os.uname().nodename.split(".", 1)[0],
            pid=os.getpid(),
        )


@dataclass
class HeartbeatTimeouts:
    """Timeouts in seconds for the first heartbeat and between two heartbeats; None = no limit.

    Args:
        initial: Seconds from a rank's connection to its first heartbeat.
        subsequent: Seconds between two heartbeats.
        were_calculated: Whether both were calculated from measured times; None: unknown.

    Example:
        >>> timeouts = HeartbeatTimeouts(initial=600.0, subsequent=180.0)
    """

    initial: float | None = None
    subsequent: float | None = None
    were_calculated: bool | None = None

    @property
    def are_valid(self) -> bool:
        """Whether both limits are set."""
        return self.initial is not None and self.subsequent is not None


@dataclass
class SectionTimeouts:
    """Timeouts in seconds for each section and outside all sections; None = no limit.

    Args:
        section: Seconds for each section by name.
        out_of_section: Seconds outside all sections.
        calculated_sections: Sections whose timeout was calculated from measured times.
        is_out_of_section_calculated: Whether `out_of_section` was calculated.
    """

    section: Mapping[str, float | None] = field(default_factory=dict)
    out_of_section: float | None = None
    calculated_sections: set[str] = field(default_factory=set)
    is_out_of_section_calculated: bool = False

    def __post_init__(self) -> None:
        """Accept the list that JSON makes of a set."""
        self.calculated_sections = set(self.calculated_sections)

    @property
    def were_calculated(self) -> bool:
        """Whether every timeout was calculated from measured times."""
        return self.is_out_of_section_calculated and self.calculated_sections.issuperset(
            self.section
        )

    @property
    def are_valid(self) -> bool:
        """Whether all timeouts are set."""
        return self.out_of_section is not None and None not in self.section.values()


class SectionAction(Enum):
    """What happened to a section."""

    OPEN = 1
    CLOSE = 2
    CLOSE_ALL = 3


class WorkloadAction(Enum):
    """Requests that a rank may send to its launcher."""

    Continue = 0
    ExcludeThisNode = 1
    ShutdownWorkload = 2


@dataclass
class WorkloadControlRequest:
    """A rank's request to its launcher, handled at the node's next rendezvous.

    `action` is `ExcludeThisNode` or `ShutdownWorkload`, `description` the reason, for the log.
    """

    action: WorkloadAction
    description: str = "<not set>"


@dataclass
class AuthkeyMsg:
    """The first message of a session. `authkey` is not used: the peer's uid is checked."""

    authkey: str | None = None


@dataclass
class InitMsg:
    """First message of a rank, `rank_info`, to its monitor.

    It begins at `iteration`; `num_warmup_iters` iterations have the timeout of section `warmup`.
    """

    rank_info: RankInfo | None = None
    iteration: int | None = None
    num_warmup_iters: int | None = None


@dataclass
class HeartbeatMsg:
    """The global `rank` is alive; `state` is accepted for compatibility and not used."""

    rank: int
    state: Any = None


@dataclass
class SectionMsg:
    """The global `rank` opened or closed a section, at its `iteration`, if known.

    `section` is its name, None with the `action` CLOSE_ALL.
    """

    rank: int
    section: str | None
    action: SectionAction
    iteration: int | None = None


@dataclass
class UpdateConfigMsg:
    """New `hb_timeouts` and `section_timeouts` from a rank, or the launcher's `current_cycle`.

    None = unchanged.
    """

    hb_timeouts: HeartbeatTimeouts | None = None
    section_timeouts: SectionTimeouts | None = None
    current_cycle: int | None = None


class OkMsg:
    """A request was accepted; `attrs` of the answer, for example `cfg`, become attributes."""

    def __init__(self, /, **attrs: Any) -> None:
        self.__dict__.update(attrs)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"this answer carries no {name!r}, only {sorted(self.__dict__)}")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OkMsg) and self.__dict__ == other.__dict__

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        attributes = ", ".join(f"{name}={value!r}" for name, value in self.__dict__.items())
        return f"OkMsg({attributes})"


@dataclass
class ErrorMsg:
    """A request was refused; `cause` is the reason."""

    cause: str = "<not set>"
