# SPDX-License-Identifier: Apache-2.0
"""Public API of `nvrx-control`, the control plane of a job off its compute nodes. No logic here."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["main"]


def main(args: Sequence[str] | None = None) -> None:
    """Run `nvrx-control` with `args` (default: the command line) and leave with its exit code.

    As with the launcher's `main`, without `args` the process is taken for the program's own.
    """
    from nvidia_resiliency_ext.fault_tolerance._control.plane import run_command_line
    from nvidia_resiliency_ext.fault_tolerance._core.processes import end_program

    end_program(run_command_line(args), is_own=args is None)


if __name__ == "__main__":
    main()
