# SPDX-License-Identifier: Apache-2.0
"""The program `ft_launcher`: command line in, exit code out. Errors of users are one line each."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from nvidia_resiliency_ext.fault_tolerance.cli_args import PROGRAM, parse_args, usage_error
from nvidia_resiliency_ext.shared_utils.console import open_missing_streams, write_err

if TYPE_CHECKING:
    from nvidia_resiliency_ext.fault_tolerance._plan.plan import LaunchPlan


def run_command_line(argv: Sequence[str] | None) -> int:
    """Run the job that the command line asks for and return the exit code.

    SystemExit has code 2 where something that was given is wrong, 0 for `--help` and `--version`.
    """
    open_missing_streams()
    parsed = parse_args(argv)
    # Loaded only now: `--help` and a wrong command line do not pay for it.
    from nvidia_resiliency_ext.fault_tolerance._plan.plan import log_warnings, plan_from_args
    from nvidia_resiliency_ext.shared_utils.errors import ConfigError
    from nvidia_resiliency_ext.shared_utils.log_manager import setup_logger

    try:
        if parsed.print_config:
            from .check import print_config

            return print_config(parsed, os.environ)
        plan = plan_from_args(parsed, os.environ)
        setup_logger().setLevel(plan.fault_tol_cfg.log_level)
        log_warnings(plan)
        if parsed.check:
            from .check import check

            return check(plan, os.environ, as_json=parsed.json)
    except (ConfigError, OSError) as error:
        usage_error(error)
    return run_plan(plan)


def run_plan(plan: LaunchPlan) -> int:
    """Run a plan and return the exit code; what the machine refuses is one line on stderr."""
    from nvidia_resiliency_ext.fault_tolerance._agent.job import Job
    from nvidia_resiliency_ext.fault_tolerance._core.machine import EXIT_FAILURE
    from nvidia_resiliency_ext.shared_utils.errors import ConfigError, NvrxError
    from nvidia_resiliency_ext.shared_utils.event_loop import ignore

    announcing = plan.fault_tol_cfg.preempt_signal
    if announcing is not None:
        # What the job gives back at its end must not kill this process, and its exit code with it.
        ignore(announcing)
    try:
        with Job(plan, os.environ) as job:
            result = job.run()
            # Within the job: its own streams may lead into a log until it ends.
            job.show_failures(result)
    except ConfigError as error:
        usage_error(error)
    except NvrxError as error:
        text = " ".join(str(error).split())
        write_err(f"{PROGRAM}: error: {text}\n")
        return EXIT_FAILURE
    return result.exit_code
