# SPDX-License-Identifier: Apache-2.0
"""Owns the self-check: installed packages, host, hardware, what earlier runs left.

``python -m nvidia_resiliency_ext.shared_utils.doctor`` prints it; it changes nothing unless
``--clean`` is given. What is probed is in ``_doctor/``.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from ._doctor.finding import Finding
from .console import write_out

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["Finding", "findings", "main", "package_versions"]


def findings() -> list[Finding]:
    """Look at packages, host, hardware and stale run directories."""
    from ._doctor.hardware import hardware_findings
    from ._doctor.host import host_findings
    from ._doctor.packages import installed_versions, package_findings

    packages = package_findings(installed_versions())
    return [*packages, *host_findings(), *hardware_findings(), *_stale_findings()]


def package_versions() -> list[Finding]:
    """Look at the installed packages only; cheap enough for ``--version``."""
    from ._doctor.packages import installed_versions, package_findings

    return list(package_findings(installed_versions()))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program and return its exit code: 1 when a person must act, else 0.

    Args:
        argv: The arguments without the program's name; None: those of the process.
    """
    from argparse import ArgumentParser

    parser = ArgumentParser(
        prog="python -m nvidia_resiliency_ext.shared_utils.doctor",
        description="Check what is installed and what this host offers to the nvrx packages.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object per finding")
    parser.add_argument("--clean", action="store_true", help="remove stale run directories")
    options = parser.parse_args(argv)
    cleaned = _clean() if options.clean else []
    found = [*cleaned, *findings()]
    if options.json:
        import json
        from dataclasses import asdict

        lines = [json.dumps(asdict(finding)) for finding in found]
    else:
        width = max(len(finding.topic) for finding in found)
        lines = [f"{each.level:<8} {each.topic:<{width}}  {each.text}" for each in found]
    write_out("".join(f"{line}\n" for line in lines))
    return 1 if any(finding.level == "error" for finding in found) else 0


def _clean() -> list[Finding]:
    from .rundir import remove_stale_run_dirs

    return [Finding("info", "run directory", f"removed {path}") for path in remove_stale_run_dirs()]


def _stale_findings() -> Iterator[Finding]:
    from .rundir import stale_run_dirs

    for path in stale_run_dirs():
        text = f"{path} is left from a run that is over; --clean removes it"
        yield Finding("warning", "run directory", text)


if __name__ == "__main__":
    sys.exit(main())
