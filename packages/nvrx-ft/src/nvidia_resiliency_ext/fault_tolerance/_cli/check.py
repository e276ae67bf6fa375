# SPDX-License-Identifier: Apache-2.0
"""`ft_launcher --check` and `--print-config`: on this node, and across the nodes of a job."""

from __future__ import annotations

import argparse
import contextlib
import enum
import json
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, NamedTuple

from nvidia_resiliency_ext.fault_tolerance import _env
from nvidia_resiliency_ext.fault_tolerance._agent import many_nodes
from nvidia_resiliency_ext.fault_tolerance._config.flags import DEPRECATED, FLAGS, Flag
from nvidia_resiliency_ext.fault_tolerance._config.settings import Layers, layers_from_args
from nvidia_resiliency_ext.fault_tolerance._config.table import OPTIONS
from nvidia_resiliency_ext.fault_tolerance._core.errors import FaultToleranceConfigError
from nvidia_resiliency_ext.fault_tolerance._plan.plan import LaunchPlan, log_level
from nvidia_resiliency_ext.fault_tolerance._rendezvous import agreement, keys
from nvidia_resiliency_ext.fault_tolerance._rendezvous import endpoint as endpoints
from nvidia_resiliency_ext.fault_tolerance._rendezvous import store as stores
from nvidia_resiliency_ext.fault_tolerance._rendezvous.placement import few
from nvidia_resiliency_ext.fault_tolerance._rendezvous.records import MAX_LINE_BYTES
from nvidia_resiliency_ext.fault_tolerance.rdzv_utils import rdzv_config_get_as_float
from nvidia_resiliency_ext.shared_utils.clock import Clock, SystemClock
from nvidia_resiliency_ext.shared_utils.console import write_out
from nvidia_resiliency_ext.shared_utils.errors import ConfigError, NvrxError

from .check_local import (
    Finding,
    exit_code_of,
    failed,
    json_within,
    local_findings,
    passed,
    render,
    skipped,
    versions,
)

DEFAULT = "default"
_OF_THE_PROGRAM = frozenset({"version", "check", "print-completion", "print-config", "json"})
_OPTION_OF = {f"ft_{option.field}": option.field for option in OPTIONS}


class Value(NamedTuple):
    """One option: its flag, heading and value, and where the value comes from."""

    name: str
    group: str
    value: Any
    source: str


def _listing(
    args: argparse.Namespace, layers: Layers, environ: Mapping[str, str], flags: Sequence[Flag]
) -> list[Value]:
    """Return all options in the order of `--help`."""
    config = layers.config()
    values = []
    for flag in flags:
        if flag.name in _OF_THE_PROGRAM:
            continue
        field = _OPTION_OF.get(flag.attribute)
        if field is None:
            value, source = getattr(args, flag.attribute), args.given.get(flag.attribute, DEFAULT)
            if flag.group == DEPRECATED and source == DEFAULT:
                continue
        elif field == "log_level" and field not in layers.given and environ.get(_env.LOG_DEBUG):
            value, source = log_level(environ), _env.LOG_DEBUG
        else:
            given = layers.given.get(field)
            value, source = getattr(config, field), given.where if given else DEFAULT
        policy = layers.deprecated.get("restart_policy")
        if flag.name == "ft-restart-policy" and policy is not None and source == DEFAULT:
            value, source = policy.value, policy.where
        values.append(Value(f"--{flag.name}", flag.group, _plain(value), _shown(flag, source)))
    return values


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


# A check is waited for by a person: shorter than a job would wait for its nodes.
WAIT_S = 60.0


def print_config(
    args: argparse.Namespace, environ: Mapping[str, str], flags: Sequence[Flag] = FLAGS
) -> int:
    """Print every option of a program with its source."""
    layers = layers_from_args(args)
    if layers.problems:
        raise FaultToleranceConfigError(layers.problems)
    values = _listing(args, layers, environ, flags)
    if args.json:
        write_out(json.dumps({"options": [value._asdict() for value in values]}) + "\n")
        return 0
    width, lines, group = max(len(value.name) for value in values), [], ""
    for value in values:
        if value.group != group:
            lines.append(f"{value.group}:\n")
            group = value.group
        lines.append(f"  {value.name:<{width}}  {_text(value.value):<20}  {value.source}\n")
    write_out("".join(lines))
    return 0


