# SPDX-License-Identifier: Apache-2.0
"""Short text for lists of nodes and ranks in the order that a job uses them."""

from collections.abc import Iterable

__all__ = ["hostnames_to_slurm_nodelist", "ranks_to_range_str", "slurm_sort_addrs"]


def hostnames_to_slurm_nodelist(hostnames: Iterable[str]) -> str:
    """Return host names as Slurm writes them, such as `node[001-004,007]`."""
    from nvidia_resiliency_ext.shared_utils.rank_sets import format_hosts

    return format_hosts(list(hostnames))


def slurm_sort_addrs(addrs: Iterable[str]) -> list[str]:
    """Return addresses sorted with their numbers counted as numbers: `n2` before `n10`."""
    return sorted(addrs, key=_natural_key)


def ranks_to_range_str(ranks: Iterable[int]) -> str:
    """Return ranks in the given order with runs shortened: 0, 1, 2, 6 -> `0-2,6`."""
    from nvidia_resiliency_ext.shared_utils.rank_sets import format_runs

    return format_runs(ranks)


def _natural_key(text: str) -> list[tuple[int, int | str]]:
    key: list[tuple[int, int | str]] = []
    part = ""
    for character in text:
        if part and character.isdecimal() != part[-1].isdecimal():
            key.append(_key_part(part))
            part = ""
        part += character
    if part:
        key.append(_key_part(part))
    return key


def _key_part(part: str) -> tuple[int, int | str]:
    return (0, int(part)) if part.isdecimal() else (1, part)
