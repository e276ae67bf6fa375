# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E501 - texts of logs, and patterns for them, stay on one line
"""Prefixes of log lines: strip them, and take rank, node and time from them.

A line may have several, one inside the other: `12: [rank12]:[E1120 07:51:56.123 x.cpp:632] text`.
Times are seconds since 1970 as if all clocks ran in UTC; only their order and distance count. Some
dialects have no year: they get that of the last line that had one.
"""

from __future__ import annotations

import calendar
import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = [
    "NO_YEAR",
    "Line",
    "LineReader",
    "is_launcher_line",
    "plain_text",
    "rank_in_digits",
    "without_launcher",
]

NO_YEAR = 2000
_LAYERS = 6
_MOST_RANK = 1 << 20
_RANK_DIGITS = 7
_FIRST_YEAR = 1970
_MOST_KEPT = 1 << 20  # bytes of a line whose end has not come
_LONGEST = 4096
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f]")

_ISO = r"(?P<year>\d{4})-(?P<month>\d\d)-(?P<day>\d\d)[T ](?P<hour>\d\d):(?P<minute>\d\d):(?P<second>\d\d)(?:[.,](?P<frac>\d{1,9}))?(?P<zone>Z|[+-]\d\d:?\d\d)?"
# Each strips from the start. Named groups: rank, local, node, gpu and the parts of a time.
_PREFIXES = tuple(
    (classes, re.compile(pattern))
    for classes, pattern in (
        ("[ ", r"\s*\[rank\s?(?P<rank>\d{1,7})\]:?\s?"),
        ("[ ", r"\s*\[Rank (?P<rank>\d{1,7})\]:?\s?"),
        ("0", r"\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?: ?\| ?|\s)(?=\S)"),
        # srun --label fills with spaces on the left.
        ("0 ", r" {0,6}(?P<rank>\d{1,7}): ?"),
        ("[ ", r"\s*\[default(?P<local>\d{1,3})\]:\s?"),
        # A file and its line are no node and its rank.
        (
            "[",
            (
                r"\[(?P<node>(?![\w.-]+\.(?:py|cpp|cc|cu|h|hpp|rs|go):)[A-Za-z][\w.-]{0,62}):"
                r"(?P<local>\d{1,3})\]:?\s?"
            ),
        ),
        ("[", r"\[(?:(?:rank|RANK|Rank)[ =:]|R)(?P<rank>\d{1,7})\]\s*:?\s?"),
        ("[", r"\[\d{1,9},(?P<rank>\d{1,7})\](?:<std(?:out|err)>)?:? ?"),
        (
            "[ ",
            r"\s*\[(?:(?P<low>[WI])|[EF])(?P<month>\d\d?)(?P<day>\d\d) (?P<hour>\d\d):(?P<minute>\d\d):(?P<second>\d\d)\.(?P<frac>\d{1,9})(?: \d+)? [^\]\s]{1,80}\]\s?",
        ),
        (
            "E",
            r"(?:(?P<low>[WI])|[EF])(?P<month>\d\d?)(?P<day>\d\d) (?P<hour>\d\d):(?P<minute>\d\d):(?P<second>\d\d)\.(?P<frac>\d{1,9})\s+(?:\d+\s+)?[^\]\s]{1,80}\]\s?",
        ),
        ("[ 0", r"\s*\[?" + _ISO + r"\]?:?\s?"),
        (
            "A",
            r"(?P<mon>Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)\s+(?P<day>\d{1,2}) (?P<hour>\d\d):(?P<minute>\d\d):(?P<second>\d\d) (?P<node>[A-Za-z][\w.-]{0,62}) kernel: (?:\[ *\d+\.\d+\] )?",
        ),
        ("A", r"(?P<node>[A-Za-z][\w.-]{0,62}) kernel: (?:\[ *\d+\.\d+\] )?"),
        ("A", r"kmsg (?P<node>[A-Za-z][\w.-]{0,62}) (?=NVRM)"),
        ("A", r"kernel: (?:\[ *\d+\.\d+\] )?"),
        ("A", r"(?P<node>[A-Za-z][\w.-]{0,62}):\d+:\d+ \[(?P<gpu>\d{1,3})\] (?=NCCL )"),
        (
            "[ A",
            r"\s*\[?(?:(?P<low>DEBUG|INFO|NOTICE)|ERROR|CRITICAL|FATAL)\]?\s*(?:-\s+|:\s*|\s+)(?=\S)",
        ),
        ("A", r"(?:stdout|stderr) [FP] "),
        ("A", r"(?P<node>[A-Za-z][\w.-]{0,62}) (?:\| )?r(?P<rank>\d{1,7}) \| "),
        ("[", r"\[(?P<rank>\d{1,7})\]:? (?=\d{4}-\d\d-\d\d)"),
        ("A", r"(?:[Rr](?:ank)?|worker-)0*(?P<rank>\d{1,7})(?:/\w{1,8})? ?(?:>>?|\|) ?(?=\S)"),
        ("A", r"(?P<node>[A-Za-z][\w.-]{0,62}):(?P<local>\d{1,3}) (?=\[R\d)"),
        ("A", r"(?P<node>[A-Za-z](?=[\w.-]*\d)[\w.-]{0,62}): (?=\[rank\d)"),
        ("(", r"\((?:global )?rank[= ](?P<rank>\d{1,7})\):? "),
        ("(", r"\([A-Za-z][\w.-]{0,62} pid=\d{1,9}(?:, ip=[^)]{1,60})?\) "),
        (
            "|",
            r"\|\s*(?:(?P<low>DEBUG|INFO|NOTICE)|WARNING|ERROR|CRITICAL|FATAL)\s*(?=\|)",
        ),
        ("|", r"\|\s*(?:rank (?P<rank>\d{1,7})\s*\|\s*)?(?=\S)"),
        ("<", r"<(?P<rank>\d{1,7})> (?=\S)"),
        ("[", r"\[pod/[\w.-]{1,80}(?:/[\w.-]{1,80})?\] "),
        ("[", r"\[(?:[\w-]{1,40} )?r(?P<rank>\d{1,7})\]:? "),
        ("A", r"(?P<node>[A-Za-z][\w.-]{0,62}) (?:[\w.-]{1,40} )?rank=(?P<rank>\d{1,7}):? "),
        ("A", r"(?P<node>[A-Za-z][\w.-]{0,62}) (?:[\w.-]{1,40} )?\[rank ?(?P<rank>\d{1,7})\]:? "),
        (
            "[ ",
            r"\s*\[NeMo (?:(?P<low>[DIW])|[A-Z]) "
            + _ISO
            + r" (?:rank[ =:]?(?P<rank>\d{1,7})|[^\]\s]{1,80})\]:?\s?",
        ),
        ("[", r"\[RankMonitorServer:(?P<rank>\d{1,7})(?:@(?P<node>[A-Za-z][\w.-]{0,62}))?\]\s?"),
        ("[", r"\[(?P<node>(?=[^\]]*\d)[A-Za-z][\w.-]{0,62})\]:?\s(?=\S)"),
        ("[", r"\[[a-z][\w.-]{0,62}\]\s(?=\S)"),
        ("A", r"(?:rank|Rank)[ =]?(?P<rank>\d{1,7})\s?[:|-]\s"),
        ("-", r"- (?=\S)"),
    )
)


