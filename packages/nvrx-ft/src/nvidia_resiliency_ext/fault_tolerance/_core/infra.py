# SPDX-License-Identifier: Apache-2.0
"""This node in the cluster: infrastructure rank, replacement group, hardware, short node lists."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Final

from nvidia_resiliency_ext.fault_tolerance import _env
from nvidia_resiliency_ext.shared_utils.rank_sets import format_hosts, format_runs

_BOOLS: Final = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}


def parse_bool_env(var_name: str) -> bool:
    """Return the variable `var_name`: 1/true/yes or 0/false/no in any case; unset is False.

    Raises:
        ValueError: The variable has another value.
    """
    text = os.environ.get(var_name)
    if text is None:
        return False
    try:
        return _BOOLS[text.strip().lower()]
    except KeyError:
        raise ValueError(f"{var_name}={text!r} is neither 1/true/yes nor 0/false/no") from None


def is_slurm_job_array() -> bool:
    """Return whether this process belongs to a Slurm job array."""
    return _env.SLURM_ARRAY_TASK_ID in os.environ


_DRIVER_LIBRARY = "libnvidia-ml.so.1"


def has_gpu_driver() -> bool:
    """Return whether the NVIDIA driver's library can be loaded; may block with its file system."""
    import ctypes

    try:
        ctypes.CDLL(_DRIVER_LIBRARY)
    except OSError:
        return False
    return True


def has_adapters(sysfs_root: str = "/sys") -> bool:
    """Return whether the kernel knows a network card for InfiniBand or RoCE."""
    try:
        return bool(os.listdir(f"{sysfs_root}/class/infiniband"))
    except OSError:
        return False


# Commas, but not those within brackets.
_BETWEEN_HOSTS: Final = re.compile(r",(?![^\[]*\])")
_BRACKETS: Final = re.compile(r"\[([^\[\]]*)\]")
_RANGE: Final = re.compile(r"(\d+)(?:-(\d+))?")
_MOST_NODES: Final = 100_000


def hostnames_to_slurm_nodelist(hostnames: Iterable[str]) -> str:
    """Return `hostnames` as Slurm writes them, such as `node[001-004,007]`, each name once."""
    return format_hosts(list(hostnames))


def expand_nodelist(text: str) -> list[str]:
    """Return the names that Slurm shortened: `r[1-2]n[01,04]` is r1n01, r1n04 ... or ValueError."""
    names: list[str] = []
    for part in _BETWEEN_HOSTS.split(text):
        texts, heads = _BRACKETS.split(part.strip()), [""]
        for index, piece in enumerate(texts):
            tails = _numbers(piece) if index % 2 else [piece]
            heads = [head + tail for head in heads for tail in tails]
            if len(names) + len(heads) > _MOST_NODES:
                raise ValueError(f"{text[:80]!r} has over {_MOST_NODES} nodes")
        names += [name for name in heads if name]
    if any("[" in name or "]" in name for name in names):
        raise ValueError(f"{text[:80]!r} is no list of nodes")
    return names


def _numbers(text: str) -> list[str]:
    found: list[str] = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part)
        if match is None:
            raise ValueError(f"{part[:80]!r} is no number and no range of numbers")
        first, last = match[1], match[2] or match[1]
        if int(last) - int(first) > _MOST_NODES:
            raise ValueError(f"{part[:80]!r} is a range of over {_MOST_NODES}")
        found += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return found


def short_host(name: str) -> str:
    """Return the first part of a host's name; an address in numbers stays whole."""
    is_address = ":" in name or not name.strip("0123456789.")
    return name if is_address else name.partition(".")[0]


def compact_nodes(addrs: Iterable[str]) -> str:
    """Return addresses in short form, for people: `node[001-004].cluster,10.0.0.[1-3]`."""
    names_by_domain: dict[str, list[str]] = {}
    for addr in addrs:
        name = short_host(addr)
        names_by_domain.setdefault(addr.removeprefix(name), []).append(name)
    parts: list[str] = []
    for domain, names in sorted(names_by_domain.items()):
        parts += [part + domain for part in _BETWEEN_HOSTS.split(format_hosts(names)) if part]
    return ",".join(parts)


def slurm_sort_addrs(addrs: Iterable[str]) -> list[str]:
    """Return `addrs` sorted with their numbers counted as numbers: `n2` before `n10`."""
    return sorted(addrs, key=_natural_key)


