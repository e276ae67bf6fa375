# SPDX-License-Identifier: Apache-2.0
"""`ft_launcher --check` and `--print-config`: command line in, text and exit code out."""

from __future__ import annotations

import argparse
import contextlib
import socket
from collections.abc import Callable, Mapping, Sequence

from nvidia_resiliency_ext.fault_tolerance._config.errors import FaultToleranceConfigError
from nvidia_resiliency_ext.fault_tolerance._config.sources import layers_from_args
from nvidia_resiliency_ext.fault_tolerance._launch import surroundings
from nvidia_resiliency_ext.fault_tolerance._launch.flags import FLAGS, Flag
from nvidia_resiliency_ext.fault_tolerance._launch.plan import LaunchPlan
from nvidia_resiliency_ext.fault_tolerance.rdzv_utils import rdzv_config_get_as_float
from nvidia_resiliency_ext.shared_utils.clock import SystemClock
from nvidia_resiliency_ext.shared_utils.console import write_out
from nvidia_resiliency_ext.shared_utils.errors import ConfigError, NvrxError

from .findings import Finding, exit_code_of, failed, render, skipped
from .listing import listing, render_listing
from .local import local_findings, versions

__all__ = ["check", "print_config"]

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
    values = listing(args, layers, environ, surroundings.log_level(environ), flags)
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
    from nvidia_resiliency_ext.fault_tolerance._launch.many_nodes import (
        find_meeting,
        must_agree,
        rules_of,
    )
    from nvidia_resiliency_ext.fault_tolerance._rendezvous.endpoint import read_token

    from .across import compare_nodes
    from .compare import NodeReport
    from .findings import passed

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
