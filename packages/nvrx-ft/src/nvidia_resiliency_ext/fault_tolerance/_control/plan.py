# SPDX-License-Identifier: Apache-2.0
"""The command line of `nvrx-control`, and the plan that follows from it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from nvidia_resiliency_ext.fault_tolerance._config.sources import layers_from_args
from nvidia_resiliency_ext.fault_tolerance._launch import syntax
from nvidia_resiliency_ext.fault_tolerance._launch.flags import FLAGS
from nvidia_resiliency_ext.fault_tolerance._launch.parser import (
    USAGE_ERROR_EXIT_CODE,
    FlagParser,
)
from nvidia_resiliency_ext.shared_utils.console import write_err
from nvidia_resiliency_ext.shared_utils.errors import ConfigError

PROGRAM = "nvrx-control"

_TAKEN = (
    "nnodes", "rdzv-endpoint", "rdzv-backend", "rdzv-id", "rdzv-conf", "local-addr", "ft-segment",
    "ft-cfg-path", "ft-ignore-unknown-cfg", "ft-ignore-missing-cfg", "ft-lease",
    "ft-rdzv-token-file", "ft-log-level", "ft-no-restart-exit-code", "version",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ControlPlan:
    """What a control plane needs.

    `segment` and `lease_s` are None where they were not given: the launchers' own hold.
    """

    min_nodes: int
    max_nodes: int
    host: str
    port: int
    run_id: str
    segment: int | None
    lease_s: float | None
    token_file: str | None
    log_level: int

    def settings(self) -> dict[str, str]:
        """Return what launchers must have been started with alike, by flag."""
        settings = {"--nnodes": f"{self.min_nodes}:{self.max_nodes}"}
        if self.segment is not None:
            settings["--ft-segment"] = str(self.segment)
        if self.lease_s is not None:
            settings["--ft-lease"] = str(self.lease_s)
        return settings


class _ControlParser(FlagParser):
    def error(self, message: str) -> NoReturn:
        write_err(f"{PROGRAM}: error: {' '.join(message.split())}\n")
        sys.exit(USAGE_ERROR_EXIT_CODE)


def plan_from_command_line(argv: Sequence[str] | None) -> ControlPlan:
    """Return the plan that a command line asks for.

    Raises:
        SystemExit: with 2 after one line, when it is wrong; with 0 for `--help` and `--version`.
    """
    parser = _ControlParser(
        prog=PROGRAM,
        usage=f"{PROGRAM} --nnodes N --rdzv-endpoint HOST:PORT [options]",
        description="Serve the rendezvous of a job from a machine that does not train.",
        allow_abbrev=False,
        add_help=False,
    )
    parser.add_flags([flag for flag in FLAGS if flag.name in _TAKEN])
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        parser.error("; ".join(f"{word} is no flag of {PROGRAM}" for word in unknown))
    if args.training_script is not None:
        parser.error(
            f"{args.training_script!r}: {PROGRAM} runs no script; start it with ft_launcher"
        )
    try:
        return _plan(args)
    except (ConfigError, OSError) as error:
        parser.error(str(error))


def _plan(args: argparse.Namespace) -> ControlPlan:
    for name in ("nnodes", "rdzv_endpoint"):
        if name not in args.given:
            raise ConfigError(f"--{name.replace('_', '-')} is needed")
    host, port = syntax.parse_endpoint(args.rdzv_endpoint)
    if port is None or port == 0:
        raise ConfigError(f"--rdzv-endpoint {args.rdzv_endpoint}: a port is needed, HOST:PORT")
    layers = layers_from_args(args)
    if layers.problems:
        raise ConfigError("; ".join(layers.problems))
    config = layers.config()
    min_nodes, max_nodes = syntax.parse_min_max_nnodes(args.nnodes)
    return ControlPlan(
        min_nodes=min_nodes,
        max_nodes=max_nodes,
        host=host,
        port=port,
        run_id=args.rdzv_id,
        segment=config.segment,
        lease_s=config.lease if "lease" in layers.given else None,
        token_file=config.rdzv_token_file,
        log_level=config.log_level,
    )
