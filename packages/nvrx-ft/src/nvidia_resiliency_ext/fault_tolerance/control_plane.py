# SPDX-License-Identifier: Apache-2.0
"""The face of `nvrx-control`, the control plane of a job off its compute nodes. No logic here."""

from __future__ import annotations

import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(args: Sequence[str] | None = None) -> None:
    """Run `nvrx-control` with `args` (default: the command line) and leave with its exit code."""
    from nvidia_resiliency_ext.fault_tolerance._control.program import run_command_line

    sys.exit(run_command_line(args))


if __name__ == "__main__":
    main()
