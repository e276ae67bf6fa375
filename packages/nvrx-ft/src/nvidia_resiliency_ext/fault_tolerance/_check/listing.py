# SPDX-License-Identifier: Apache-2.0
"""`--print-config`: every option with its value and who gave it. Pure."""

from __future__ import annotations

import argparse
import enum
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from nvidia_resiliency_ext.fault_tolerance import _env
from nvidia_resiliency_ext.fault_tolerance._config.sources import Layers
from nvidia_resiliency_ext.fault_tolerance._config.table import OPTIONS
from nvidia_resiliency_ext.fault_tolerance._launch.flags import DEPRECATED, FLAGS, Flag

__all__ = ["Value", "listing", "render_listing"]

DEFAULT = "default"
_OF_THE_PROGRAM = frozenset({"version", "check", "print-completion", "print-config", "json"})
_OPTION_OF = {f"ft_{option.field}": option.field for option in OPTIONS}


class Value(NamedTuple):
    """One option: its flag, heading and value, and where the value comes from."""

    name: str
    group: str
    value: Any
    source: str


def listing(
    args: argparse.Namespace,
    layers: Layers,
    environ: Mapping[str, str],
    log_level: int,
    flags: Sequence[Flag] = FLAGS,
) -> list[Value]:
    """Return all options in the order of `--help`.

    Args:
        args: The parsed command line.
        layers: What flags and file gave, merged.
        environ: The launcher's environment.
        log_level: The level of the log where no option names one.
        flags: The program's flags.
    """
    config = layers.config()
    given: Mapping[str, str] = getattr(args, "given", {})
    values = []
    for flag in flags:
        if flag.name in _OF_THE_PROGRAM:
            continue
        field = _OPTION_OF.get(flag.attribute)
        if field is None:
            value, source = getattr(args, flag.attribute), given.get(flag.attribute, DEFAULT)
            if flag.group == DEPRECATED and source == DEFAULT:
                continue
        elif field in layers.given:
            value, source = getattr(config, field), layers.given[field].where
        else:
            value, source = getattr(config, field), DEFAULT
            if field == "log_level" and environ.get(_env.LOG_DEBUG):
                value, source = log_level, _env.LOG_DEBUG
        policy = layers.restart_policy()
        if flag.name == "ft-restart-policy" and policy is not None and source == DEFAULT:
            value, source = policy.value, policy.where
        values.append(Value(f"--{flag.name}", flag.group, _plain(value), _shown(flag, source)))
    return values


def render_listing(values: list[Value], *, as_json: bool) -> str:
    """Return the options for people, or as one JSON object with the key `options`."""
    if as_json:
        return json.dumps({"options": [value._asdict() for value in values]}) + "\n"
    width = max(len(value.name) for value in values)
    lines, group = [], ""
    for value in values:
        if value.group != group:
            lines.append(f"{value.group}:")
            group = value.group
        lines.append(f"  {value.name:<{width}}  {_text(value.value):<20}  {value.source}")
    return "".join(f"{line}\n" for line in lines)


def _shown(flag: Flag, source: str) -> str:
    if source == DEFAULT:
        return source
    if source.startswith("--"):
        return "command line" if source == f"--{flag.name}" else f"command line ({source})"
    return f"environment {source}" if source.isupper() else source.rpartition(":")[0] or source


def _plain(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return value


def _text(value: Any) -> str:
    if value is None or value in ("", {}, []):
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return ",".join(f"{key}:{_text(item)}" for key, item in value.items())
    if isinstance(value, list):
        return ",".join(map(str, value))
    return str(value)
