# SPDX-License-Identifier: Apache-2.0
"""`ft_launcher --check` and `--print-config`: command line in, text and exit code out."""

from __future__ import annotations

import argparse
import contextlib
import enum
import json
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from nvidia_resiliency_ext.fault_tolerance import _env
from nvidia_resiliency_ext.fault_tolerance._config.errors import FaultToleranceConfigError
from nvidia_resiliency_ext.fault_tolerance._config.flags import DEPRECATED, FLAGS, Flag
from nvidia_resiliency_ext.fault_tolerance._config.settings import Layers, layers_from_args
from nvidia_resiliency_ext.fault_tolerance._config.table import OPTIONS
from nvidia_resiliency_ext.fault_tolerance._plan import environment
from nvidia_resiliency_ext.fault_tolerance._plan.plan import LaunchPlan
from nvidia_resiliency_ext.fault_tolerance.rdzv_utils import rdzv_config_get_as_float
from nvidia_resiliency_ext.shared_utils.clock import SystemClock
from nvidia_resiliency_ext.shared_utils.console import write_out
from nvidia_resiliency_ext.shared_utils.errors import ConfigError, NvrxError

from .check_local import Finding, exit_code_of, failed, local_findings, render, skipped, versions

__all__ = ["Value", "check", "listing", "print_config", "render_listing"]


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


_Meet = Callable[[list[Finding], SystemClock], list[Finding]]

# A check is waited for by a person: shorter than a job would wait for its nodes.
WAIT_S = 60.0


def print_config(
    args: argparse.Namespace, environ: Mapping[str, str], flags: Sequence[Flag] = FLAGS
) -> int:
    """Print every option of a program with its source.

    Raises:
        FaultToleranceConfigError: The file or a value is wrong.
        OSError: The file cannot be read.
    """
    layers = layers_from_args(args)
    if layers.problems:
        raise FaultToleranceConfigError(layers.problems)
    values = listing(args, layers, environ, environment.log_level(environ), flags)
    write_out(render_listing(values, as_json=args.json))
    return 0


def check(plan: LaunchPlan, environ: Mapping[str, str], *, as_json: bool) -> int:
    """Check this node and, with several, meet the others; print what was found.

    Raises:
        ConfigError: The settings of the rendezvous are unusable.
    """
    clock = SystemClock()
    with contextlib.ExitStack() as stack:
        found: list[Finding] = []
        meet = None
        if plan.max_nodes > 1:
            meet = _prepare_meeting(plan, environ, stack, found)
        found += local_findings(plan, environ, clock.wall())
        if plan.max_nodes == 1:
            found.append(skipped("other nodes", "one node"))
        elif meet is not None:
            found += meet(found, clock)
    write_out(render(found, as_json=as_json))
    return exit_code_of(found)


def _prepare_meeting(
    plan: LaunchPlan,
    environ: Mapping[str, str],
    stack: contextlib.ExitStack,
    found: list[Finding],
) -> _Meet | None:
    """Claim or resolve the endpoint; return how to meet, or None with a finding that says why."""
    from nvidia_resiliency_ext.fault_tolerance._agent.many_nodes import (
        find_meeting,
        must_agree,
        rules_of,
    )
    from nvidia_resiliency_ext.fault_tolerance._rendezvous.endpoint import read_token

    from .check_across import NodeReport, compare_nodes
    from .check_local import passed

    rules = rules_of(plan, environ)
    conf, token_file = plan.rdzv_configuration, plan.fault_tolerance.rdzv_token_file
    try:
        wait_s = rdzv_config_get_as_float(conf, "join_timeout", WAIT_S) or WAIT_S
        meeting = find_meeting(plan)
        secret = read_token(token_file) if token_file else None
    except ConfigError:
        raise
    except (NvrxError, ValueError) as error:
        found.append(failed("endpoint", str(error)))
        return None
    if meeting.listener is not None:
        stack.callback(meeting.listener.close)
    if meeting.is_hidden:
        text = f"{meeting.host} is {meeting.served_at} here, which other machines cannot reach"
        found.append(failed("endpoint", text))
    else:
        found.append(passed("endpoint", meeting.where))

    def meet(own: list[Finding], clock: SystemClock) -> list[Finding]:
        report = NodeReport(
            host=socket.gethostname(),
            versions=versions(),
            settings=must_agree(plan, rules),
            failures=[f"{f.name}: {f.text}" for f in own if f.status == "fail"],
        )
        try:
            return compare_nodes(
                meeting,
                report,
                run_id=plan.run_id,
                secret=secret,
                nodes=(plan.min_nodes, plan.max_nodes),
                wait_s=wait_s,
                clock=clock,
            )
        except NvrxError as error:
            return [failed("other nodes", str(error))]

    return meet
