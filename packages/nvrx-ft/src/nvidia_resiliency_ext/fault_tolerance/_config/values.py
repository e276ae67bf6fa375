# SPDX-License-Identifier: Apache-2.0
"""Kinds of values: how a setting is read from text, YAML or Python, and what is allowed.

A kind's `parse` raises ValueError, TypeError or KeyError; `read` says where, what, and the rule.
"""

from __future__ import annotations

import contextlib
import math
import signal
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

_NONE_WORDS = ("", "none", "null")
_TRUTHS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
_LOG_LEVELS = {
    "DEBUG": 10, "DBG": 10, "INFO": 20, "WARNING": 30, "WARN": 30, "ERROR": 40, "CRITICAL": 50,
}  # fmt: skip
_SHOWN_CHARACTERS = 80
# More does not travel in a message.
_INTEGERS_BELOW = 2**63


class Kind(NamedTuple):
    """How one sort of value is read."""

    expects: str  # what is allowed, as it follows "... is not"
    metavar: str  # in `--help`
    parse: Callable[[Any], Any]


class _BadPartError(ValueError):
    """One part of a value is wrong; the message says which, and what is allowed."""


def read(kind: Kind, raw: object, where: str) -> Any:
    """Return the value of `raw`, which stood at `where`; ValueError: it is not allowed."""
    try:
        return kind.parse(raw)
    except _BadPartError as error:
        raise ValueError(f"{where}: {error}") from None
    except (ValueError, TypeError, KeyError, OverflowError):
        raise ValueError(f"{where}: {describe(raw)} is not {kind.expects}") from None


@contextlib.contextmanager
def noting(problems: list[str]) -> Iterator[None]:
    """Catch a ValueError and append its message to `problems`, which are reported together."""
    try:
        yield
    except ValueError as error:
        problems.append(str(error))


def describe(raw: object) -> str:
    """Return a short, harmless text for a value of unknown origin."""
    if isinstance(raw, Mapping):
        return "a mapping"
    if isinstance(raw, (list, tuple, set)):
        return "a list"
    text = repr(raw)
    return text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "..."


def _number(raw: Any) -> float:
    if isinstance(raw, bool) or not (isinstance(raw, str) or hasattr(raw, "__float__")):
        raise TypeError
    value = float(raw)
    if not math.isfinite(value):
        raise ValueError
    return value


def _integer(raw: Any) -> int:
    if isinstance(raw, bool) or not (isinstance(raw, str) or hasattr(raw, "__index__")):
        raise TypeError
    value = int(raw)
    if not -_INTEGERS_BELOW <= value < _INTEGERS_BELOW:
        raise ValueError
    return value


def that(parse: Callable[[Any], Any], holds: Callable[[Any], object]) -> Callable[[Any], Any]:
    """Return a parser that calls `parse` and refuses values for which `holds` is false."""

    def check(raw: Any) -> Any:
        value = parse(raw)
        if not holds(value):
            raise ValueError
        return value

    return check


def _bool(raw: Any) -> bool:
    return _TRUTHS[str(raw).strip().lower()]


def _text(raw: Any) -> str:
    if not isinstance(raw, str) or not raw or "\0" in raw:
        raise ValueError
    return raw


def _words(text: str) -> list[str]:
    import shlex

    return shlex.split(text)  # ValueError for a quote that is not closed


def _signal(raw: Any) -> signal.Signals:
    if isinstance(raw, str) and not raw.strip().isdigit():
        name = raw.strip().upper()
        return signal.Signals[name if name.startswith("SIG") else f"SIG{name}"]
    return signal.Signals(_integer(raw))


# They cannot be handled, or the kernel sends them for reasons of its own.
_NOT_FOR_PEOPLE = frozenset(
    {
        *(signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD, signal.SIGPIPE, signal.SIGSEGV),
        *(signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT),
    }
)


def _log_level(raw: Any) -> int:
    if isinstance(raw, str) and raw.strip().upper() in _LOG_LEVELS:
        return _LOG_LEVELS[raw.strip().upper()]
    level: int = integer_in(10, 50).parse(raw)
    return level


def log_level_name(level: object) -> str:
    """Return a level as one writes it."""
    return next((name for name, each in _LOG_LEVELS.items() if each == level), str(level))


def _sections(raw: Any) -> dict[str, float | None]:
    if isinstance(raw, str):
        pairs = [part.rpartition(":") for part in raw.split(",") if part.strip()]
        items: list[tuple[Any, Any]] = [(name.strip(), value) for name, _, value in pairs]
    elif isinstance(raw, Mapping):
        items = list(raw.items())
    elif raw is None:
        items = []
    else:
        raise TypeError
    sections = {_section_name(name): _section_limit(name, value) for name, value in items}
    if len(sections) != len(items):
        raise ValueError
    return sections