def ranks_to_range_str(ranks: Iterable[int]) -> str:
    """Return `ranks` in the given order with runs shortened: 0, 1, 2, 6 -> `0-2,6`."""
    return format_runs(ranks)


def _natural_key(text: str) -> list[tuple[int, int | str]]:
    parts = (part for part in re.split(r"(\d+)", text) if part)
    return [(0, int(part)) if part.isdecimal() else (1, part) for part in parts]


_Environment = Mapping[str, str]

_NODES_PER_BLOCK_UNKNOWN: Final = 10**10


def get_infrastructure_rank(skip_nodename_logic: bool = False) -> int:
    """Return this node's infrastructure rank, or -1 outside any known scheduler.

    `skip_nodename_logic` leaves out the rules that use the node's name or topology address.

    Raises:
        ValueError: a variable has an unusable value.
        RuntimeError: a variable that Slurm should have set is missing.
    """
    return infrastructure_rank(os.environ, skip_nodename_logic=skip_nodename_logic)


def infrastructure_rank(environ: _Environment, *, skip_nodename_logic: bool = False) -> int:
    """Return the infrastructure rank that follows from `environ`; see `get_infrastructure_rank`."""
    for rank_of in _RULES:
        if skip_nodename_logic and rank_of in _BY_TOPOLOGY:
            continue
        rank = rank_of(environ)
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

    It follows from the node's place in the job where that is known, else from its name.

    Raises:
        ValueError: `num_aggregators` is negative.
    """
    if num_aggregators == 0:
        return 0
    if num_aggregators < 0:
        raise ValueError(f"the number of log servers must be at least 1, not {num_aggregators}")
    for rank_of in (_array_rank, _slurm_rank):
        rank = rank_of(os.environ)
        if rank is not None:
            return rank % num_aggregators
    import hashlib

    digest = hashlib.md5(os.uname().nodename.encode(), usedforsecurity=False).hexdigest()
    return int(digest, 16) % num_aggregators


def nodes_per_array_task(environ: _Environment) -> int:
    """Return the nodes of each task of this array. Raises ValueError, or RuntimeError for none."""
    for name in (_env.SLURM_NNODES, _env.SLURM_JOB_NUM_NODES):
        nodes = _optional_int(environ, name)
        if nodes is not None:
            return nodes
    raise RuntimeError(
        "in a Slurm job array the nodes per task are needed, but neither SLURM_NNODES nor"
        " SLURM_JOB_NUM_NODES is set"
    )


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


def _topology_rank(environ: _Environment) -> int | None:
    address = environ.get(_env.SLURM_TOPOLOGY_ADDR)
    pattern = environ.get(_env.SLURM_TOPOLOGY_ADDR_PATTERN, "").lower()
    if not address or pattern != "block.node":
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


def _optional_int(environ: _Environment, name: str) -> int | None:
    text = environ.get(name)
    if not text:
        return None
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name}={text!r} is not a whole number") from None


def _slurm_rank(environ: _Environment) -> int | None:
    return _optional_int(environ, _env.SLURM_PROCID)


_RULES: Final[tuple[Callable[[_Environment], int | None], ...]] = (
    _node_name_rank,
    partial(_optional_int, name=_env.CROSS_SLURM_PROCID),
    _topology_rank,
    _array_rank,
    _slurm_rank,
    partial(_optional_int, name=_env.GROUP_RANK),
)
_BY_TOPOLOGY: Final = (_node_name_rank, _topology_rank)


def _digits(text: str) -> int | None:
    digits = "".join(character for character in text if character in "0123456789")
    return int(digits) if digits else None


def replacement_group_id(environ: Mapping[str, str]) -> str | None:
    """Return the group of this node: the user's name for it, else the number of the array task."""
    for name in (_env.REPLACEMENT_GROUP_ID, _env.SLURM_ARRAY_TASK_ID):
        group = environ.get(name, "").strip()
        if group:
            return group
    return None


def default_replacement_group_size(environ: Mapping[str, str]) -> int | None:
    """Return the nodes of each array task, or None outside an array; raises as above."""
    if not environ.get(_env.SLURM_ARRAY_TASK_ID):
        return None
    nodes = nodes_per_array_task(environ)
    if nodes < 1:
        raise ValueError(f"a Slurm array task has at least one node, not {nodes} (SLURM_NNODES)")
    return nodes
