# SPDX-License-Identifier: Apache-2.0
"""How the ranks of a report find each other in the job's store, and who of them is missing.

Everything here is called in the thread of reports: a store may hang with the rank that serves it.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import hashlib
import json
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from nvidia_resiliency_ext.attribution.straggler import dist_utils
from nvidia_resiliency_ext.attribution.straggler._errors import OptionsDifferError
from nvidia_resiliency_ext.shared_utils.console import plain
from nvidia_resiliency_ext.shared_utils.rank_sets import format_ranks

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.distributed_c10d import Store

_GROUP_TIMEOUT_S = 1800.0
_LONGEST_LIST = 200
_NAME_DIGITS = 32
_LONGEST_REASON = 300
_LOST_CONNECTION = ("closed by peer", "reset by peer", "Connection reset", "Broken pipe")


class Peers:
    """The ranks that report together.

    Args:
        group: Their process group, which is used itself if it takes CPU tensors; None: all ranks.
            Otherwise `join` makes a gloo group of these ranks. That one is the detector's own, so
            that reports neither wait for nor disturb the training's collectives.
        name: The group's, by `name_members`: torch may give one name to groups of other ranks.
        number: Which detector of this group it is in this world, the same on all ranks.
        options: Options that must be the same on all ranks, by name.
        timeout_s: How long a report waits for a rank.

    Attributes:
        group: Their process group, None before `join`.
    """

    def __init__(
        self,
        group: ProcessGroup | None,
        name: str,
        number: int,
        options: Mapping[str, str],
        timeout_s: float,
    ) -> None:
        self.group: Any = None
        is_usable = group is not None and dist_utils.get_device_for_backend(group).type == "cpu"
        self._given = group if is_usable else None
        self._rank = dist_utils.get_rank(group)
        self._size = dist_utils.get_world_size(group)
        self._job_store = dist.distributed_c10d._get_default_store()  # noqa: SLF001 - no other way
        self._prefix = f"nvrx-straggler/{name}/{number}"
        self._options = dict(options)
        self._timeout = dt.timedelta(seconds=max(_GROUP_TIMEOUT_S, timeout_s))
        self._store: Any = None
        self._stage = ""

    def join(self, wait: Callable[[Callable[[], bool]], None]) -> None:
        """Wait until all ranks are here, and connect them.

        Args:
            wait: Waits until its argument returns True.

        Raises:
            OptionsDifferError: Ranks have different options; it is raised on all of them.
            RuntimeError: The store or a rank is gone.
        """
        store: Store = PrefixStore(self._prefix, _own_connection(self._job_store))
        self._store = store
        own = {"rank": str(self._rank), **self._options}
        first = _read_options(store.compare_set("options", "", json.dumps(own)))
        for name, value in self._options.items():
            if first.get(name) != value:
                other = f"rank {first.get('rank')} {first.get(name)}"
                ranks = f"rank {self._rank} has {value}, {other}"
                store.set("difference", f"{name}: {ranks}")
        if store.add("joined", 1) == self._size:
            store.set("complete", "1")
        wait(lambda: bool(store.check(["complete"])))
        if store.check(["difference"]):
            difference = store.get("difference").decode("utf-8", "replace")
            raise OptionsDifferError(f"ranks were given different options, {difference}")
        self.group = self._given or dist.ProcessGroupGloo(
            PrefixStore("gloo", store), self._rank, self._size, self._timeout
        )

    def leave(self) -> None:
        """Close the connections to the other ranks; nothing may be running in the group."""
        self.group = self._store = None

    def announce(self, stage: str) -> None:
        """Tell the other ranks that this one waits for them."""
        self._stage = stage
        with contextlib.suppress(RuntimeError):  # who is missing is then not known
            self._store.set(self._key(self._rank), "1")

    def withdraw(self) -> None:
        """Take back what `announce` has told, if anything."""
        if self._stage:
            with contextlib.suppress(RuntimeError):
                self._store.delete_key(self._key(self._rank))
        self._stage = ""

    def absent(self) -> str:
        """Return the beginning of a sentence about the ranks that have not announced themselves."""
        try:
            ranks = self._absent(list(range(self._size)))
        except RuntimeError:
            return "other ranks have (and the job's store does not tell which)"
        if not ranks:
            return "other ranks have"
        names = format_ranks(ranks)
        return f"rank {names} has" if len(ranks) == 1 else f"ranks {names[:_LONGEST_LIST]} have"

    def _absent(self, ranks: list[int]) -> list[int]:
        if self._store.check([self._key(rank) for rank in ranks]):
            return []
        if len(ranks) == 1:
            return ranks
        half = len(ranks) // 2
        return self._absent(ranks[:half]) + self._absent(ranks[half:])

    def _key(self, rank: int) -> str:
        return f"{self._stage}/{rank}"


def name_members(group: ProcessGroup | None) -> str:
    """Return a name that only groups of the same ranks have; an empty one of all ranks."""
    if group is None:
        return ""
    ranks = ",".join(map(str, sorted(dist.get_process_group_ranks(group))))
    return hashlib.sha256(ranks.encode()).hexdigest()[:_NAME_DIGITS]


def reason_of(error: BaseException) -> str:
    """Return in one line why a collective has failed."""
    text = plain(" ".join(str(error).split()))  # a store's clients may have written parts of it
    if any(sign in text for sign in _LOST_CONNECTION):
        return "the connection to another rank is lost, which has ended or was killed"
    if "Timed out" in text:
        return "another rank has not gone on for too long"
    # Such as "[/src/tcp/pair.cc:538] ..."
    return re.sub(r"^\[\S+:\d+\] ", "", text)[:_LONGEST_REASON] or type(error).__name__


def _read_options(data: bytes) -> dict[str, object]:
    """Return the options of the rank that was first; any client of the store may have written them.

    Raises:
        OptionsDifferError: They are none.
    """
    try:
        options = json.loads(data)
    except (ValueError, RecursionError):
        options = None
    if not isinstance(options, dict):
        raise OptionsDifferError(
            "what the job's store holds for the first rank's options was not written by a rank"
        )
    return options


def _own_connection(store: Store) -> Store:
    """Return a store that does not wait for what the training asks of its own connection."""
    try:
        clone: Store = store.clone()  # type: ignore[attr-defined]
    except (AttributeError, NotImplementedError):  # a torch that cannot
        return store
    return clone
