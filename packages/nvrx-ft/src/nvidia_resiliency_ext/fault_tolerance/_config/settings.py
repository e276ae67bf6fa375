# SPDX-License-Identifier: Apache-2.0
"""`FaultToleranceConfig`: the options as one object, merged from a file and the command line.

The fields are written out for readers and type checkers; a test compares them with the table.
Where a value came from is kept: complaints name it, and a default differs from what was asked for.
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, NamedTuple

from nvidia_resiliency_ext.fault_tolerance._core import errors

from . import table, values
from .yaml_file import read_section

if TYPE_CHECKING:
    import argparse


@dataclass
class FaultToleranceConfig:
    """Configuration of fault tolerance, shared by the launcher, the monitor and the ranks of a job.

    A plain value: two are equal when all options are, and one may be pickled or sent as the dict
    of `to_dict`. Everything is checked when it is made, and all mistakes are reported at once. It
    is not locked against later assignment, which is not checked.

    Raises:
        ValueError: A value is not allowed; the message names the field, the value and the rule.

    Example:
        >>> config = FaultToleranceConfig(rank_section_timeouts={"step": 60}, log_level="DEBUG")
        >>> config.rank_section_timeouts, config.log_level
        ({'step': 60.0}, 10)
    """

    workload_check_interval: float = 5.0
    initial_rank_heartbeat_timeout: float | None = None
    rank_heartbeat_timeout: float | None = None
    rank_section_timeouts: Mapping[str, float | None] = field(default_factory=dict)
    rank_out_of_section_timeout: float | None = None
    node_health_check_interval: float = 5.0
    safety_factor: float = 5.0
    rank_termination_signal: signal.Signals = signal.SIGKILL
    log_level: int = 20
    restart_check_interval: float = 60.0
    enable_nic_monitor: bool = False
    enable_nic_healthcheck: bool = True
    enable_dist_storage_healthcheck: bool = False
    storage_healthcheck_path: str | None = None
    pci_topo_file: str | None = None
    link_down_path_template: str | None = None
    link_state_path_template: str | None = None
    skip_section_response: bool = True
    segment: int | None = None
    numa_bind_strict: bool = True
    gpu_memory_reclaim_timeout: float = 50.0
    gpu_memory_tolerance_mb: float = 512.0
    gpu_memory_poll_interval: float = 2.0
    check_remaining_processes: bool = False
    max_no_progress_cycles: int = 3
    min_progress_iterations: int = 1
    checkpoint_iteration_file: str | None = None
    install_exception_hook: bool = False
    num_warmup_iterations: int = 5
    attribution_endpoint: str | None = None
    attribution_stop_action: str | None = None
    attribution_export_url: str | None = None
    cycle_info_dir: str | None = None
    prewarm: str = "auto"
    prewarm_import: str = ""
    monitor_mode: str = "shared"
    monitor_loss: str = "ignore"
    orphan_workers: str = "kill"
    lease: float = 5.0
    hang_evidence_timeout: float = 2.0
    preempt_signal: signal.Signals | None = None
    restart_budget_window: float | None = None
    rdzv_token_file: str | None = None
    attribution_node_action: str = "log"
    restart_backoff: float = 30.0
    node_blame_limit: int = 3
    node_blame_window: float = 3600.0
    bad_node_hook: str | None = None
    preempt_deadline: str | None = None
    preempt_grace: float = 120.0
    segment_health_check_dir: str | None = None
    start_failure_limit: int = 2

    def __post_init__(self) -> None:
        problems: list[str] = []
        for option in table.OPTIONS:
            with values.noting(problems):
                value = values.read(option.kind, getattr(self, option.field), option.field)
                setattr(self, option.field, value)
        if problems:
            raise errors.FaultToleranceConfigError(problems)

    @property
    def is_progress_tracking_enabled(self) -> bool:
        """Whether a job that makes no progress is given up."""
        return self.max_no_progress_cycles > 0

    def to_dict(self) -> dict[str, Any]:
        """Return all options as values that JSON and YAML can hold; signals go by name."""
        plain: dict[str, Any] = {}
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, signal.Signals):
                value = value.name
            elif isinstance(value, Mapping):
                value = dict(value)
            plain[item.name] = value
        return plain

    @staticmethod
    def from_dict(plain: Mapping[str, Any]) -> FaultToleranceConfig:
        """Return the config of `plain`, from `to_dict`; options left out have their defaults.

        Raises:
            ValueError: A key is unknown or a value is not allowed.
        """
        return FaultToleranceConfig.from_kwargs(ignore_not_recognized=False, **plain)

    @staticmethod
    def from_kwargs(ignore_not_recognized: bool = True, **kwargs: Any) -> FaultToleranceConfig:
        """Return a config of the given options.

        Args:
            ignore_not_recognized: Log unknown names once instead of raising.
            **kwargs: Options by field name, or by a name of earlier releases, with a warning where
                that names no field any more.

        Raises:
            ValueError: A value is not allowed, or a name is unknown and may not be ignored.
        """
        layers = Layers()
        entries = [(key, value, "") for key, value in kwargs.items()]
        layers.merge(entries, ignore_unknown=ignore_not_recognized)
        layers.merge_address()
        return layers.logged_config()

    @staticmethod
    def from_yaml_file(
        cfg_path: str | os.PathLike[str], ignore_not_recognized: bool = True
    ) -> FaultToleranceConfig:
        """Return the config of the first `fault_tolerance` mapping, at any depth, in `cfg_path`.

        With `ignore_not_recognized` unknown keys are logged once instead of being an error.

        Raises:
            FileNotFoundError: There is no such file.
            ValueError: The file cannot be understood, has no such mapping, or holds a wrong value.
        """
        layers = Layers()
        layers.merge(read_section(os.fspath(cfg_path)), ignore_unknown=ignore_not_recognized)
        layers.merge_address()
        return layers.logged_config()

    @staticmethod
    def from_args(args: argparse.Namespace) -> FaultToleranceConfig:
        """Return defaults, overridden by the file at `args.ft_cfg_path`, then by `args.ft_<field>`.

        Raises:
            FileNotFoundError: The file does not exist.
            ValueError: A key is unknown or a value is not allowed.
        """
        return layers_from_args(args).logged_config()

    def to_yaml_file(self, cfg_path: str | os.PathLike[str]) -> None:
        """Write or overwrite `cfg_path`, which `from_yaml_file` reads back as an equal config."""
        import yaml

        text = yaml.safe_dump({"fault_tolerance": self.to_dict()}, sort_keys=False)
        with open(cfg_path, "w", encoding="utf-8") as stream:
            stream.write(text)


FaultToleranceConfig.__doc__ = "\n".join(
    [
        (FaultToleranceConfig.__doc__ or "").rstrip(),
        "\n    Attributes:",
        *(
            f"        {option.field}: {option.help} Value: {option.kind.expects};"
            f" default {option.default_text}."
            for option in table.OPTIONS
        ),
        "    ",
    ]
)
# The public path is what pickles and messages should name.
FaultToleranceConfig.__module__ = "nvidia_resiliency_ext.fault_tolerance.config"


# Flags of the launcher that people look for in its file.
_ONLY_FLAGS = frozenset(
    {
        "log_dir", "max_restarts", "monitor_interval", "nnodes", "nproc_per_node", "redirects",
        "shutdown_timeout", "tee", "term_timeout", "workers_stop_timeout",
    }
)  # fmt: skip


class Given(NamedTuple):
    """A value that somebody gave, and where."""

    value: Any
    where: str


@dataclass(slots=True)
class Layers:
    """Settings merged from several sources, of which the later ones win."""

    given: dict[str, Given] = field(default_factory=dict)  # by field name
    deprecated: dict[str, Given] = field(default_factory=dict)  # old keys that are no option
    warnings: list[str] = field(default_factory=list)  # to be said once
    problems: list[str] = field(default_factory=list)  # `config` raises all of them

    def config(self) -> FaultToleranceConfig:
        """Return the merged config."""
        if self.problems:
            raise errors.FaultToleranceConfigError(self.problems)
        return FaultToleranceConfig(**{name: given.value for name, given in self.given.items()})

    def logged_config(self) -> FaultToleranceConfig:
        """Return the merged config and log the warnings."""
        if self.warnings:
            for text in self.warnings:
                logging.getLogger("nvrx").warning("%s", text)
        return self.config()

    def read(self, kind: values.Kind, raw: object, where: str) -> Given | None:
        """Return the value that `raw` is, or None: the problem is kept."""
        try:
            return Given(values.read(kind, raw, where), where)
        except ValueError as error:
            self.problems.append(str(error))
            return None

    def merge(self, entries: Iterable[tuple[str, Any, str]], *, ignore_unknown: bool) -> None:
        """Add options: key, value, place of the key in words; `merge_address` comes after all."""
        own: dict[str, str] = {}
        unknown = []
        for key, raw, place in entries:
            where = f"{place}{key}"
            option = table.OPTION_OF_KEY.get(key)
            if key in table.DEPRECATED_KEYS:
                kind, instead = table.DEPRECATED_KEYS[key]
                if (given := self.read(kind, raw, where)) is not None:
                    self.deprecated[key] = given
                    self.warnings.append(f"{where}: is deprecated; {instead}")
            elif option is None:
                unknown.append(f"{place}unknown key {key!r}{_hint(key)}")
            elif place and option.field in own:
                self.problems.append(f"{where}: is the same as {own[option.field]!r}; keep one")
            elif (given := self.read(option.kind, raw, where)) is not None:
                self.given[option.field] = given
                own[option.field] = key
                if place and key != option.field:
                    self.warnings.append(f"{where}: is an old name of {option.field}")
        if unknown and ignore_unknown:
            self.warnings.append("ignored: " + "; ".join(unknown))
        else:
            self.problems += unknown

    def merge_address(self) -> None:
        """Make host and port of earlier releases one address, once all sources are merged."""
        host, port = self.deprecated.get("attrsvc_host"), self.deprecated.get("attrsvc_port")
        if host and port:
            address = Given(f"http://{host.value}:{port.value}", host.where)
            self.given.setdefault("attribution_endpoint", address)
        elif lone := host or port:
            self.problems.append(f"{lone.where}: needs both a host and a port")


def _hint(key: str) -> str:
    if key in _ONLY_FLAGS:
        return f"; it is a flag only: --{key.replace('_', '-')}"
    # Old names are taken, but nobody should be led to them.
    return errors.nearest(key, [option.field for option in table.OPTIONS])


def layers_from_args(args: argparse.Namespace) -> Layers:
    """Return the settings of a parsed command line and of the file that `--ft-cfg-path` names."""
    layers = Layers()
    path = getattr(args, "ft_cfg_path", None)
    if path:
        ignore_unknown = bool(getattr(args, "ft_ignore_unknown_cfg", False))
        try:
            layers.merge(read_section(path), ignore_unknown=ignore_unknown)
        except (FileNotFoundError, errors.SectionMissingError) as error:
            if not getattr(args, "ft_ignore_missing_cfg", False):
                raise
            layers.warnings.append(f"going on without a configuration file: {error}")
    sources: dict[str, str] = getattr(args, "given", {})
    for option in table.OPTIONS:
        dest = f"ft_{option.field}"
        raw = getattr(args, dest, None)
        if raw is not None:
            given = layers.read(option.kind, raw, sources.get(dest, f"--{option.flag}"))
            layers.given |= {} if given is None else {option.field: given}
    for key in table.DEPRECATED_KEYS:
        dest = f"ft_{key}"
        if dest in sources:
            layers.deprecated[key] = Given(getattr(args, dest), sources[dest])
    layers.merge_address()
    return layers
