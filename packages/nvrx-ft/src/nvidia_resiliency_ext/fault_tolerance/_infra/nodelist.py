# SPDX-License-Identifier: Apache-2.0
"""Short text for lists of nodes and ranks in the order that a job uses them."""

import re
from collections.abc import Iterable
from typing import Final

__all__ = [
    "compact_nodes",
    "expand_nodelist",
    "hostnames_to_slurm_nodelist",
    "ranks_to_range_str",
    "slurm_sort_addrs",
]

# Commas, but not those within brackets.
_BETWEEN_HOSTS: Final = re.compile(r",(?![^\[]*\])")
_BRACKETS: Final = re.compile(r"\[([^\[\]]*)\]")
_RANGE: Final = re.compile(r"(\d+)(?:-(\d+))?")
_MOST_NODES: Final = 100_000


def hostnames_to_slurm_nodelist(hostnames: Iterable[str]) -> str:
    """Return host names as Slurm writes them, such as `node[001-004,007]`."""
    from nvidia_resiliency_ext.shared_utils.rank_sets import format_hosts

    return format_hosts(list(hostnames))


def expand_nodelist(text: str) -> list[str]:
    """Return the names that Slurm shortened: `r[1-2]n[01,04]` is r1n01, r1n04, r2n01 and r2n04.

    Raises:
        ValueError: It is no such list, or has over 100,000 names.
    """
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
    """Return the numbers of one bracket, with their leading zeros."""
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