def _kind_of(first: str) -> str:
    """Return the class of a line's first character, as the table above has them."""
    if first.isdigit():
        return "0"
    if first.isalpha():
        return "A"
    return " " if first.isspace() else first


_BY_CLASS = {
    kind: tuple(
        p for classes, p in _PREFIXES if kind in classes or (kind == "A" and "E" in classes)
    )
    for kind in "[ 0A-(<|"
}
_SLURM = re.compile(
    r"(?:srun|slurmstepd)(?:-[\w.-]+)?: error: (?P<node>[A-Za-z][\w.-]*): tasks? (?P<rank>\d{1,7}):"
)
_SLURM_NODE = re.compile(r"\b(?:ON|on) (?P<node>[A-Za-z][\w.-]*) CANCELLED AT ")
_IN_TEXT = re.compile(
    r"\[Rank (?P<rank>\d{1,7})\]|\bon rank (?P<on>\d{1,7})\b|\b(?:[Rr]ank|RANK|global_rank)[ =:]+(?P<bare>\d{1,7})\b"
)
_GLOBAL_RANK = re.compile(r"\[(?:[A-Z_]+ )?(?:PG\b[^\]]*|Global )Rank (?P<rank>\d{1,7})\]")
_JSON_TEXT = ("message", "log", "msg", "line", "text", "detail")
_JSON_TIME = ("time", "timestamp", "ts", "@timestamp", "t", "at")
_JSON_LEVEL = ("level", "severity", "levelname", "lvl", "sev")
_LEAST_SPACES = 3
_LOW_LEVELS = frozenset({"trace", "debug", "info", "inf", "notice", "warn", "warning"})
_JSON_RANK = ("rank", "global_rank", "member", "worker", "wkr")
_JSON_NODE = ("host", "node", "hostname", "node_name", "nodename")
_LAUNCHER = re.compile(r"\bnvrx\b|fault_tolerance|\[NestedRestarter\]", re.IGNORECASE)
_MONTHS = {
    name: number
    for number, name in enumerate(
        ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"], 1
    )
}


