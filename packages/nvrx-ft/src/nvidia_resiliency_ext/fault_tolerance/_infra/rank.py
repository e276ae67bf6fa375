# SPDX-License-Identifier: Apache-2.0
"""The infrastructure rank: the place of a node in the cluster, by which ranks are ordered.

Pure: every rule reads a mapping of environment variables. The rules are tried in the order of
`_RULES` and the first that applies decides.
"""

import os
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from nvidia_resiliency_ext.fault_tolerance import _env

__all__ = [
    "get_infrastructure_rank",
    "get_log_aggregator_shard_index",
    "infrastructure_rank",
    "log_aggregator_shard_index",
    "nodes_per_array_task",
]

_Environment = Mapping[str, str]

_NODES_PER_BLOCK_UNKNOWN: Final = 10**10


class _Rule(NamedTuple):
    rank: Callable[[_Environment], int | None]
    by_topology: bool = False


def get_infrastructure_rank(skip_nodename_logic: bool = False) -> int:
    """Return this node's infrastructure rank, or -1 outside any known scheduler.

    Args:
        skip_nodename_logic: leave out the rules that use the node's name or topology address.

    Raises:
        ValueError: a variable has an unusable value.
        RuntimeError: a variable that Slurm should have set is missing.
    """
    return infrastructure_rank(os.environ, skip_nodename_logic=skip_nodename_logic)


def infrastructure_rank(environ: _Environment, *, skip_nodename_logic: bool = False) -> int:
    """Return the infrastructure rank that follows from `environ`; see `get_infrastructure_rank`."""
    for rule in _RULES:
        if not (skip_nodename_logic and rule.by_topology):
            rank = rule.rank(environ)
            if rank is not None:
                return rank
    if environ.get(_env.SLURM_JOB_ID):
        raise RuntimeError(
            "running under Slurm (SLURM_JOB_ID is set), but none of SLURM_PROCID, GROUP_RANK and"
            " CROSS_SLURM_PROCID is: start the launcher with srun, one task per node"
        )
    return -1


def get_log_aggregator_shard_index(num_aggregators: int) -> int:
    """Return which of `num_aggregators` first-level log servers this node sends to; 0 of none.

    Raises:
        ValueError: `num_aggregators` is negative.
    """
    if num_aggregators == 0:
        return 0
    return log_aggregator_shard_index(num_aggregators, os.environ, os.uname().nodename)


def log_aggregator_shard_index(num_shards: int, environ: _Environment, hostname: str) -> int:
    """Return the log server for a node: by its place in the job where known, else by its name."""
    if num_shards < 1:
        raise ValueError(f"the number of log servers must be at least 1, not {num_shards}")
    for rank_of in (_array_rank, _slurm_rank):
        rank = rank_of(environ)
        if rank is not None:
            return rank % num_shards
    import hashlib

    digest = hashlib.md5(hostname.encode(), usedforsecurity=False).hexdigest()
    return int(digest, 16) % num_shards


def nodes_per_array_task(environ: _Environment) -> int:
    """Return how many nodes each task of this Slurm job array has.

    Raises:
        ValueError: The number is no whole number.
        RuntimeError: Slurm does not tell it.
    """
    nodes = _optional_int(environ, _env.SLURM_NNODES)
    if nodes is None:
        nodes = _optional_int(environ, _env.SLURM_JOB_NUM_NODES)
    if nodes is None:
        raise RuntimeError(
            "in a Slurm job array the nodes per task are needed, but neither SLURM_NNODES nor"
            " SLURM_JOB_NUM_NODES is set"
        )
    return nodes


def _node_name_rank(environ: _Environment) -> int | None:
    if not environ.get(_env.INFRA_RANK_FROM_NODENAME):
        return None
    name = environ.get(_env.SLURMD_NODENAME, "")
    number = _digits(name)
    if number is None:
        raise ValueError(
            f"NVRX_INFRA_RANK_FROM_NODENAME is set, but SLURMD_NODENAME={name!r} has no digits"
        )
    return number


def _cross_slurm_rank(environ: _Environment) -> int | None:
    return _optional_int(environ, _env.CROSS_SLURM_PROCID)


def _pattern(environ: _Environment) -> str:
    return environ.get(_env.SLURM_TOPOLOGY_ADDR_PATTERN, "").lower()


def _topology_rank(environ: _Environment) -> int | None:
    address = environ.get(_env.SLURM_TOPOLOGY_ADDR)
    if not address or _pattern(environ) != "block.node":
        return None
    parts = [_digits(part) for part in address.split(".")]
    if len(parts) != 2 or parts[0] is None or parts[1] is None:  # noqa: PLR2004 - block and node
        raise ValueError(
            f"SLURM_TOPOLOGY_ADDR={address!r} does not fit its pattern block.node:"
            " two parts with a number each are needed"
        )
    block, node = parts[0], parts[1]
    nodes_per_block = _optional_int(environ, _env.SLURM_TOPOLOGY_NODES_PER_BLOCK)
    if nodes_per_block is None:
        nodes_per_block = _NODES_PER_BLOCK_UNKNOWN
    if node >= nodes_per_block:
        raise ValueError(
            f"node number {node} of SLURM_TOPOLOGY_ADDR={address!r} must be below the"
            f" {nodes_per_block} nodes per block (SLURM_TOPOLOGY_NODES_PER_BLOCK)"
        )
    return block * nodes_per_block + node


def _array_rank(environ: _Environment) -> int | None:
    task = _optional_int(environ, _env.SLURM_ARRAY_TASK_ID)
    process = _optional_int(environ, _env.SLURM_PROCID)
    if task is None or process is None:
        return None
    return task * nodes_per_array_task(environ) + process


def _slurm_rank(environ: _Environment) -> int | None:
    return _optional_int(environ, _env.SLURM_PROCID)


def _group_rank(environ: _Environment) -> int | None:
    return _optional_int(environ, _env.GROUP_RANK)


_RULES: Final = (
    _Rule(_node_name_rank, by_topology=True),
    _Rule(_cross_slurm_rank),
    _Rule(_topology_rank, by_topology=True),
    _Rule(_array_rank),
    _Rule(_slurm_rank),
    _Rule(_group_rank),
)


def _digits(text: str) -> int | None:
    digits = "".join(character for character in text if character in "0123456789")
    return int(digits) if digits else None


def _optional_int(environ: _Environment, name: str) -> int | None:
    text = environ.get(name)
    if not text:
        return None
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name}={text!r} is not a whole number") from None
