# SPDX-License-Identifier: Apache-2.0
"""Rules as data: what a line means, and what is done about it; it reads no log.

The bundled registry is written in TOML; the same as JSON is what is read, as Python 3.10 has no
TOML reader. Overlay files of a site add or disable rules and never change what a code means.
Patterns are compiled at first use: a scan of a healthy log compiles none.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import time
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from nvidia_resiliency_ext.attribution._core.errors import RegistryError

__all__ = ["Code", "Registry", "Rule", "XidEntry", "letters", "load_registry", "templates_of"]

ROLES = ("root", "either", "cascade", "teardown", "confirm", "context", "done")
_FOLDER = os.path.join(os.path.dirname(os.path.dirname(__file__)), "registry")
_BUNDLED = os.path.join(_FOLDER, "bundled.json")
_LIMIT_BYTES = 4 << 20
_LEAST_ANCHOR = 4
_DEFAULT_SPECIFICITY = 50
_TIMING_BYTES = 64 * 1024
_TIMING_LIMIT_S = 0.1
_TIMING_TRIES = 50
SOURCES = ("any", "kernel", "slurm", "nccl", "python", "launcher")
PHASES = ("startup", "training", "checkpoint_save", "checkpoint_load", "shutdown")
# Key of a rule -> type of its value, and where there are few, the values; `since` is for people.
_KEYS: dict[str, tuple[type, tuple[str, ...]]] = {
    "id": (str, ()),
    "code": (str, ()),
    "role": (str, ROLES),
    "anchors": (list, ()),
    "pattern": (str, ()),
    "unless": (list, ()),
    "source": (str, SOURCES),
    "confidence": (float, ()),
    "entity": (str, ()),
    "rank_group": (str, ()),
    "node_group": (str, ()),
    "specificity": (int, ()),
    "confirms": (list, ()),
    "phase": (str, PHASES),
    "since": (str, ()),
    "needs_block": (bool, ()),
    "only_errors": (bool, ()),
    "early": (bool, ()),
    "frames": (tuple, ()),
    "examples": (list, ()),
    "counterexamples": (list, ()),
    "disable": (bool, ()),
}
_REQUIRED = ("code", "role", "anchors", "pattern")
_ARTIFACT = "artifact"
# A quantified group that holds a quantifier: the way to exponential time.
_NESTED = re.compile(r"\((?:[^()\\]|\\.)*[+*](?:[^()\\]|\\.)*\)(?:[+*]|\{\d+,\})")

_UPPER = range(65, 91)
_TO_LOWER = bytes(c + 32 if c in _UPPER else c for c in range(256))
_NOT_KEPT = bytes(c for c in range(256) if c not in {*_UPPER, *range(97, 123), ord("\n")})


def templates_of(lines: bytes) -> bytes:
    """Return lines without all but their ASCII letters, in lower case."""
    return lines.translate(_TO_LOWER, _NOT_KEPT)


def letters(text: str) -> bytes:
    """Return the same of one line of text."""
    return templates_of(text.encode("utf-8", "replace"))


@dataclass(frozen=True, slots=True)
class Code:
    """Meaning of a reason code.

    Attributes:
        name: Such as `gpu.off_bus`.
        domain: `infrastructure`, `workload`, `unknown` or `none`.
        action: At the first occurrence: RESTART, STOP or CONTINUE.
        budget: Repeats without progress before STOP.
        confidence: Of a finding by text, 0 to 1.
        exclude: Its node is named to be excluded.
        bounded: Its retries are counted under the rule `bounded_retry`.
        stop_first: STOP when no step was completed before.
        most_ranks: `stop_first` counts only when most ranks have it.
        per_entity: Only a repeat with the same file or data counts.
    """

    name: str
    domain: str
    action: str
    budget: int
    confidence: float
    exclude: bool = False
    bounded: bool = False
    stop_first: bool = False
    most_ranks: bool = False
    per_entity: bool = False


@dataclass(frozen=True, slots=True)
class XidEntry:
    """Meaning of an Xid number in the GPU driver's messages."""

    code: str
    name: str
    role: str
    contained: bool = False