def check(plan: LaunchPlan, environ: Mapping[str, str], *, as_json: bool) -> int:
    """Check this node and, with several, compare it with the others; print what was found."""
    clock = SystemClock()
    if plan.max_nodes > 1:
        found = _check_with_others(plan, environ, clock)
    else:
        found = [*local_findings(plan, environ, clock.wall()), skipped("other nodes", "one node")]
    write_out(render(found, as_json=as_json))
    return exit_code_of(found)


def _check_with_others(
    plan: LaunchPlan, environ: Mapping[str, str], clock: SystemClock
) -> list[Finding]:
    """Claim or resolve the endpoint, check this node and compare it with the others."""
    rules = many_nodes.rules_of(plan, environ)
    conf, token_file = plan.rdzv_configs, plan.fault_tol_cfg.rdzv_token_file
    try:
        wait_s = rdzv_config_get_as_float(conf, "join_timeout", WAIT_S) or WAIT_S
        endpoint = many_nodes.find_endpoint(plan)
        secret = endpoints.read_token(token_file) if token_file else None
    except ConfigError:
        raise
    except (NvrxError, ValueError) as error:
        return [failed("endpoint", str(error)), *local_findings(plan, environ, clock.wall())]
    hidden = f"{endpoint.host} is {endpoint.served_at} here, which other machines cannot reach"
    with endpoint.listener or contextlib.nullcontext():
        found = [
            failed("endpoint", hidden)
            if endpoint.is_hidden
            else passed("endpoint", endpoint.where),
            *local_findings(plan, environ, clock.wall()),
        ]
        report = NodeReport(
            host=socket.gethostname(),
            versions=versions(),
            settings=many_nodes.must_agree(plan, rules),
            failures=[f"{f.name}: {f.text}" for f in found if f.status == "fail"],
        )
        try:
            found += compare_nodes(plan, endpoint, report, secret, wait_s, clock)
        except NvrxError as error:
            found.append(failed("other nodes", str(error)))
    return found


# Readings of one event on all nodes differ by less than this where clocks are synchronised.
CLOCK_TOLERANCE_S = 1.0
MAX_SHOWN = 20


@dataclass(frozen=True, slots=True)
class NodeReport:
    """Versions, options and failures of a node, and its wall clock (unix s) at a common moment."""

    host: str
    versions: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)
    failures: Sequence[str] = ()
    clock: float | None = None


def compare(reports: Sequence[NodeReport]) -> list[Finding]:
    """Compare versions, options and clocks of the nodes; add the failures of each node."""
    return [
        _same("versions of all nodes", [(r.host, r.versions) for r in reports]),
        _same("options of all nodes", [(r.host, r.settings) for r in reports]),
        _clocks(reports),
        *(
            failed(f"on {report.host}", text)
            for report in [each for each in reports if each.failures][:MAX_SHOWN]
            for text in report.failures[:MAX_SHOWN]
        ),
    ]


def nodes_finding(reports: Sequence[NodeReport], least: int, most: int, waited_s: float) -> Finding:
    """Return whether all nodes came."""
    hosts = ", ".join(sorted(r.host for r in reports)[:MAX_SHOWN])
    text = f"{len(reports)} of {most} came: {hosts}"
    if len(reports) < least:
        return failed("nodes", f"{text}; at least {least} are needed, waited {waited_s:.0f} s")
    return passed("nodes", text)


def _same(name: str, reported: Sequence[tuple[str, Mapping[str, str]]]) -> Finding:
    keys = sorted({key for _, values in reported for key in values})
    different = []
    for key in keys:
        by_value: dict[str, list[str]] = {}
        for host, values in reported:
            by_value.setdefault(values.get(key, "missing"), []).append(host)
        if len(by_value) > 1:
            said = [
                f"{value} on {few(sorted(hosts), 3)}" for value, hosts in sorted(by_value.items())
            ]
            different.append(f"{key} is {' and '.join(said)}")
    if different:
        return failed(name, "; ".join(different[:MAX_SHOWN]))
    return passed(name, f"{len(keys)} compared, all alike")


