# SPDX-License-Identifier: Apache-2.0
"""The program ``nvrx-report``: reads event files, and prints or writes reports.

``_report/model.py`` evaluates the events; this module is the command line, and exports
``build_timeline`` and the renderers to other programs.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import asdict

from nvidia_resiliency_ext import distribution_versions

from ._events.read import EventFile, EventFileError, read_events
from ._report.html import render_html
from ._report.metrics import ExportError, export_otlp, render_prometheus
from ._report.model import build_timeline
from ._report.text import follow, render_text, terminal_width
from ._report.timeline import Timeline
from .console import plain, write_err, write_out
from .os_utils import atomic_write

__all__ = [
    "build_timeline", "load", "main", "render_html", "render_json", "render_prometheus",
    "render_text",
]  # fmt: skip

_WRONG_INPUT = 2


def load(paths: Sequence[str]) -> list[EventFile]:
    """Read the event files `paths`; of a directory, all event files in it.

    Raises:
        EventFileError: A path is missing or is not an event file, or a directory has none.

    Example:
        >>> timeline = build_timeline(load(["/runs/42"]))  # doctest: +SKIP
        >>> print(render_text(timeline, width=100))  # doctest: +SKIP
    """
    files: list[EventFile] = []
    for path in paths:
        if os.path.isdir(path):
            files.extend(_read_directory(path))
        else:
            files.append(read_events(path))
    return files


def _read_directory(path: str) -> list[EventFile]:
    """Read the event files of a directory; one that cannot be read must not hide the others."""
    try:
        names = sorted(os.listdir(path))
    except OSError as error:
        raise EventFileError(path, error.strerror or "cannot be read") from error
    files: list[EventFile] = []
    errors: list[EventFileError] = []
    for name in names:
        if name.startswith("events-") and name.endswith(".jsonl"):
            try:
                files.append(read_events(os.path.join(path, name)))
            except EventFileError as error:
                errors.append(error)
    if not files:
        none = EventFileError(path, "no event files (events-*.jsonl) in this directory")
        raise errors[0] if errors else none
    return files + [EventFile(error.path, {}, (), 0, error.why) for error in errors]


def render_json(timeline: Timeline) -> str:
    """Return `timeline` as one JSON object."""
    fields = asdict(timeline)
    fields["wall_s"] = timeline.wall_s
    fields["faults_by_cause"] = timeline.faults_by_cause
    fields["restarts_by_layer"] = timeline.restarts_by_layer
    return json.dumps({"schema": "nvrx_report.v1", **fields}, indent=2) + "\n"


def _report_texts(paths: Sequence[str]) -> dict[str, str]:
    """Return the reports of the records under these paths, by name; none of unreadable ones."""
    found: dict[str, str] = {}
    for number, path in enumerate(paths):
        try:
            timeline = build_timeline(load([path]))
        except EventFileError:
            continue
        found[f"report-{number}.txt"] = render_text(timeline, width=120)
        found[f"report-{number}.json"] = json.dumps(json.loads(render_json(timeline)))
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program on `argv` and return its exit code: 0, or 2 where the input is not usable."""
    arguments = sys.argv[1:] if argv is None else argv
    if arguments[:1] == ["bundle"]:
        from nvidia_resiliency_ext.shared_utils._report.bundle import main as make_bundle

        return make_bundle(arguments[1:], _report_texts)
    options = _parse(arguments)
    if options.version:
        write_out(f"nvrx-report {distribution_versions().get('nvrx-common', 'of a source tree')}\n")
        return 0

    are_exports_wanted = bool(options.html or options.prometheus or options.otlp)
    complaint = ""

    def read() -> Timeline:
        return build_timeline(load(options.paths))

    def export(timeline: Timeline) -> None:
        """Write the files and send the figures that were asked for; say each trouble once."""
        nonlocal complaint
        before, complaint = complaint, _export(timeline, options)
        if complaint not in {"", before}:
            _complain(complaint)

    try:
        if options.follow:
            seen = export if are_exports_wanted else None
            return follow(options.paths, read, seen, options.width or 0)
        timeline = read()
    except EventFileError as error:
        return _complain(str(error))
    export(timeline)
    if complaint:
        return _WRONG_INPUT
    if options.json:
        write_out(render_json(timeline))
    elif not are_exports_wanted:
        write_out(render_text(timeline, width=options.width or terminal_width()))
    return 0


def _export(timeline: Timeline, options: Namespace) -> str:
    """Write and send the present state; return what went wrong first, which may pass."""
    for path, render in ((options.html, render_html), (options.prometheus, render_prometheus)):
        try:
            if path:
                _write(path, render(timeline))
        except OSError as error:
            return f"{path}: {error.strerror}"
    if options.otlp:
        try:
            export_otlp(timeline, options.otlp)
        except ExportError as error:
            return str(error)
    return ""


def _write(path: str, text: str) -> None:
    """Write a file whole, so that a browser or a collector never sees a part."""
    if os.path.exists(path) and not os.path.isfile(path):
        # A device or a pipe is written to; nothing takes its place.
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
        return
    atomic_write(_followed(path), text.encode(), mode=0o644, fsync=False)


def _followed(path: str) -> str:
    """Return where a path leads; `PermissionError` for a link of others in a shared folder."""
    folder = os.stat(os.path.dirname(path) or ".")
    is_shared = folder.st_mode & stat.S_ISVTX and folder.st_mode & stat.S_IWOTH
    if is_shared and os.path.islink(path):
        owner = os.lstat(path).st_uid
        if owner not in {os.geteuid(), folder.st_uid}:
            raise PermissionError(errno.EACCES, f"a link of user {owner} is not followed", path)
    return os.path.realpath(path)


def _parse(argv: Sequence[str]) -> Namespace:
    from .completion import PrintCompletion

    parser = ArgumentParser(
        prog="nvrx-report",
        description="Show what happened to a job and where its time went.",
        epilog="nvrx-report bundle PATH ... makes an archive for a bug report; see its --help.",
    )
    parser.add_argument(
        "paths",
        nargs="*",
        metavar="PATH",
        help="directory of event files, or an event file; default NVRX_EVENT_DIR",
    )
    parser.add_argument("--version", action="store_true", help="print the version and leave")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--html", metavar="FILE", help="write one self-contained page")
    parser.add_argument(
        "--follow",
        action="store_true",
        help="show a running job until it ends; files asked for are kept up to date",
    )
    parser.add_argument(
        "--prometheus", metavar="FILE", help="write the figures in the text format of Prometheus"
    )
    parser.add_argument(
        "--otlp",
        metavar="URL",
        help="send the figures to an OpenTelemetry collector, as http://localhost:4318"
        " (needs the extra otel)",
    )
    parser.add_argument(
        "--print-completion",
        action=PrintCompletion,
        help="print what makes a shell complete this command line, and leave",
    )
    parser.add_argument("--width", type=int, metavar="COLUMNS", help="width of the text")
    options = parser.parse_args(argv)
    options.paths = options.paths or [path for path in (os.environ.get("NVRX_EVENT_DIR"),) if path]
    if not options.paths and not options.version:
        parser.error("a PATH is needed, as NVRX_EVENT_DIR is not set")
    return options


def _complain(message: str) -> int:
    write_err(f"nvrx-report: {plain(message)}\n")
    return _WRONG_INPUT


if __name__ == "__main__":
    sys.exit(main())
