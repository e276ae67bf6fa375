# SPDX-License-Identifier: Apache-2.0
"""Short forms of sets of ranks and hosts."""

import random
import re

import pytest

from nvidia_resiliency_ext.shared_utils.rank_sets import format_hosts, format_ranks, parse_ranks


@pytest.mark.parametrize(
    ("ranks", "text"),
    [([], ""), ([5], "5"), ([0, 1, 2, 3, 6], "0-3,6"), ([3, 1, 1, 2], "1-3"), ([9, 11], "9,11")],
)
def test_format_ranks(ranks: list[int], text: str) -> None:
    """Ranks become sorted ranges with each rank once."""
    assert format_ranks(ranks) == text


def test_ranks_come_back_as_they_were() -> None:
    """Whatever set of ranks is written is read back as the same set."""
    source = random.Random(7)
    for _ in range(300):
        ranks = {source.randrange(40) for _ in range(source.randrange(30))}
        assert parse_ranks(format_ranks(ranks)) == sorted(ranks)


@pytest.mark.parametrize(
    "text",
    ["x", "1-", "-1", "3-1", "1,,2", "1-2-3", "0-99999999999", "0-1048576", "²", "1" * 5000, ","],
)
def test_parse_ranks_refuses(text: str) -> None:
    """What is no set of ranks, or an absurdly large one, is refused as a ValueError."""
    with pytest.raises(ValueError, match=r"rank|backwards"):
        parse_ranks(text)


def test_format_ranks_refuses_negative_numbers() -> None:
    """A negative rank would be written as something that reads as a range."""
    with pytest.raises(ValueError, match="negative"):
        format_ranks([0, -1])


@pytest.mark.parametrize(
    ("hosts", "text"),
    [
        ([], ""),
        (["node7"], "node7"),
        (["node001", "node002", "node003", "node004", "node007"], "node[001-004,007]"),
        (["n9", "n10", "n11"], "n[9-11]"),
        (["n08", "n09", "n10"], "n[08-10]"),
        (["n1", "n01"], "n1,n01"),
        (["login", "gpu2", "gpu1", "login"], "gpu[1-2],login"),
        (["a.example.org", "10.0.0.1", "10.0.0.2"], "10.0.0.[1-2],a.example.org"),
        (["0", "1"], "[0-1]"),
    ],
)
def test_format_hosts(hosts: list[str], text: str) -> None:
    """Hosts are grouped by prefix and by the width of zero-padded numbers."""
    assert format_hosts(hosts) == text


def test_hosts_expand_to_what_was_given() -> None:
    """Expanding the ranges as Slurm does gives exactly the hosts again."""
    source = random.Random(11)
    for _ in range(300):
        hosts = {
            source.choice(["node", "gpu-", "r1c"])
            + str(source.randrange(30)).zfill(source.choice([1, 2, 4]))
            for _ in range(source.randrange(1, 20))
        }
        assert set(_expand(format_hosts(hosts))) == hosts


def _expand(text: str) -> list[str]:
    hosts = []
    for prefix, ranges in re.findall(r"([^,\[\]]+)(?:\[([^\]]+)\])?", text):
        for part in ranges.split(",") if ranges else [""]:
            first, _, last = part.partition("-")
            numbers = range(int(first), int(last or first) + 1) if first else [None]
            hosts += [prefix + ("" if n is None else f"{n:0{len(first)}d}") for n in numbers]
    return hosts
