# SPDX-License-Identifier: Apache-2.0
"""Runs small programs in interpreters under test and prints medians; knows no figure's meaning.

With ``--against`` both interpreters are measured in one sitting, repetition by repetition, so that
they see the same load.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_TIMEOUT_S = 120

Figures = dict[str, Any]


def parser(doc: str | None, repeats: int = 5) -> argparse.ArgumentParser:
    """Return a parser with the options that every benchmark has."""
    made = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--python", default=sys.executable, help="interpreter under test")
    made.add_argument("--against", help="interpreter to compare with, measured in the same run")
    made.add_argument("--repeats", type=int, default=repeats)
    return made


def interpreters(options: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """Yield name and path of each interpreter to measure."""
    yield "python", options.python
    if options.against:
        yield "against", options.against


def medians(
    python: str, program: str, calls: Mapping[str, Sequence[str]], repeats: int
) -> dict[str, Figures]:
    """Run a program once per call and repetition; of numbers, return the median.

    A program that fails gives the figure ``error`` only.
    """
    runs: dict[str, list[Figures]] = {label: [] for label in calls}
    for _ in range(repeats):
        for label, arguments in calls.items():
            runs[label].append(_run(python, program, arguments))
    return {label: _median(found) for label, found in runs.items()}


def show(
    what: str, python: str, label: str, figures: Figures, *, key: str, base: float | None = None
) -> None:
    """Print one JSON line."""
    line: Figures = {"bench": what, "python": python, "case": label, **figures}
    value = figures.get(key)
    if value is not None:
        line[key] = round(value, 3)
        if base:
            line["ratio"] = round(value / base, 2)
    print(json.dumps(line), flush=True)


def _run(python: str, program: str, arguments: Sequence[str]) -> Figures:
    # Without compiled files every import would measure the compiler.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    with tempfile.TemporaryDirectory() as directory:
        done = subprocess.run(
            [python, "-W", "ignore", "-c", program, *arguments],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            cwd=directory,
            env=environment,
            check=False,
        )
    if done.returncode:
        return {"error": done.stderr.strip().rpartition("\n")[2][:200]}
    found: Figures = json.loads(done.stdout.splitlines()[-1])
    return found


def _median(runs: Sequence[Figures]) -> Figures:
    last = dict(runs[-1])
    for name, value in last.items():
        if isinstance(value, float):
            last[name] = statistics.median(run[name] for run in runs if name in run)
    return last
