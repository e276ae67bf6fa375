# SPDX-License-Identifier: Apache-2.0
"""Sets of ranks and hosts in the short form that people and Slurm use: `0-3,6`, `node[001-004]`."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["format_hosts", "format_ranks", "format_runs", "parse_ranks"]

_MOST_RANKS = 1 << 20
_DIGITS = "0123456789"


def format_ranks(ranks: Iterable[int]) -> str:
    """Return `ranks` as sorted ranges, each rank once.

    Raises:
        ValueError: A rank is negative.

    Example:
        >>> format_ranks([6, 0, 1, 2, 3])
        '0-3,6'
    """
    numbers = sorted(set(ranks))
    if numbers and numbers[0] < 0:
        raise ValueError(f"a rank is never negative, not even {numbers[0]}")
    return format_runs(numbers)


def format_runs(numbers: Iterable[int], width: int = 0) -> str:
    """Return `numbers` in order, each of `width` digits or more, runs shortened: `4-6,0,2`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ",".join("-".join(f"{end:0{width}d}" for end in ends) for ends in runs)


def parse_ranks(text: str) -> list[int]:
    """Return the sorted ranks of a `text` such as `0-3,6`; the empty text is the empty set.

    Raises:
        ValueError: It has another form, a range runs backwards, or it names over a million ranks.
    """
    ranks: set[int] = set()
    for part in text.split(",") if text.strip() else ():
        first_text, dash, last_text = part.strip().partition("-")
        first = _parse_rank(first_text, text)
        last = _parse_rank(last_text, text) if dash else first
        if last < first:
            raise ValueError(f"the range {part.strip()!r} runs backwards")
        if last - first >= _MOST_RANKS or len(ranks) + last - first >= _MOST_RANKS:
            raise ValueError(f"more than {_MOST_RANKS} ranks in one set")
        ranks.update(range(first, last + 1))
    return sorted(ranks)


def format_hosts(hosts: Iterable[str]) -> str:
    """Return `hosts` as Slurm ranges, each name once: `node[001-004,007],login1`.

    Names with one prefix and one width of a zero-padded number at the end form a range; sorted.
    """
    numbered: dict[str, list[str]] = {}
    for host in sorted(set(hosts)):
        prefix = host.rstrip(_DIGITS)
        numbered.setdefault(prefix, []).append(host[len(prefix) :])
    groups: list[str] = []
    for prefix, texts in numbered.items():
        padded_widths = {len(text) for text in texts if len(text) > 1 and text[0] == "0"}
        by_width: dict[int, list[int]] = {}
        for text in texts:
            if text:
                # 10 belongs to 08 and 09 where those exist, else to 8 and 9.
                width = len(text) if len(text) in padded_widths else 0
                by_width.setdefault(width, []).append(int(text))
            else:
                groups.append(prefix)
        for width, numbers in sorted(by_width.items()):
            ranges = format_runs(sorted(numbers), width)
            groups.append(f"{prefix}[{ranges}]" if len(numbers) > 1 else f"{prefix}{ranges}")
    return ",".join(groups)


def _parse_rank(text: str, whole: str) -> int:
    stripped = text.strip()
    if not stripped or len(stripped) > len(str(_MOST_RANKS)) + 3 or stripped.strip(_DIGITS):
        raise ValueError(f"{whole[:200]!r} is no set of ranks such as '0-3,6'")
    return int(stripped)
