# SPDX-License-Identifier: Apache-2.0
"""Choose which ranks keep copies of which checkpoints."""

from __future__ import annotations

import logging
import os
import random
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist

from nvidia_resiliency_ext.checkpointing.local.base_state_dict import TensorAwareStateDict
from nvidia_resiliency_ext.checkpointing.local.replication.group_utils import (
    ExchangePlan,
    GroupWrapper,
    ProcessGroupLike,
    parse_group_sequence,
)

__all__ = [
    "CliqueReplicationStrategy",
    "LazyCliqueReplicationStrategy",
    "LazyReplicationStrategyBuilder",
    "NoReplicasAvailableError",
    "ReplicationStrategy",
]

logger = logging.getLogger(__name__)

EagerT = TypeVar("EagerT", bound="ReplicationStrategy")


class NoReplicasAvailableError(Exception):
    """A rank needs a state that no rank of the group has."""


class ReplicationStrategy(ABC):
    """Decides which ranks keep copies of a state, and which rank returns one."""

    @abstractmethod
    def replicate(
        self, local_ckpt: TensorAwareStateDict, id_: Any
    ) -> tuple[list[TensorAwareStateDict], list[Any]]:
        """Exchange states with other ranks.

        Args:
            local_ckpt: This rank's state.
            id_: Its id.

        Returns:
            The states that this rank must keep, including its own, and their ids.
        """

    @abstractmethod
    def retrieve_plan(
        self, globally_available_ids: Mapping[int, Sequence[Any]], wanted: Sequence[Any]
    ) -> ExchangePlan:
        """Return a plan of which rank sends each state to the ranks that want it.

        Args:
            globally_available_ids: For each global rank the ids that it has.
            wanted: The ids that this rank wants.

        Raises:
            NoReplicasAvailableError: Nobody has one of them.
        """

    @abstractmethod
    def retrieve_execute(self, *args: Any, **kwargs: Any) -> Any:
        """Carry out a plan.

        Args:
            args: The plan, and a dict from id to each state that this rank supplies.
            kwargs: Further arguments of the strategy.

        Returns:
            From id to each state that this rank received.
        """


class CliqueReplicationStrategy(ReplicationStrategy):
    """All ranks of a group keep each other's states.

    Args:
        local_group: The group of this rank.
        target_device: Device of received tensors. Default: the CPU.
    """

    def __init__(
        self,
        local_group: ProcessGroupLike,
        target_device: torch.device | str = "cpu",
    ) -> None:
        self.local_group = GroupWrapper.wrap(local_group)
        self.target_device = torch.device(target_device)
        self.replication_jump = _distance(self.local_group.ranks)
        self.replication_factor = len(self.local_group.ranks)

    @classmethod
    def from_replication_params(
        cls,
        replication_jump: int | None = None,
        replication_factor: int = 2,
        *,
        strict: bool = True,
    ) -> CliqueReplicationStrategy:
        """Build the groups of all ranks and return the strategy of this one.

        All ranks call this together.

        Args:
            replication_jump: Distance between the ranks that keep each other's states; it should be
                the number of ranks per node, so that copies lie on other nodes. By default the
                number of CUDA devices, else `LOCAL_WORLD_SIZE`, else 1.
            replication_factor: Number of ranks that have a state, including its owner, at least 1.
                Default 2.
            strict: Require a divisible world size; see `parse_group_sequence`. Default True.

        Raises:
            AssertionError: The world does not divide into such groups.
        """
        jump = _default_jump() if replication_jump is None else replication_jump
        sequence = parse_group_sequence(
            jump, replication_factor, dist.get_world_size(), strict=strict
        )
        _warn_of_same_host(jump, sequence)
        groups = [dist.new_group(list(ranks)) for ranks in sequence]
        return cls(GroupWrapper.from_list_of_groups(groups), target_device="cpu")

    def replicate(
        self, local_ckpt: TensorAwareStateDict, id_: Any
    ) -> tuple[list[TensorAwareStateDict], list[Any]]:
        """Return the states of all ranks of the group; `local_ckpt` is hollow afterwards.

        Args:
            local_ckpt: This rank's state.
            id_: Its id.

        Returns:
            The states of all ranks of the group, in its order, and their ids.

        Raises:
            RuntimeError: A rank cannot take its tensors out; on all ranks of the group.
        """
        tensors: Sequence[torch.Tensor] = ()
        problem = ""
        try:
            tensors = local_ckpt.pop_tensors()
        # Whatever a user's class raises: the others wait for this rank.
        except Exception as error:  # noqa: BLE001
            problem = f"rank {dist.get_rank()}: {error}"
        members: list[Any] = self.local_group.all_gather_object((
            id_, None if problem else local_ckpt, problem
        ))  # fmt: skip
        problems = [text for *_, text in members if text]
        if problems:
            raise RuntimeError("states cannot be exchanged: " + "; ".join(problems))
        batches = self.local_group.all_gather_batch(tensors, target_device=self.target_device)
        states, ids = [], []
        for (member_id, hollow, _), batch in zip(members, batches, strict=True):
            hollow.insert_tensors(batch)
            states.append(hollow)
            ids.append(member_id)
        return states, ids

    def retrieve_plan(
        self, globally_available_ids: Mapping[int, Sequence[Any]], wanted: Sequence[Any]
    ) -> ExchangePlan:
        """Return a plan that takes a rank's own copy if it has one, else a random member's.

        The choice is the same on all ranks.

        Args:
            globally_available_ids: For each global rank the ids that it has.
            wanted: The ids that this rank wants.

        Raises:
            NoReplicasAvailableError: No member has one of them.
        """
        plan = ExchangePlan(self.local_group)
        # Every rank must choose alike; nothing secret depends on the choice.
        choice = random.Random(0)  # noqa: S311
        everything = self.local_group.all_gather_object(list(wanted))
        for receiver, ids in zip(self.local_group.ranks, everything, strict=True):
            for id_ in ids:
                holders = [
                    rank
                    for rank in self.local_group.ranks
                    if id_ in globally_available_ids.get(rank, ())
                ]
                if not holders:
                    raise NoReplicasAvailableError(f"no rank of {self.local_group} has {id_}")
                sender = receiver if receiver in holders else choice.choice(holders)
                plan.plan(sender=sender, receiver=receiver, id_=id_)
        return plan

    def retrieve_execute(self, *args: Any, **kwargs: Any) -> Any:
        """Carry out a plan; see `GroupWrapper.execute_plan`.

        Args:
            args: The plan, and a dict from id to each state that this rank supplies.
            kwargs: Further arguments of `GroupWrapper.execute_plan`.

        Returns:
            From id to each state that this rank received.
        """
        return self.local_group.execute_plan(*args, **kwargs)


