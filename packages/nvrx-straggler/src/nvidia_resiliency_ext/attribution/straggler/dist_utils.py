# SPDX-License-Identifier: Apache-2.0
"""Calls of `torch.distributed` that also work in a single process, without a process group.

`group=None` is the default group. If torch.distributed is not initialised, the only rank is 0.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = [
    "all_gather_object",
    "all_gather_rows",
    "all_reduce",
    "broadcast_from_rank0",
    "gather_on_rank0",
    "get_device_for_backend",
    "get_global_rank",
    "get_rank",
    "get_world_size",
    "is_all_true",
]


waiting: ContextVar[Callable[[Any], object]] = ContextVar("waiting", default=lambda _work: None)
"""How this thread waits for a collective before it takes the result."""


def get_world_size(group: ProcessGroup | None = None) -> int:
    """Return the number of ranks in the group, 1 without torch.distributed.

    Args:
        group: The group; None: the default group.
    """
    if not _is_initialized():
        return 1
    # Also of a group that torch.distributed does not know.
    return dist.get_world_size() if group is None else getattr(group, "size", lambda: -1)()


def get_rank(group: ProcessGroup | None = None) -> int:
    """Return this process's rank in the group, 0 without torch.distributed.

    Args:
        group: The group; None: the default group.
    """
    if not _is_initialized():
        return 0
    return dist.get_rank() if group is None else getattr(group, "rank", lambda: -1)()


def get_global_rank(group: ProcessGroup | None, group_rank: int) -> int:
    """Return the rank in the job of a rank of a group.

    Args:
        group: The group; None: the default group, whose ranks are those of the job.
        group_rank: The rank in the group.
    """
    return group_rank if group is None else dist.get_global_rank(group, group_rank)


def get_device_for_backend(group: ProcessGroup | None = None) -> torch.device:
    """Return a device whose tensors the group's collectives accept: the CPU if possible.

    Args:
        group: The group; None: the default group.
    """
    if not _is_initialized() or isinstance(group, dist.ProcessGroupGloo):
        return torch.device("cpu")
    # Such as "cpu:gloo,cuda:nccl", however the backend was named.
    kinds = [part.partition(":")[0] for part in dist.get_backend_config(group).split(",")]
    return torch.device("cpu" if "cpu" in kinds else kinds[0])


def all_reduce(
    tensor: torch.Tensor,
    op: Any = dist.ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Any:
    """Reduce a tensor over all ranks, in place; does nothing for one rank.

    Args:
        tensor: Overwritten with the result.
        op: The reduction, a sum by default.
        group: The group; None: the default group.
        async_op: Return a handle to wait for instead of waiting. Default False.

    Returns:
        The return value of torch's `all_reduce`; None for one rank.

    Example:
        >>> total = torch.tensor([2.0])
        >>> all_reduce(total)
        >>> get_world_size(), total
        (1, tensor([2.]))
    """
    if get_world_size(group) == 1:
        return None
    options = dist.AllreduceOptions()
    options.reduceOp = op
    work = _of(group).allreduce([tensor], options)
    return work if async_op else _finish(work)


def all_gather_object(obj: object, group: ProcessGroup | None = None) -> list[Any]:
    """Return the objects of all ranks, by rank.

    Kept for programs that call it: it pickles, and nothing in this package uses it.

    Args:
        obj: This rank's object; it is pickled.
        group: The group; None: the default group.
    """
    world_size = get_world_size(group)
    if world_size == 1:
        return [obj]
    gathered: list[Any] = [None] * world_size
    dist.all_gather_object(gathered, obj, group=group)
    return gathered


def gather_on_rank0(
    tensor: torch.Tensor, group: ProcessGroup | None = None
) -> list[torch.Tensor] | None:
    """Return the tensors of all ranks on rank 0, by rank, and None elsewhere.

    Tensors have the same shape on all ranks; the results lie on the device of `tensor`.

    Args:
        tensor: This rank's tensor.
        group: The group, whose rank 0 gets them; None: the default group.
    """
    world_size = get_world_size(group)
    if world_size == 1:
        return [tensor]
    device = get_device_for_backend(group)
    payload = tensor.to(device)
    is_first = get_rank(group) == 0
    gathered = list(payload.new_empty((world_size, *payload.shape)).unbind(0)) if is_first else []
    options = dist.GatherOptions()
    options.rootRank = 0
    _finish(_of(group).gather([gathered] if is_first else [], [payload], options))
    return [item.to(tensor.device) for item in gathered] if is_first else None


def all_gather_rows(row: torch.Tensor, group: ProcessGroup | None = None) -> torch.Tensor:
    """Return one tensor with the one-dimensional tensors of all ranks, in the order of ranks.

    Args:
        row: This rank's tensor, of the same length on all ranks.
        group: The group; None: the default group.
    """
    world_size = get_world_size(group)
    if world_size == 1:
        return row
    gathered = torch.empty(world_size * len(row), dtype=row.dtype, device=row.device)
    _finish(_of(group)._allgather_base(gathered, row))  # noqa: SLF001 - dist renames it
    return gathered


def broadcast_from_rank0(tensor: torch.Tensor, group: ProcessGroup | None = None) -> None:
    """Overwrite a tensor with that of rank 0; does nothing for one rank.

    Args:
        tensor: Of the same shape on all ranks.
        group: The group, whose rank 0 it is; None: the default group.
    """
    if get_world_size(group) == 1:
        return
    options = dist.BroadcastOptions()
    options.rootRank = 0
    _finish(_of(group).broadcast([tensor], options))


def is_all_true(flag: bool, group: ProcessGroup | None = None) -> bool:
    """Tell on every rank whether a flag is true on all of them.

    Args:
        flag: This rank's flag.
        group: The group; None: the default group.
    """
    tensor = torch.tensor([1 if flag else 0], device=get_device_for_backend(group))
    all_reduce(tensor, op=dist.ReduceOp.MIN, group=group)
    return bool(tensor.item())


def _of(group: ProcessGroup | None) -> Any:
    """Return the group; its methods, unlike functions of `dist`, take one that torch has not."""
    return dist.group.WORLD if group is None else group


def _finish(work: Any) -> None:
    waiting.get()(work)
    work.wait()


def _is_initialized() -> bool:
    return dist.is_available() and dist.is_initialized()
