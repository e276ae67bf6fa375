# SPDX-License-Identifier: Apache-2.0
"""Short text for lists of nodes and ranks in the order that a job uses them."""

import re
from collections.abc import Iterable
from typing import Final

__all__ = [
    "compact_nodes",
    "hostnames_to_slurm_nodelist",
    "ranks_to_range_str",
    "slurm_sort_addrs",
]

# Commas, but not those within brackets.
_BETWEEN_HOSTS: Final = re.compile(r",(?![^\[]*\])")


def hostnames_to_slurm_nodelist(hostnames: Iterable[str]) -> str:
    """Return host names as Slurm writes them, such as `node[001-004,007]`."""
    from nvidia_resiliency_ext.shared_utils.rank_sets import format_hosts

    return format_hosts(list(hostnames))


def compact_nodes(addrs: Iterable[str]) -> str:
    """Return addresses of any kind in short form, for people: `node[001-004].cluster,10.0.0.[1-3]`.

    Names with one domain are shortened together, although their numbers are not at the end.
    """
    from nvidia_resiliency_ext.shared_utils.rank_sets import format_hosts

    names_by_domain: dict[str, list[str]] = {}
    for addr in addrs:
        name, dot, domain = addr.partition(".")
        if _is_ip_address(addr):
            name, dot, domain = addr, "", ""
        names_by_domain.setdefault(dot + domain, []).append(name)
    parts: list[str] = []
    for domain, names in sorted(names_by_domain.items()):
        parts += [part + domain for part in _BETWEEN_HOSTS.split(format_hosts(names)) if part]
    return ",".join(parts)


def slurm_sort_addrs(addrs: Iterable[str]) -> list[str]:
    """Return addresses sorted with their numbers counted as numbers: `n2` before `n10`."""
    return sorted(addrs, key=_natural_key)


def ranks_to_range_str(ranks: Iterable[int]) -> str:
    """Return ranks in the given order with runs shortened: 0, 1, 2, 6 -> `0-2,6`."""
    from nvidia_resiliency_ext.shared_utils.rank_sets import format_runs

    return format_runs(ranks)


def _is_ip_address(addr: str) -> bool:
    return ":" in addr or not addr.strip("0123456789.")


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
