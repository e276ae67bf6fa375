# SPDX-License-Identifier: Apache-2.0
"""The reference page of the options and flags, written from their tables."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

from nvidia_resiliency_ext.fault_tolerance._config.table import DEPRECATED_KEYS, GROUPS, OPTIONS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from nvidia_resiliency_ext.fault_tolerance._config.table import Option


def options_markdown() -> str:
    """Return a table of the options for each group, in Markdown."""
    parts = []
    for group in GROUPS:
        rows = [_option_row(option) for option in OPTIONS if option.group == group]
        head = ("YAML key", "flag", "value", "default", "meaning")
        parts.append(f"### {group.capitalize()}\n\n{_table(head, rows)}")
    rows = [(f"`{old.key}`", old.note) for old in DEPRECATED_KEYS]
    rows += [
        (f"`{alias}`", f"use {option.field}") for option in OPTIONS for alias in option.yaml_aliases
    ]
    parts.append(f"### Deprecated YAML keys\n\n{_table(('YAML key', 'instead'), rows)}")
    return "\n\n".join(parts) + "\n"


def flags_markdown() -> str:
    """Return a table of the flags that are no options, for each group, in Markdown."""
    from nvidia_resiliency_ext.fault_tolerance._config.flags import FLAGS
    from nvidia_resiliency_ext.fault_tolerance._config.flags import GROUPS as FLAG_GROUPS

    options = {f"ft_{option.field}" for option in OPTIONS}
    parts = []
    for group in FLAG_GROUPS:
        rows = []
        for flag in FLAGS:
            if flag.group != group or flag.attribute in options:
                continue
            name = f"`-{flag.short}`, `--{flag.name}`" if flag.short else f"`--{flag.name}`"
            variable = f"`PET_{flag.attribute.upper()}`" if flag.env else ""
            value = flag.kind.expects if flag.kind else ""
            rows.append((name, variable, value, _shown(flag.default), flag.help))
        if rows:
            head = ("flag", "environment", "value", "default", "meaning")
            parts.append(f"### {group.capitalize()}\n\n{_table(head, rows)}")
    return "\n\n".join(parts) + "\n"


def _option_row(option: Option) -> tuple[str, ...]:
    return (
        f"`{option.field}`",
        f"`--{option.flag}`",
        option.kind.expects,
        _shown(option.default),
        option.help,
    )


def _shown(value: object) -> str:
    if isinstance(value, signal.Signals):
        value = value.name
    if value is None:
        return "none"
    return "" if value in ("", [], {}) else f"`{value}`"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(
        f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines
    )