class LazyReplicationStrategyBuilder(ReplicationStrategy, ABC, Generic[EagerT]):
    """A strategy that is built when it is first used, when process groups exist.

    `replicate`, `retrieve_plan` and `retrieve_execute` build the strategy if need be and pass their
    arguments (`local_ckpt`, `id_`, `globally_available_ids`, `wanted`, `args`, `kwargs`) on to it.
    """

    def __init__(self) -> None:
        self._strategy: EagerT | None = None

    @property
    def replication_strategy(self) -> EagerT:
        """Return the strategy; the first call builds it, on all ranks together."""
        if self._strategy is None:
            self._strategy = self._eager_build()
        return self._strategy

    def replicate(
        self, local_ckpt: TensorAwareStateDict, id_: Any
    ) -> tuple[list[TensorAwareStateDict], list[Any]]:
        """Call `replicate` of the strategy."""
        return self.replication_strategy.replicate(local_ckpt, id_)

    def retrieve_plan(
        self, globally_available_ids: Mapping[int, Sequence[Any]], wanted: Sequence[Any]
    ) -> ExchangePlan:
        """Call `retrieve_plan` of the strategy."""
        return self.replication_strategy.retrieve_plan(globally_available_ids, wanted)

    def retrieve_execute(self, *args: Any, **kwargs: Any) -> Any:
        """Call `retrieve_execute` of the strategy."""
        return self.replication_strategy.retrieve_execute(*args, **kwargs)

    @abstractmethod
    def _eager_build(self) -> EagerT:
        """Build the strategy."""


class LazyCliqueReplicationStrategy(LazyReplicationStrategyBuilder[CliqueReplicationStrategy]):
    """`CliqueReplicationStrategy.from_replication_params`, called on first use.

    Args:
        replication_jump: Distance between ranks that keep each other's states, at least 1. Default
            None: the number of CUDA devices, else `LOCAL_WORLD_SIZE`, else 1.
        replication_factor: Number of ranks that have a state, including its owner, at least 1.
            Default 2.

    Example:
        >>> strategy = LazyCliqueReplicationStrategy(replication_jump=8, replication_factor=2)
        >>> manager = LocalCheckpointManager("/local", repl_strategy=strategy)  # doctest: +SKIP
    """

    def __init__(self, replication_jump: int | None = None, replication_factor: int = 2) -> None:
        super().__init__()
        self.replication_jump = replication_jump
        self.replication_factor = replication_factor

    def _eager_build(self) -> CliqueReplicationStrategy:
        return CliqueReplicationStrategy.from_replication_params(
            self.replication_jump, self.replication_factor
        )


def _default_jump() -> int:
    """Return the ranks per node as far as they are known; asked when groups are built."""
    if torch.cuda.is_available():
        return torch.cuda.device_count()
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _warn_of_same_host(jump: int, groups: Sequence[tuple[int, ...]]) -> None:
    local_world = int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
    on_one_node = [g for g in groups if local_world and g[0] // local_world == g[-1] // local_world]
    if on_one_node and dist.get_rank() == 0:
        logger.warning(
            "replication jump %d: all copies of the ranks %s lie on one node and are lost with it; "
            "use a jump of %d",
            jump,
            on_one_node[0],
            local_world,
        )


def _distance(ranks: Sequence[int]) -> int:
    return ranks[1] - ranks[0] if len(ranks) > 1 else 0