@dataclass(frozen=True, eq=False)
class Rule:
    """One rule; `matches` is the whole test of a line.

    Attributes:
        id: Its name; overlays disable it by that.
        code: Reason code that it gives.
        role: One of `ROLES`.
        anchors: Literals of which a line has at least one.
        pattern: What the line matches.
        unless: What it must not match.
        source: Kind of the writer; the block before lines of the kernel and of Slurm says nothing.
        confidence: 0 to 1; None: that of the code.
        entity: Group of the pattern that names file or data; `artifact`: the path in the line.
        specificity: Higher ones win.
        confirms: Codes whose symptom this line explains.
        needs_block: It is a cause only below a traceback.
        only_errors: It passes over lines that their writer gave a level below error.
        early: A code of it that stops the job does so only before a completed step; after one it
            is `user.exception`.
        frames: (code, pattern): a frame `function (file)` of the traceback that gives another code.
        phase: Of the job; None: as the log says.
        rank_group: Group of the pattern that names the rank.
        node_group: Group of the pattern that names the node.
        examples: Lines that it matches.
        counterexamples: Lines that it does not match.
    """

    id: str
    code: str
    role: str
    anchors: tuple[str, ...]
    pattern: str
    unless: tuple[str, ...] = ()
    source: str = "any"
    confidence: float | None = None
    entity: str | None = None
    specificity: int = _DEFAULT_SPECIFICITY
    confirms: tuple[str, ...] = ()
    needs_block: bool = False
    only_errors: bool = False
    early: bool = False
    frames: tuple[tuple[str, str], ...] = ()
    phase: str | None = None
    rank_group: str = "rank"
    node_group: str = "node"
    examples: tuple[str, ...] = ()
    counterexamples: tuple[str, ...] = ()

    @cached_property
    def _regex(self) -> re.Pattern[str]:
        return re.compile(self.pattern, re.IGNORECASE)

    @cached_property
    def _unless(self) -> tuple[re.Pattern[str], ...]:
        return tuple(re.compile(item, re.IGNORECASE) for item in self.unless)

    def match(self, text: str) -> re.Match[str] | None:
        """Return the match of a line without its prefix, or None."""
        found = self._regex.search(text)
        if found is None or any(item.search(text) for item in self._unless):
            return None
        return found

    def has_pattern(self, text: str) -> bool:
        """Return whether `text`, a line without prefixes, has the pattern, taken back or not."""
        return self._regex.search(text) is not None

    def matches(self, text: str) -> bool:
        """Return whether a line has an anchor and the pattern, and none of the exceptions."""
        reduced = letters(text)
        has_anchor = any(letters(anchor) in reduced for anchor in self.anchors)
        return has_anchor and self.match(text) is not None


@dataclass(frozen=True)
class Registry:
    """All rules and codes.

    Attributes:
        version: Of the bundled part, and a mark for each overlay.
        rules: Most specific first.
        codes: Name -> meaning.
        xids: Number -> meaning.
    """

    version: str
    rules: tuple[Rule, ...]
    codes: dict[str, Code]
    xids: dict[int, XidEntry]

    def code(self, name: str) -> Code:
        """Return the meaning of a code; an unknown name has that of `unknown`.

        Args:
            name: The code, such as `gpu.oom`.
        """
        return self.codes.get(name) or self.codes["unknown"]

    @cached_property
    def anchors(self) -> re.Pattern[bytes]:
        """One expression that finds an anchor of any rule in a template."""
        table = self.rules_by_anchor
        return re.compile(_trie_pattern(table))

    @cached_property
    def rules_by_anchor(self) -> dict[bytes, list[Rule]]:
        """Reduced anchor -> rules that have it."""
        table: dict[bytes, list[Rule]] = {}
        for rule in self.rules:
            for anchor in {letters(anchor) for anchor in rule.anchors}:
                table.setdefault(anchor, []).append(rule)
        return table

    @cached_property
    def _anchors_by_head(self) -> dict[bytes, list[tuple[bytes, list[Rule]]]]:
        heads: dict[bytes, list[tuple[bytes, list[Rule]]]] = {}
        for anchor, rules in self.rules_by_anchor.items():
            heads.setdefault(anchor[:_LEAST_ANCHOR], []).append((anchor, rules))
        return heads

    def rules_for(self, template: bytes) -> tuple[Rule, ...]:
        """Return the rules with an anchor in a template, most specific first.

        Args:
            template: A line of the log with its variable parts removed.
        """
        heads = self._anchors_by_head
        found: dict[int, Rule] = {}
        for start in range(len(template) - _LEAST_ANCHOR + 1):
            for anchor, rules in heads.get(template[start : start + _LEAST_ANCHOR], ()):
                if template.startswith(anchor, start):
                    found.update((id(rule), rule) for rule in rules)
        return tuple(sorted(found.values(), key=lambda rule: -rule.specificity))

    def has_pattern(self, text: str) -> bool:
        """Tell whether `text`, a line without prefixes, has a rule's pattern, taken back or not."""
        return any(rule.has_pattern(text) for rule in self.rules_for(letters(text)))

    def check(self) -> list[str]:
        """Run every rule's examples and the tests of its pattern; return the problems."""
        return [problem for rule in self.rules for problem in _problems(rule)]