def _clocks(reports: Sequence[NodeReport]) -> Finding:
    reported = [r.clock for r in reports if r.clock is not None]
    if len(reported) < len(reports):
        return failed("clocks", f"only {len(reported)} of {len(reports)} nodes reported theirs")
    # By number: hosts may have one name, and nobody's clock is right for being the first.
    readings = {
        number: agreement.Reading(r.clock - reported[0])
        for number, r in enumerate(reports)
        if r.clock is not None
    }
    off = agreement.off_by(readings, CLOCK_TOLERANCE_S)
    if off:
        return failed("clocks", agreement.sentence([(reports[n].host, s) for n, s in off.items()]))
    return passed("clocks", f"they differ by {max(reported) - min(reported):.3f} s at most")


ANSWER_S = 10.0
GOODBYE_S = 3.0
MAX_FINDINGS = 40
_MAX_TEXT = 1000


def compare_nodes(
    plan: LaunchPlan,
    endpoint: many_nodes.StoreEndpoint,
    report: NodeReport,
    secret: bytes | None,
    wait_s: float,
    clock: Clock,
) -> list[Finding]:
    """Exchange reports through a store of their own; return the findings, the same on each node."""
    prefix = keys.prefix(f"{plan.run_id}:check")
    server, serves = None, endpoint.listener is not None
    if endpoint.listener is not None:
        server = stores.serve(endpoint.listener, endpoint.host, plan.max_nodes)
        secret = secret or stores.agree_on_secret(server, prefix)
    endpoints.wait_until_reachable(endpoint.host, endpoint.port, wait_s, clock, threading.Event())
    store = stores.connect(endpoint.host, endpoint.port, prefix, secret, wait_s)

    def exchange(
        topic: str, line: object, count: int, limit_s: float, answer: Callable[[list[str]], object]
    ) -> Any:
        """Return the `answer` of the node that serves to the lines of `count` nodes."""
        store.append_line(topic, json_within(line, MAX_LINE_BYTES))
        if store.count(f"{topic}/came", 1) == count:
            store.put(f"{topic}/all", "1")
        if serves:
            store.wait_until_set(f"{topic}/all", limit_s)
            lines, _ = store.lines(topic, 0, str)
            store.put(f"{topic}/answer", json_within(answer(lines), MAX_LINE_BYTES))
        answered = store.wait_for(f"{topic}/answer", limit_s + ANSWER_S)
        if answered is None:
            raise NvrxError("the node that serves the store gave no answer; see what it says")
        return json.loads(answered)

    def compared(clocks: list[str]) -> list[dict[str, Any]]:
        clock_of: dict[str, float] = dict(map(json.loads, clocks))
        lines, _ = store.lines("reports", 0, str)
        reports = [_report(line, clock_of) for line in lines[:count]]
        nodes = nodes_finding(reports, plan.min_nodes, plan.max_nodes, wait_s)
        found = [nodes, *compare(reports)]
        return [asdict(replace(f, text=f.text[:_MAX_TEXT])) for f in found[:MAX_FINDINGS]]

    me = secrets.token_hex(8)
    try:
        count = int(exchange("reports", [me, asdict(report)], plan.max_nodes, wait_s, len))
        answer = exchange("clocks", [me, time.time()], count, ANSWER_S, compared)
        findings = [Finding(**item) for item in answer]
    except (ValueError, TypeError) as error:
        raise NvrxError(f"another version answers: {error}") from None
    if store.count("bye", 1) == count:
        store.put("gone", "1")
    if serves:
        store.wait_until_set("gone", GOODBYE_S)
    del server
    return findings


def _report(line: str, clocks: Mapping[str, float]) -> NodeReport:
    """Parse a node's report; one of another version may fail, which becomes its failure."""
    try:
        node, reported = json.loads(line)
        known = {f.name: reported[f.name] for f in fields(NodeReport) if f.name in reported}
        return replace(NodeReport(**known), clock=clocks.get(node))
    except (ValueError, TypeError):
        return NodeReport("another version", failures=("its report cannot be read",))
