# SPDX-License-Identifier: Apache-2.0
"""Owns the program ``nvrx-report``: reads event files, prints or writes what they say.

What the events mean is decided in ``_report/model.py``; this module is its command line and the
place from which other programs take ``build_timeline`` and the renderers.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

from ._events.read import EventFileError, read_events
from ._report.html import render_html
from ._report.model import build_timeline
from ._report.text import render_text
from .console import write_err, write_out

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Sequence

    from ._events.read import EventFile
    from ._report.timeline import Timeline

__all__ = ["build_timeline", "load", "main", "render_html", "render_json", "render_text"]

_WRONG_INPUT = 2


def load(paths: Sequence[str]) -> list[EventFile]:
    """Read event files, and all of them in directories.

    Raises:
        EventFileError: A path is missing, holds no event files, or is not one.
    """
    files: list[EventFile] = []
    for path in paths:
        if not os.path.isdir(path):
            files.append(read_events(path))
            continue
        try:
            names = sorted(os.listdir(path))
        except OSError as error:
            raise EventFileError(path, error.strerror or "cannot be read") from error
        found = [name for name in names if name.startswith("events-") and name.endswith(".jsonl")]
        if not found:
            raise EventFileError(path, "no event files (events-*.jsonl) in this directory")
        files.extend(read_events(os.path.join(path, name)) for name in found)
    return files


def render_json(timeline: Timeline) -> str:
    """Return the timeline as one JSON object."""
    fields = asdict(timeline)
    fields["wall_s"] = timeline.wall_s
    fields["faults_by_cause"] = timeline.faults_by_cause
    fields["restarts_by_layer"] = timeline.restarts_by_layer
    return json.dumps({"schema": "nvrx_report.v1", **fields}, indent=2) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program and return its exit code: 0, or 2 where the input is not usable."""
    options = _parse(argv)
    try:
        timeline = build_timeline(load(options.paths))
        if options.html:
            with open(options.html, "w", encoding="utf-8") as file:
                file.write(render_html(timeline))
    except EventFileError as error:
        return _complain(str(error))
    except OSError as error:
        return _complain(f"{options.html}: {error.strerror}")
    if options.json:
        write_out(render_json(timeline))
    elif not options.html:
        write_out(render_text(timeline, width=options.width or _terminal_width()))
    return 0


def _parse(argv: Sequence[str] | None) -> Namespace:
    from argparse import ArgumentParser

    parser = ArgumentParser(
        prog="nvrx-report",
        description="Show what happened to a job and where its time went.",
    )
    parser.add_argument(
        "paths", nargs="+", metavar="PATH", help="directory of event files, or an event file"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--html", metavar="FILE", help="write one self-contained page")
    parser.add_argument("--width", type=int, metavar="COLUMNS", help="width of the text")
    return parser.parse_args(argv)


def _terminal_width() -> int:
    try:
        return min(os.get_terminal_size(sys.stdout.fileno()).columns, 120) or 100
    except (OSError, ValueError, AttributeError):  # stdout is None when it was closed
        return 100


def _complain(message: str) -> int:
    line = "".join(char if char.isprintable() else "?" for char in message)
    write_err(f"nvrx-report: {line}\n")
    return _WRONG_INPUT


if __name__ == "__main__":
    sys.exit(main())
