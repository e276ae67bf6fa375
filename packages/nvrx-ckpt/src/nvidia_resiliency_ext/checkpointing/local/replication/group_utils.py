# SPDX-License-Identifier: Apache-2.0
"""Exchange tensors and states within groups of ranks, by a plan of transfers.

The bytes of tensors are moved as they lie in memory, so a copy has the same bits as its original,
whatever the dtype. Everything else about a state travels as a pickled skeleton, inside the job's
own process groups only.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, Union

import torch
import torch.distributed as dist

from nvidia_resiliency_ext.checkpointing.local._pickling import (
    join_state,
    runs_no_code,
    split_state,
)
from nvidia_resiliency_ext.checkpointing.local.base_state_dict import TensorAwareStateDict
from nvidia_resiliency_ext.checkpointing.local.replication.torch_device_utils import (
    get_default_device_from_type,
)

__all__ = [
    "ExchangePlan",
    "ExchangePlanEntry",
    "GroupWrapper",
    "ProcessGroupLike",
    "batched",
    "parse_group_sequence",
]

T = TypeVar("T")

SKELETON_LIMIT_BYTES = 256 << 20
_CHUNK_BYTES = 64 << 20


def batched(iterable: Iterable[T], n: int) -> Iterator[tuple[T, ...]]:
    """Yield tuples of items; the last may be shorter.

    Args:
        iterable: Where the items come from.
        n: Items in a tuple, 1 or more.

    Raises:
        ValueError: `n` is less than 1.

    Example:
        >>> list(batched("ABCDE", 2))
        [('A', 'B'), ('C', 'D'), ('E',)]
    """
    if n < 1:
        raise ValueError(f"n is {n}; it must be 1 or more")
    iterator = iter(iterable)
    while batch := tuple(itertools.islice(iterator, n)):
        yield batch


def parse_group_sequence(
    replication_jump: int, replication_factor: int, world_size: int, *, strict: bool = True
) -> list[tuple[int, ...]]:
    """Return the groups of ranks that keep copies of each other.

    Args:
        replication_jump: Distance between the ranks of a group, such as the ranks of one node.
        replication_factor: Ranks per group.
        world_size: Number of ranks.
        strict: Insist on a world that divides into such groups. Otherwise blocks of
            `replication_jump * replication_factor` ranks are taken from the start; the rest forms
            groups in the same way with fewer members, and what is then alone joins the last group.
            Default True.

    Raises:
        AssertionError: A number is not positive, or, when strict, the world does not divide.

    Example:
        >>> parse_group_sequence(2, 2, 8)
        [(0, 2), (1, 3), (4, 6), (5, 7)]
        >>> parse_group_sequence(2, 2, 7, strict=False)
        [(0, 2), (1, 3), (4, 5, 6)]
    """
    for name, value in (("jump", replication_jump), ("factor", replication_factor)):
        if value <= 0:
            raise AssertionError(f"replication {name} is {value}; it must be positive")
    block = replication_jump * replication_factor
    rest = world_size % block
    if strict and rest:
        raise AssertionError(
            f"{world_size} ranks do not divide into blocks of {replication_jump} * "
            f"{replication_factor} ranks"
        )
    groups = [
        tuple(range(start + offset, start + block, replication_jump))
        for start in range(0, world_size - rest, block)
        for offset in range(replication_jump)
    ]
    return sorted(groups + _groups_of_rest(world_size - rest, world_size, replication_jump, groups))


def _groups_of_rest(
    start: int, end: int, jump: int, groups: list[tuple[int, ...]]
) -> list[tuple[int, ...]]:
    """Return groups for the ranks that fill no block; `groups` gives its last away if need be."""
    if start == end:
        return []
    # As far apart as `jump` where there are ranks enough for two per group, else neighbours.
    distance = min(jump, (end - start) // 2) or 1
    found = [tuple(range(start + k, end, distance)) for k in range(distance)]
    if len(found[0]) == 1 and groups:
        return [groups.pop() + found[0]]
    return found


@dataclass(frozen=True)
class ExchangePlanEntry:
    """Describe one transfer of a state.

    Args:
        sender: Global rank that has the state.
        receiver: Global rank that gets it.
        id_: The id of the state.
    """

    sender: int
    receiver: int
    id_: Any


@dataclass
class ExchangePlan:
    """Transfers of states between ranks; the same plan on all ranks of a group.

    Args:
        group: The group whose ranks take part.
    """

    group: GroupWrapper
    _entries: list[ExchangePlanEntry] = field(default_factory=list)

    def plan(self, *, sender: int, receiver: int, id_: Any) -> None:
        """Add one transfer.

        Args:
            sender: Global rank that has the state.
            receiver: Global rank that gets it; it may be the sender.
            id_: The id of the state.
        """
        self._entries.append(ExchangePlanEntry(sender=sender, receiver=receiver, id_=id_))

    @property
    def entries(self) -> tuple[ExchangePlanEntry, ...]:
        """Return the transfers in the order in which they were added."""
        return tuple(self._entries)

    def required_ids(self, rank: int | None = None) -> set[Any]:
        """Return the ids of the states that a rank must supply.

        Args:
            rank: The global rank; None: this process's.
        """
        rank = self.group.my_global_rank if rank is None else rank
        return {entry.id_ for entry in self._entries if entry.sender == rank}


class GroupWrapper:
    """A process group with its ranks, and transfers of objects, tensors and states in it.

    Args:
        group: The process group; None for all ranks.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group if group is not None else dist.group.WORLD

    @staticmethod
    def wrap(group: ProcessGroupLike) -> GroupWrapper:
        """Return a wrapper of a process group, or the wrapper that was given.

        Raises:
            ValueError: It is neither.
        """
        if isinstance(group, GroupWrapper):
            return group
        if isinstance(group, dist.ProcessGroup):
            return GroupWrapper(group)
        raise ValueError(f"expected a process group or a GroupWrapper, got {type(group).__name__}")

    @staticmethod
    def from_list_of_groups(list_of_groups: Sequence[ProcessGroupLike | int]) -> GroupWrapper:
        """Return the group of a list to which this rank belongs.

        Args:
            list_of_groups: Groups as `torch.distributed.new_group` returns them, numbers for groups
                without this rank among them.

        Raises:
            AssertionError: This rank belongs to none of them, or to several.
        """
        # `new_group` returns a number where this rank is no member.
        wrapped = [GroupWrapper.wrap(g) for g in list_of_groups if not isinstance(g, int)]
        mine = [group for group in wrapped if group.my_group_rank >= 0]
        if len(mine) != 1:
            raise AssertionError(f"this rank is in {len(mine)} of the groups; it must be in one")
        return mine[0]

    @property
    def group(self) -> dist.ProcessGroup:
        """Return the process group."""
        assert self._group is not None
        return self._group

    @property
    def backend(self) -> str:
        """Return the name of the group's backend."""
        return str(dist.get_backend(self.group))

    @property
    def supported_devices(self) -> list[torch.device]:
        """Return types of devices whose tensors the group moves, of those that there are."""
        # torch prints it as "cpu:gloo,cuda:nccl".
        config = str(dist.get_backend_config(self.group))
        types = [part.split(":")[0] for part in config.split(",") if ":" in part]
        there = {"cpu", "cuda"} if torch.cuda.is_available() else {"cpu"}
        return [torch.device(name) for name in types if name in there]

    def get_device(self, wanted_device: torch.device | str | None = None) -> torch.device:
        """Return a device whose tensors the group's collectives accept.

        Args:
            wanted_device: The device to return if the group accepts it; None: "cpu".
        """
        types = [device.type for device in self.supported_devices]
        wanted = torch.device("cpu" if wanted_device is None else wanted_device).type
        if wanted in types:
            return get_default_device_from_type(wanted)
        return get_default_device_from_type("cpu" if "cpu" in types else "cuda")

    def get_group_rank(self, global_rank: int | None = None) -> int:
        """Return the group rank of a global rank; -1 if it is no member.

        Args:
            global_rank: The global rank; None: this process's.
        """
        if global_rank is None:
            return self.my_group_rank
        return dist.get_group_rank(self.group, global_rank)

    @property
    def my_group_rank(self) -> int:
        """Return this process's rank in the group; -1 when it is no member."""
        return dist.get_rank(self.group)

    def get_global_rank(self, group_rank: int | None = None) -> int:
        """Return the global rank of a rank of the group.

        Args:
            group_rank: The rank in the group; None: this process's.
        """
        if group_rank is None:
            return self.my_global_rank
        return dist.get_global_rank(self.group, group_rank)

    @property
    def my_global_rank(self) -> int:
        """Return this process's rank among all."""
        return dist.get_rank()

    @property
    def ranks(self) -> list[int]:
        """Return the global ranks of the members, in the order of the group."""
        return dist.get_process_group_ranks(self.group)

    @property
    def world_size(self) -> int:
        """Return the number of members."""
        return self.group.size()

    def __repr__(self) -> str:
        return f"GroupWrapper(ranks={self.ranks})"

    def all_gather_object(self, my_obj: T) -> list[T]:
        """Return the objects of all members, in the order of the group; they are pickled.

        Args:
            my_obj: This rank's object.
        """
        found: list[Any] = [None] * self.world_size
        dist.all_gather_object(found, my_obj, group=self.group)
        return found

    def broadcast(self, tensor: torch.Tensor, src: int, **kwargs: Any) -> Any:
        """Call `torch.distributed.broadcast` with this group.

        Args:
            tensor: What `src` sends; overwritten on all other ranks.
            src: Global rank of the sender.
            kwargs: Further arguments of torch's function, such as `async_op`.
        """
        return dist.broadcast(tensor, src, self.group, **kwargs)

    def all_gather_batch(
        self, my_tensors: Sequence[torch.Tensor], target_device: torch.device | str | None = None
    ) -> list[list[torch.Tensor]]:
        """Return the tensors of all members, in the order of the group.

        Args:
            my_tensors: Any number of tensors of any shape, dtype and layout; none is fine.
            target_device: Where the result shall be; by default the CPU.
        """
        device = torch.device("cpu" if target_device is None else target_device)
        parts = split_state([tensor.detach() for tensor in my_tensors])
        lengths = [storage.nbytes for storage in parts.storages]
        about = self.all_gather_object((parts.skeleton, lengths))
        found: list[list[torch.Tensor]] = []
        for member, (skeleton, sizes) in enumerate(about):
            mine = member == self.my_group_rank
            storages = parts.storages if mine else _empty_storages(sizes)
            for storage in storages:
                self._broadcast_bytes(storage, src=self.get_global_rank(member))
            if mine:
                found.append([tensor.detach().to(device) for tensor in my_tensors])
                continue
            # A member of this job made it, in its own process group.
            tensors = join_state(skeleton, storages, any_name=True)
            found.append([tensor.to(device) for tensor in tensors])
        return found

    def _broadcast_bytes(self, data: torch.Tensor, src: int) -> None:
        device = self.get_device()
        for start in range(0, data.numel(), _CHUNK_BYTES):
            chunk = data[start : start + _CHUNK_BYTES]
            there = chunk.to(device)
            dist.broadcast(there, src=src, group=self.group)
            if there is not chunk:
                chunk.copy_(there)

    def send_object(self, obj: Any, dst: int) -> None:
        """Send an object, pickled, to another rank of the group.

        Args:
            obj: The object.
            dst: Global rank of the receiver.
        """
        dist.send_object_list([obj], dst=dst, group=self.group, device=self.get_device())

    def recv_object(self, src: int) -> Any:
        """Return the object that another rank of the group sends.

        Args:
            src: Global rank of the sender.
        """
        found = [None]
        dist.recv_object_list(found, src=src, group=self.group, device=self.get_device())
        return found[0]

    def isend_state_dict(self, state_dict: TensorAwareStateDict, dst: int) -> dict[str, float]:
        """Send a state to a global rank.

        Args:
            state_dict: The state; its tensors are sent in chunks, the rest pickled.
            dst: The global rank that calls `irecv_state_dict`.

        Returns:
            A dict; `data_sent` is the number of bytes of its tensors.

        Raises:
            ValueError: The state without its tensors is too large to be sent.
        """
        parts = split_state(state_dict)
        lengths = [storage.nbytes for storage in parts.storages]
        if len(parts.skeleton) > SKELETON_LIMIT_BYTES:
            raise ValueError(
                f"the state without its tensors has {len(parts.skeleton)} bytes; "
                f"{SKELETON_LIMIT_BYTES} are allowed"
            )
        self.send_object((parts.state_class, parts.skeleton, lengths), dst)
        device = self.get_device()
        for storage in parts.storages:
            for chunk in _chunks(storage):
                dist.send(chunk.to(device), dst=dst, group=self.group)
        return {"data_sent": float(sum(lengths))}

    def irecv_state_dict(self, src: int) -> tuple[TensorAwareStateDict, dict[str, float]]:
        """Receive a state from a global rank.

        Args:
            src: The global rank that calls `isend_state_dict`.

        Returns:
            The state, and a dict; `data_recv` is the number of bytes of its tensors.
        """
        state_class, skeleton, lengths = self.recv_object(src)
        storages = _empty_storages(lengths)
        device = self.get_device()
        for storage in storages:
            for chunk in _chunks(storage):
                there = chunk if device.type == "cpu" else torch.empty_like(chunk, device=device)
                dist.recv(there, src=src, group=self.group)
                if there is not chunk:
                    chunk.copy_(there)
        state = join_state(skeleton, storages, any_name=not runs_no_code(state_class))
        return state, {"data_recv": float(sum(lengths))}

    def execute_plan(
        self, exchange_plan: ExchangePlan, my_data: Mapping[Any, TensorAwareStateDict]
    ) -> dict[Any, TensorAwareStateDict]:
        """Carry out a plan; all members call this together.

        Args:
            exchange_plan: Equal on all members.
            my_data: The states that this rank must supply, by id.

        Returns:
            The states that the plan gives to this rank, by id.

        Raises:
            AssertionError: A state that this rank must supply is not there.
        """
        me = self.my_global_rank
        absent = exchange_plan.required_ids() - set(my_data)
        if absent:
            raise AssertionError(f"the plan asks rank {me} for {absent}, which were not given")
        received = {}
        for entry in exchange_plan.entries:
            if entry.sender == entry.receiver == me:
                received[entry.id_] = my_data[entry.id_]
            elif entry.sender == me:
                self.isend_state_dict(my_data[entry.id_], entry.receiver)
            elif entry.receiver == me:
                received[entry.id_], _ = self.irecv_state_dict(entry.sender)
        return received


ProcessGroupLike = Union[GroupWrapper, dist.ProcessGroup]  # noqa: UP007 - used with isinstance


def _empty_storages(lengths: Sequence[int]) -> list[torch.Tensor]:
    return [torch.empty(length, dtype=torch.uint8) for length in lengths]


def _chunks(data: torch.Tensor) -> Iterator[torch.Tensor]:
    for start in range(0, data.numel(), _CHUNK_BYTES):
        yield data[start : start + _CHUNK_BYTES]