@dataclass(slots=True)
class Line:
    """One line: its text without prefixes, and what they said.

    Attributes:
        text: Without prefixes, control characters and spaces at its end.
        rank: Rank that wrote it, or None.
        local_rank: Rank on its node, or None.
        node_first_rank: Rank of the node's local rank 0, where prefixes say both; or None.
        node: Host name, or None.
        gpu: Number of a device on the node, or None.
        time_s: Seconds, or None.
        indented: The text begins with spaces.
        is_no_error: Its writer gave it a level below error.
    """

    text: str
    rank: int | None = None
    local_rank: int | None = None
    node_first_rank: int | None = None
    node: str | None = None
    gpu: str | None = None
    time_s: float | None = None
    indented: bool = False
    is_no_error: bool = False


class LineReader:
    """Read lines; it keeps the year for dialects that have none."""

    def __init__(self) -> None:
        self.year = NO_YEAR

    def read(self, raw: bytes) -> Line:
        """Return the parts of one line."""
        text = raw[:_LONGEST].decode("utf-8", "replace")
        line = Line("")
        if text.startswith("{"):
            text = self._from_json(text, line)
        text = plain_text(text)
        for _ in range(_LAYERS):
            for prefix in _BY_CLASS.get(_kind_of(text[:1]), ()):
                match = prefix.match(text)
                if match is not None and match.end():
                    break
            else:
                break
            self._take(match, line)
            text = text[match.end() :]
        found = _SLURM.match(text) or _SLURM_NODE.search(text)
        if found is not None:
            self._take(found, line)
        line.indented = text[:1] in (" ", "\t")
        line.is_no_error |= text.lstrip("[ ").startswith("WARN")
        line.text = text.strip()
        if line.rank is None:
            line.rank = _rank_in(line.text)
        elif line.local_rank is not None:
            line.node_first_rank = line.rank - line.local_rank
        return line

    def _take(self, match: re.Match[str], line: Line) -> None:
        parts = match.groupdict()
        if parts.get("rank") is not None and line.rank is None:
            line.rank = rank_in_digits(parts["rank"])
        if parts.get("local") is not None:
            line.local_rank = int(parts["local"])
        if parts.get("node") is not None and line.node is None:
            line.node = parts["node"]
        if parts.get("gpu") is not None:
            line.gpu = parts["gpu"]
        if parts.get("hour") is not None and line.time_s is None:
            line.time_s = self._seconds(parts)
        if parts.get("low") is not None:
            line.is_no_error = True

    def _seconds(self, parts: dict[str, str | None]) -> float | None:
        year = int(parts.get("year") or 0)
        if year >= _FIRST_YEAR:
            self.year = year
        month = _MONTHS.get(parts.get("mon") or "") or int(parts.get("month") or 0)
        numbers = (
            *(self.year, month, int(parts["day"] or 0), int(parts["hour"] or 0)),
            *(int(parts["minute"] or 0), int(parts["second"] or 0)),
        )
        if not (1 <= month <= 12 and 1 <= numbers[2] <= 31 and numbers[3] < 24):  # noqa: PLR2004
            return None
        frac = parts.get("frac")
        seconds = calendar.timegm(numbers) + (float(f"0.{frac}") if frac else 0.0)
        zone = parts.get("zone")
        if zone and zone != "Z":
            hours, minutes = int(zone[1:3]), int(zone[-2:])
            seconds -= (1 if zone[0] == "+" else -1) * (hours * 3600 + minutes * 60)
        return seconds

    def _from_json(self, text: str, line: Line) -> str:
        """Take the message out of a line that is a JSON object of a log collector."""
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return text
        if "schema" in value:
            return text  # a record of a program, such as an earlier verdict: it quotes
        texts = {k: v for k, v in value.items() if isinstance(v, str)}
        message = next((texts[k] for k in _JSON_TEXT if k in texts), None)
        if message is None:
            # Who names it otherwise means the longest one, if that is a sentence.
            message = max(texts.values(), key=len, default="")
            if message.count(" ") < _LEAST_SPACES:
                return text
        levels = (value[k] for k in _JSON_LEVEL if isinstance(value.get(k), str))
        line.is_no_error = any(level.lower() in _LOW_LEVELS for level in levels)
        sources = [value]
        for source in sources:
            sources += [v for v in source.values() if isinstance(v, dict)]
            node = next((source[k] for k in _JSON_NODE if isinstance(source.get(k), str)), None)
            line.node = line.node or node
            rank = next((source[key] for key in _JSON_RANK if key in source), None)
            if line.rank is None and isinstance(rank, int | str):
                line.rank = rank_in_digits(str(rank)[: _RANK_DIGITS + 1])
        stamp = next((value[k] for k in _JSON_TIME if isinstance(value.get(k), str)), "")
        match = re.match(_ISO, stamp)
        if match is not None:
            line.time_s = self._seconds(match.groupdict())
        return str(message).rstrip("\n")


