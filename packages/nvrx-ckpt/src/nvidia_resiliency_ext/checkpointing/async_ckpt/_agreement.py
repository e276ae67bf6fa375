# SPDX-License-Identifier: Apache-2.0
"""Exchange small values between ranks on the CPU, apart from the traffic of training."""

from __future__ import annotations

import logging
import weakref
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Sequence

logger = logging.getLogger("nvrx")

_TEXT_BYTES = 8192


class ControlGroup:
    """The ranks that agree: a gloo group over all of them, or over those of a given group.

    It is made when first needed, by a call that all ranks make, and made anew when the process
    group under it was replaced. Without torch.distributed there is one rank.

    Args:
        parent: Group whose ranks agree; None for all.
    """

    def __init__(self, parent: dist.ProcessGroup | None = None) -> None:
        # Weakly: a group that the program has destroyed must not live on here.
        self._parent_ref = None if parent is None else weakref.ref(parent)
        self._world: weakref.ref[Any] | None = None
        self._group: dist.ProcessGroup | None = None
        self._device = torch.device("cpu")

    @property
    def rank(self) -> int:
        """Global rank of this process; 0 without torch.distributed."""
        return dist.get_rank() if dist.is_initialized() else 0

    @property
    def size(self) -> int:
        """How many ranks agree."""
        return dist.get_world_size(self._parent) if dist.is_initialized() else 1

    def minimum(self, values: Sequence[int]) -> list[int]:
        """Return the smallest of each value over all ranks; all of them must call it."""
        if self.size == 1:
            return list(values)
        group = self._ready()
        tensor = torch.tensor(values, dtype=torch.int64, device=self._device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MIN, group=group)
        return [int(value) for value in tensor.tolist()]

    def all_true(self, value: bool) -> bool:
        """Return whether a value is true on all ranks; all of them must call it."""
        return bool(self.minimum([int(value)])[0])

    def gather_numbers(self, values: Sequence[int]) -> list[list[int]]:
        """Return the values of all ranks, by rank in the group; all of them must call it."""
        if self.size == 1:
            return [list(values)]
        group = self._ready()
        mine = torch.tensor(values, dtype=torch.int64, device=self._device)
        parts = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(parts, mine, group=group)
        return [[int(value) for value in part.tolist()] for part in parts]

    def gather_texts(self, text: str) -> list[str]:
        """Return a text of each rank, of a long one the last 8 KiB; all of them must call it."""
        if self.size == 1:
            return [text]
        group = self._ready()
        data = bytearray(text.encode(errors="backslashreplace")[-_TEXT_BYTES:])
        mine = torch.frombuffer(data.ljust(_TEXT_BYTES, b"\0"), dtype=torch.uint8)
        mine = mine.to(self._device)
        parts = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(parts, mine, group=group)
        found = [bytes(part.cpu().numpy()).rstrip(b"\0") for part in parts]
        return [data.decode(errors="replace") for data in found]

    def gather_problems(self, text: str) -> str:
        """Return one line with the problem of each rank; all ranks must call this."""
        texts = enumerate(self.gather_texts(text))
        return "; ".join(f"rank {rank}: {problem}" for rank, problem in texts if problem)

    @property
    def _parent(self) -> dist.ProcessGroup | None:
        if self._parent_ref is None:
            return None
        parent = self._parent_ref()
        if parent is None:
            raise RuntimeError("the process group of this control group was destroyed")
        return parent

    def _ready(self) -> dist.ProcessGroup | None:
        world = dist.group.WORLD
        if self._world is None or self._world() is not world:
            self._world = weakref.ref(world)
            self._group = self._choose()
        return self._parent if self._group is None else self._group

    def _choose(self) -> Any:
        """Return a group made beside the given one; None if that serves."""
        config = str(dist.get_backend_config(self._parent))
        if "cpu:gloo" in config or config == "gloo":
            return None
        if dist.is_gloo_available():
            ranks = None if self._parent is None else dist.get_process_group_ranks(self._parent)
            return dist.new_group(
                ranks, backend="gloo", use_local_synchronization=ranks is not None
            )
        logger.warning("torch has no gloo: saves are agreed upon over the backend of training")
        self._device = torch.device("cuda", torch.cuda.current_device())
        return None


_of_world = ControlGroup()
_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, ControlGroup] = weakref.WeakKeyDictionary()


def control_group(parent: dist.ProcessGroup | None = None) -> ControlGroup:
    """Return the control group beside a process group; the same one for the same group."""
    if parent is None or parent is dist.group.WORLD:
        return _of_world
    if parent not in _groups:
        _groups[parent] = ControlGroup(parent)
    return _groups[parent]
