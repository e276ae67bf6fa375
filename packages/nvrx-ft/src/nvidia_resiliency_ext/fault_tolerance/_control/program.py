# SPDX-License-Identifier: Apache-2.0
"""The program `nvrx-control`: command line in, exit code out."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Sequence

from nvidia_resiliency_ext.shared_utils.console import open_missing_streams, write_err
from nvidia_resiliency_ext.shared_utils.errors import ConfigError, NvrxError

from .plan import PROGRAM, plan_from_command_line

logger = logging.getLogger("nvrx")

EXIT_FAILURE = 1
EXIT_USAGE = 2


def run_command_line(argv: Sequence[str] | None) -> int:
    """Serve a job until it is over or a signal ends the control plane; return the exit code."""
    open_missing_streams()
    plan = plan_from_command_line(argv)
    from nvidia_resiliency_ext.shared_utils.log_manager import setup_logger

    from .plane import ControlPlane

    setup_logger().setLevel(plan.log_level)
    stop = threading.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, lambda *_: stop.set())
    try:
        with ControlPlane(plan, stop) as plane:
            plane.run()
    except ConfigError as error:
        return _say(error, EXIT_USAGE)
    except NvrxError as error:
        return _say(error, EXIT_FAILURE)
    return 0


def _say(error: NvrxError, code: int) -> int:
    write_err(f"{PROGRAM}: error: {' '.join(str(error).split())}\n")
    return code