def rank_in_digits(text: str | bytes | None) -> int | None:
    """Return the rank in a text of digits; None for anything else, and beyond 2**20."""
    if not text or len(text) > _RANK_DIGITS or not (text.isascii() and text.isdigit()):
        return None
    rank = int(text)
    return rank if rank < _MOST_RANK else None


def is_launcher_line(text: str) -> bool:
    """Return whether the launcher or one of its monitors wrote a line."""
    return _LAUNCHER.search(text) is not None


def without_launcher(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the chunks of a log without the launcher's lines.

    Args:
        chunks: Parts of the log, at any place of a line.
    """
    rest = b""
    for data in chunks:
        *lines, rest = (rest + data).split(b"\n")
        yield b"".join(
            line + b"\n" for line in lines if not is_launcher_line(line.decode("latin-1"))
        )
        if len(rest) > _MOST_KEPT:  # a line that does not end
            yield rest
            rest = b""
    if not is_launcher_line(rest.decode("latin-1")):
        yield rest


def plain_text(text: str) -> str:
    """Return a line without control characters and colour sequences."""
    return _CONTROL.sub("", text)


def _rank_in(text: str) -> int | None:
    """Return the rank that a text names as its own: the outermost and global one."""
    match = _GLOBAL_RANK.search(text) or _IN_TEXT.search(text)
    if match is None:
        return None
    return rank_in_digits(next(value for value in match.groups() if value is not None))