_default: Registry | None = None


def load_registry(*paths: str | os.PathLike[str]) -> Registry:
    """Return the bundled rules with overlay files of a site.

    Args:
        paths: TOML or JSON files, with `[[rule]]` tables as the bundled ones have them. A rule
            with `disable = true` and the id of a bundled one takes that away.

    Raises:
        RegistryError: A file cannot be read, or a rule is wrong; the message names both.

    Example:
        >>> load_registry().code("gpu.off_bus").exclude
        True
    """
    global _default  # noqa: PLW0603 - the bundled rules never change in a process
    if _default is None:
        _default = _parse_bundled()
    registry = _default
    for path in paths:
        registry = _overlaid(registry, os.fspath(path))
    return registry


def _parse_bundled() -> Registry:
    with open(_BUNDLED, "rb") as file:
        data = json.load(file)
    codes = {name: Code(name, **value) for name, value in data["codes"].items()}
    xids = {int(number): XidEntry(**value) for number, value in data["xid"].items()}
    rules = [_rule(value) for value in data["rule"]]
    return Registry(data["version"], _sorted(rules), codes, xids)


def _overlaid(registry: Registry, path: str) -> Registry:
    data = _read(path)
    unknown = set(data) - {"rule", "version"}
    if unknown:
        raise RegistryError(f"{path}: an overlay has [[rule]] tables, not {sorted(unknown)}")
    rules = {rule.id: rule for rule in registry.rules}
    values = data.get("rule", [])
    if not isinstance(values, list):
        raise RegistryError(f"{path}: 'rule' is not a list of tables")
    for number, value in enumerate(values, 1):
        where = f"{path}: rule {number}"
        if not isinstance(value, dict) or not isinstance(value.get("id"), str):
            raise RegistryError(f"{where} has no id")
        where = f"{path}: rule {value['id']!r}"
        if "disable" in value:
            _check_value("disable", value["disable"], where)
        if value.get("disable"):
            if rules.pop(value["id"], None) is None:
                raise RegistryError(f"{where}: there is no such rule to disable")
            continue
        rule = _checked(value, where, registry)
        if value["id"] in rules:
            raise RegistryError(f"{where}: the id is taken; disable that rule first")
        problems = _problems(rule)
        if problems:
            raise RegistryError(f"{path}: {problems[0]}")
        rules[rule.id] = rule
    own_version = data.get("version", os.path.basename(path))
    if not isinstance(own_version, str | int | float):
        raise RegistryError(f"{path}: version is not a text")
    version = f"{registry.version}+{own_version}"
    return Registry(version, _sorted(rules.values()), registry.codes, registry.xids)


def _read(path: str) -> dict[str, Any]:
    try:
        with open(path, "rb") as file:
            data = file.read(_LIMIT_BYTES + 1)
    except OSError as error:
        raise RegistryError(f"{path}: {error.strerror}") from None
    if len(data) > _LIMIT_BYTES:
        raise RegistryError(f"{path}: larger than {_LIMIT_BYTES} bytes")
    try:
        value = json.loads(data) if path.endswith(".json") else _toml(data.decode())
    except ModuleNotFoundError:
        raise RegistryError(f"{path}: this Python reads no TOML; write it as .json") from None
    except (ValueError, RecursionError) as error:
        raise RegistryError(f"{path}: {error}") from None
    if not isinstance(value, dict):
        raise RegistryError(f"{path}: not a table")
    return value


def _toml(text: str) -> Any:
    # By name: the type checker runs as Python 3.10, which has no such module.
    return importlib.import_module("tomllib").loads(text)


def _checked(value: dict[str, Any], where: str, registry: Registry) -> Rule:
    unknown = sorted(set(value) - set(_KEYS))
    if unknown:
        raise RegistryError(f"{where}: unknown key {unknown[0]!r}")
    for key in _REQUIRED:
        if key not in value:
            raise RegistryError(f"{where}: {key} is missing")
    for key, item in value.items():
        _check_value(key, item, where)
    frames = value.get("frames", ())
    for code in (value["code"], *value.get("confirms", ()), *(code for code, _ in frames)):
        if code not in registry.codes:
            raise RegistryError(f"{where}: code {code!r} is not a known reason code")
    if not value["anchors"]:
        raise RegistryError(f"{where}: anchors is empty")
    for pattern in (value["pattern"], *value.get("unless", ()), *(text for _, text in frames)):
        try:
            groups = re.compile(pattern).groupindex
        except (re.error, RecursionError, OverflowError) as error:
            raise RegistryError(f"{where}: {pattern!r}: {error}") from None
        if pattern == value["pattern"]:
            _check_groups(value, groups, where)
    return _rule(value)


