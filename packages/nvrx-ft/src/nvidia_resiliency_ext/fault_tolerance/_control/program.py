# SPDX-License-Identifier: Apache-2.0
"""The program `nvrx-control`: command line in, exit code out."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

from nvidia_resiliency_ext.shared_utils.console import open_missing_streams, write_err
from nvidia_resiliency_ext.shared_utils.errors import ConfigError, NvrxError

from .plan import CONTROL_FLAGS, PROGRAM, get_args_parser, plan_of, usage_error

logger = logging.getLogger("nvrx")

EXIT_FAILURE = 1


def run_command_line(argv: Sequence[str] | None) -> int:
    """Serve a job until it is over or a signal ends the control plane; return the exit code.

    Raises:
        SystemExit: with 2 after one line, when the command line or a file is wrong; with 0 for
            `--help` and `--version`.
    """
    open_missing_streams()
    args = get_args_parser().parse_args(argv)
    try:
        if args.print_config:
            from nvidia_resiliency_ext.fault_tolerance._cli.check import print_config

            return print_config(args, os.environ, CONTROL_FLAGS)
        plan = plan_of(args, os.environ)
    except (ConfigError, OSError) as error:
        usage_error(error)
    from nvidia_resiliency_ext.shared_utils.log_manager import setup_logger

    from .plane import ControlPlane

    setup_logger().setLevel(plan.log_level)
    for text in plan.warnings:
        logger.warning("%s", text)
    try:
        with ControlPlane(plan, os.environ) as plane:
            plane.run()
    except ConfigError as error:
        usage_error(error)
    except NvrxError as error:
        write_err(f"{PROGRAM}: error: {' '.join(str(error).split())}\n")
        return EXIT_FAILURE
    return 0
