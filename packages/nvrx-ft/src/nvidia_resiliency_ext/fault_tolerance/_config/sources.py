# SPDX-License-Identifier: Apache-2.0
"""Merging the sources of options: a file, then the command line; who gave what stays known.

Knowing where a value came from is what lets a complaint name it, and lets the launcher tell an
option that was asked for from one that merely has its default.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from . import values
from .errors import FaultToleranceConfigError, SectionMissingError, nearest
from .settings import FaultToleranceConfig
from .table import DEPRECATED_KEYS, DEPRECATED_OF_KEY, OPTION_OF_KEY, OPTIONS
from .yaml_file import Entry, read_section

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Mapping

__all__ = [
    "Given",
    "Layers",
    "layers_from_args",
    "layers_from_old",
    "merge_attribution_address",
    "merge_entries",
    "merge_file",
]

# Flags of the launcher that people look for in its file.
_ONLY_FLAGS = frozenset(
    {
        "log_dir",
        "max_restarts",
        "monitor_interval",
        "nnodes",
        "nproc_per_node",
        "redirects",
        "shutdown_timeout",
        "tee",
        "term_timeout",
        "workers_stop_timeout",
    }
)


class Given(NamedTuple):
    """A value that somebody gave, and where."""

    value: Any
    where: str


@dataclass(slots=True)
class Layers:
    """What the sources gave, the later over the earlier.

    Attributes:
        given: Options by field name.
        deprecated: Keys of earlier releases that are no option.
        warnings: What a program should say once.
        problems: What is wrong; `config` raises all of it.
    """

    given: dict[str, Given] = field(default_factory=dict)
    deprecated: dict[str, Given] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def config(self) -> FaultToleranceConfig:
        """Return the merged config.

        Raises:
            FaultToleranceConfigError: Something was wrong in any source.
        """
        if self.problems:
            raise FaultToleranceConfigError(self.problems)
        return FaultToleranceConfig(**{name: given.value for name, given in self.given.items()})

    def restart_policy(self) -> Given | None:
        """Return the restart policy that a file asked for."""
        return self.deprecated.get("restart_policy")


def merge_file(layers: Layers, path: str, *, ignore_unknown: bool) -> None:
    """Add the options of a file; `merge_attribution_address` comes after the last source.

    Raises:
        FileNotFoundError: There is no such file.
        FaultToleranceConfigError: The file cannot be read or understood.
    """
    merge_entries(layers, path, read_section(path), ignore_unknown=ignore_unknown)


def merge_entries(
    layers: Layers, path: str, entries: Iterable[Entry], *, ignore_unknown: bool
) -> None:
    """Add the options of a file that was read before."""
    own: dict[str, str] = {}
    unknown = []
    for key, raw, line in entries:
        where = f"{path} line {line}: {key}"
        option = OPTION_OF_KEY.get(key)
        old = DEPRECATED_OF_KEY.get(key)
        if option is None and old is None:
            unknown.append(f"{path} line {line}: unknown key {key!r}{_hint(key)}")
            continue
        if option is not None and option.field in own:
            layers.problems.append(f"{where}: is the same as {own[option.field]!r}; keep one")
            continue
        kind = option.kind if option is not None else DEPRECATED_OF_KEY[key].kind
        try:
            value = values.read(kind, raw, where)
        except ValueError as error:
            layers.problems.append(str(error))
            continue
        if option is not None:
            own[option.field] = key
            layers.given[option.field] = Given(value, where)
            if key != option.field:
                layers.warnings.append(f"{where}: is an old name of {option.field}")
        elif old is not None:
            layers.deprecated[key] = Given(value, where)
            layers.warnings.append(f"{where}: is deprecated; {old.note}")
    if unknown and ignore_unknown:
        layers.warnings.append("ignored: " + "; ".join(unknown))
    elif unknown:
        layers.problems += unknown


def layers_from_old(options: Mapping[str, Any]) -> Layers:
    """Return what keys of earlier releases mean that a program gives by name.

    Raises:
        FaultToleranceConfigError: A value is not allowed, or half an address is missing.
    """
    layers = Layers()
    for key, raw in options.items():
        old = DEPRECATED_OF_KEY[key]
        try:
            layers.deprecated[key] = Given(values.read(old.kind, raw, key), key)
        except ValueError as error:
            layers.problems.append(str(error))
        layers.warnings.append(f"{key}: is deprecated; {old.note}")
    merge_attribution_address(layers)
    if layers.problems:
        raise FaultToleranceConfigError(layers.problems)
    return layers


def _hint(key: str) -> str:
    if key in _ONLY_FLAGS:
        return f"; it is a flag only: --{key.replace('_', '-')}"
    # Old names are taken, but nobody should be led to them.
    return nearest(key, [option.field for option in OPTIONS])


def merge_attribution_address(layers: Layers) -> None:
    """Make host and port of earlier releases one address, once all sources are merged."""
    host = layers.deprecated.get("attrsvc_host")
    port = layers.deprecated.get("attrsvc_port")
    if host is None and port is None:
        return
    if host is None or port is None:
        lone = host or port
        assert lone is not None
        layers.problems.append(f"{lone.where}: needs both a host and a port")
        return
    layers.given.setdefault(
        "attribution_endpoint", Given(f"http://{host.value}:{port.value}", host.where)
    )


def layers_from_args(args: argparse.Namespace) -> Layers:
    """Return what a parsed command line and the file that it names gave.

    Raises:
        FileNotFoundError: The file does not exist, and may not be missing.
        FaultToleranceConfigError: The file cannot be read or understood.
    """
    layers = Layers()
    path = getattr(args, "ft_cfg_path", None)
    if path:
        ignore_unknown = bool(getattr(args, "ft_ignore_unknown_cfg", False))
        may_be_missing = bool(getattr(args, "ft_ignore_missing_cfg", False))
        try:
            merge_file(layers, path, ignore_unknown=ignore_unknown)
        except (FileNotFoundError, SectionMissingError) as error:
            if not may_be_missing:
                raise
            layers.warnings.append(f"going on without a configuration file: {error}")
    sources: dict[str, str] = getattr(args, "given", {})
    for option in OPTIONS:
        dest = f"ft_{option.field}"
        raw = getattr(args, dest, None)
        if raw is None:
            continue
        where = sources.get(dest, f"--{option.flag}")
        try:
            value = values.read(option.kind, raw, where)
        except ValueError as error:  # all problems at once
            layers.problems.append(str(error))
        else:
            layers.given[option.field] = Given(value, where)
    for old in DEPRECATED_KEYS:
        dest = f"ft_{old.key}"
        if dest in sources:
            layers.deprecated[old.key] = Given(getattr(args, dest), sources[dest])
    merge_attribution_address(layers)
    return layers