def _check_groups(value: dict[str, Any], groups: Any, where: str) -> None:
    for key in ("entity", "rank_group", "node_group"):
        name = value.get(key)
        is_path = key == "entity" and name == _ARTIFACT
        if name is not None and name not in groups and not is_path:
            raise RegistryError(f"{where}: {key} {name!r} is no group of the pattern")


def _check_value(key: str, value: object, where: str) -> None:
    kind, allowed = _KEYS[key]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind is list:
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise RegistryError(f"{where}: {key} is not a list of texts")
    elif kind is tuple:
        pairs = value if isinstance(value, list) else [()]
        if not all(
            isinstance(pair, list) and len(pair) == 2 and all(isinstance(t, str) for t in pair)  # noqa: PLR2004
            for pair in pairs
        ):
            raise RegistryError(f"{where}: {key} is not a list of pairs of a code and a pattern")
    elif kind is float:
        if not is_number or not 0 <= float(value) <= 1:  # type: ignore[arg-type]
            raise RegistryError(f"{where}: {key} {value!r} is no number from 0 to 1")
    elif kind is int:
        if not isinstance(value, int) or isinstance(value, bool):
            raise RegistryError(f"{where}: {key} {value!r} is no whole number")
    elif not isinstance(value, kind):
        name = "a text" if kind is str else "true or false"
        raise RegistryError(f"{where}: {key} is not {name}")
    if allowed and value not in allowed:
        raise RegistryError(f"{where}: {key} {value!r} is none of {', '.join(allowed)}")


def _rule(value: dict[str, Any]) -> Rule:
    kept: dict[str, Any] = {
        key: tuple(item) if isinstance(item, list) else item for key, item in value.items()
    }
    for key in ("since", "disable"):
        kept.pop(key, None)
    kept["frames"] = tuple((code, pattern) for code, pattern in kept.get("frames", ()))
    return Rule(**kept)


def _sorted(rules: Any) -> tuple[Rule, ...]:
    return tuple(sorted(rules, key=lambda rule: (-rule.specificity, rule.id)))


def _problems(rule: Rule) -> list[str]:
    found = []
    short = [anchor for anchor in rule.anchors if len(letters(anchor)) < _LEAST_ANCHOR]
    if short:
        found.append(f"rule {rule.id!r}: anchor {short[0]!r} has under {_LEAST_ANCHOR} letters")
    for pattern in (rule.pattern, *rule.unless):
        if _NESTED.search(pattern):
            found.append(f"rule {rule.id!r}: {pattern!r} repeats what repeats; write it without")
        elif _is_slow(pattern, rule.examples):
            found.append(f"rule {rule.id!r}: {pattern!r} takes over 100 ms of CPU for 64 KiB")
    for kind, items, expected in (
        ("example", rule.examples, True),
        ("counterexample", rule.counterexamples, False),
    ):
        if len(items) < 2:  # noqa: PLR2004 - one could be the text itself
            found.append(f"rule {rule.id!r}: needs at least two {kind}s")
        found += [
            f"rule {rule.id!r}: {kind} {item!r} {'does not match' if expected else 'matches'}"
            for item in items
            if rule.matches(item) != expected
        ]
    return found


def _is_slow(pattern: str, examples: tuple[str, ...]) -> bool:
    compiled = re.compile(pattern, re.IGNORECASE)
    # Lines are looked at in pieces of at most 4 KiB: a long text is many of them.
    sources = ["a" * 4096, "error " * 683, *((e[: len(e) // 2] + " ") * 200 for e in examples)]
    for source in sources:
        piece = source[:4096]
        limit = _TIMING_LIMIT_S * max(1, len(piece)) / _TIMING_BYTES
        # One quick try is enough: on a busy machine most are slow.
        if all(_seconds(compiled, piece) > limit for _ in range(_TIMING_TRIES)):
            return True
    return False


def _seconds(compiled: re.Pattern[str], text: str) -> float:
    started = time.thread_time()
    compiled.search(text)
    return time.thread_time() - started


def _trie_pattern(anchors: Any) -> bytes:
    """Return an expression for many literals that branches once per letter."""
    root: dict[int, Any] = {}
    for anchor in anchors:
        node = root
        for letter in anchor:
            if -1 in node:  # a shorter anchor is enough
                break
            node = node.setdefault(letter, {})
        else:
            node.clear()
            node[-1] = None
    return _branch(root)


def _branch(node: dict[int, Any]) -> bytes:
    if -1 in node:
        return b""
    parts = [bytes([letter]) + _branch(child) for letter, child in sorted(node.items())]
    return parts[0] if len(parts) == 1 else b"(?:" + b"|".join(parts) + b")"