def _section_limit(name: str, raw: Any) -> float | None:
    try:
        limit: float | None = read(SECONDS_OR_NONE, raw, name)
    except ValueError as error:
        raise _BadPartError(error) from None
    return limit


def _section_name(name: Any) -> str:
    # What a flag could not say again, or a log line not show, is no name.
    if not isinstance(name, str) or not name.isprintable() or not name.strip():
        raise ValueError
    if any(character in name for character in ":,") or name != name.strip():
        raise ValueError
    return name


def _comma_list(raw: Any) -> str:
    """Return the parts of a list or of a text with commas as one text."""
    if isinstance(raw, str):
        raw = raw.split(",")
    if not isinstance(raw, (list, tuple)) or not all(isinstance(part, str) for part in raw):
        raise TypeError
    parts = [part.strip() for part in raw if part.strip()]
    if any("," in part or "\0" in part for part in parts):
        raise ValueError
    return ",".join(parts)


def _are_paths(text: str) -> bool:
    return all(path.startswith("/") for path in text.split(","))


def _are_modules(text: str) -> bool:
    return not text or all(part.isidentifier() for part in text.replace(".", ",").split(","))


def _moment(raw: Any) -> str:
    text = str(raw).strip()
    if isinstance(raw, bool) or (text.lower() != "slurm" and _number(text) <= 0):
        raise ValueError
    return text.lower()


def is_none(raw: object) -> bool:
    """Return whether a raw value says that there is none: `None`, "none", "null", an empty text."""
    return raw is None or (isinstance(raw, str) and raw.strip().lower() in _NONE_WORDS)


def or_none(kind: Kind) -> Kind:
    """Return the kind that also takes `None`, "none", "null" and the empty text."""

    def parse(raw: Any) -> Any:
        return None if is_none(raw) else kind.parse(raw)

    return Kind(f"{kind.expects}, or none", kind.metavar, parse)


def choice(*allowed: str) -> Kind:
    """Return the kind that takes one of a few words."""

    def parse(raw: Any) -> Any:
        # YAML 1.1 reads a bare `on` or `off` as a truth value.
        return ("off", "on")[raw] if isinstance(raw, bool) else raw

    words = that(parse, lambda word: word in allowed)
    return Kind("one of " + ", ".join(allowed), "{" + ",".join(allowed) + "}", words)


def integer_in(lowest: int, highest: int) -> Kind:
    """Return the kind that takes an integer within limits, both included."""
    within = that(_integer, lambda value: lowest <= value <= highest)
    return Kind(f"an integer from {lowest} to {highest}", "N", within)


_at_least_zero = that(_number, lambda value: value >= 0)
_above_zero = that(_number, lambda value: value > 0)
SECONDS = Kind("a number of seconds >= 0", "SECONDS", _at_least_zero)
SECONDS_OR_NONE = or_none(SECONDS)
INTERVAL = Kind("a number of seconds > 0", "SECONDS", _above_zero)
FACTOR = Kind("a number > 0", "FACTOR", _above_zero)
SIZE_MB = Kind("a number of megabytes >= 0", "MB", _at_least_zero)
COUNT = integer_in(0, _INTEGERS_BELOW - 1)._replace(expects="an integer >= 0 and < 2**63")
INTEGER = Kind("an integer of 64 bits", "N", _integer)
BOOL = Kind("one of true, false, yes, no, 1, 0", "BOOL", _bool)
TEXT = Kind("a text that is not empty", "TEXT", _text)
COMMAND = Kind("a command with its arguments, quotes as in a shell", "COMMAND", that(_text, _words))
SIGNAL = Kind("the name or number of a signal", "SIGNAL", _signal)
HANDLED_SIGNAL_OR_NONE = or_none(
    Kind(
        "the name or number of a signal that somebody else can send, and that can be handled",
        "SIGNAL",
        that(_signal, lambda found: found not in _NOT_FOR_PEOPLE),
    )
)
MOMENT_OR_NONE = or_none(Kind("slurm, +SECONDS or a number of seconds since 1970", "WHEN", _moment))
LOG_LEVEL = Kind("a number from 10 to 50 or one of " + ", ".join(_LOG_LEVELS), "LEVEL", _log_level)
SECTIONS = Kind(
    "a set of NAME:SECONDS with SECONDS >= 0 or none, each name once (setup:600,step:180)",
    "NAME:SECONDS,...",
    _sections,
)
ABSOLUTE_PATH = Kind("an absolute path", "PATH", that(_text, lambda path: path.startswith("/")))
PATHS = Kind("a comma separated list of absolute paths", "PATH,...", that(_comma_list, _are_paths))
MODULES = Kind(
    "a comma separated list of module names", "MODULE,...", that(_comma_list, _are_modules)
)
PATH_TEMPLATE = Kind(
    "a path that holds {nic}",
    "PATH",
    that(_text, lambda path: "{nic}" in path or "{dev_name}" in path),
)
