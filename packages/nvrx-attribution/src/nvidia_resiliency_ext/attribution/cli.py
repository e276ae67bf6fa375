# SPDX-License-Identifier: Apache-2.0
"""The program `nvrx-attribution`: report what failed, where, and whether a restart helps."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from typing import TYPE_CHECKING, Any

from nvidia_resiliency_ext.shared_utils.console import plain, write_err, write_out

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nvidia_resiliency_ext.attribution.engine import Registry, Verdict
    from nvidia_resiliency_ext.attribution.refine import ModelClient

__all__ = ["main"]

_EXIT_USAGE = 2
_EXIT_UNREADABLE = 3
_EXIT_BY_ACTION = {"RESTART": 0, "CONTINUE": 0, "STOP": 10, "UNKNOWN": 11}
_NEIGHBOURS = 3
_LONGEST_NUMBER = 18
_LINE_BYTES = 64 * 1024


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the program's command line."""
    parser = argparse.ArgumentParser(
        prog="nvrx-attribution",
        description="Say what failed, where, and whether a restart helps.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    logs = commands.add_parser("analyze", help="give the verdict about the log of one attempt")
    logs.add_argument("log", nargs="+", metavar="LOG", help="the log, or its parts in their order")
    logs.add_argument("--fr", metavar="PATH", help="directory or prefix of flight-recorder dumps")
    logs.add_argument("--rank-map", metavar="FILE", help='JSON: {"<rank>": "<node>"}')
    logs.add_argument("--job-id", help="the job, for its history")
    logs.add_argument("--cycle-id", type=int, help="which run of the job's workers")
    logs.add_argument(
        "--attempt-index", type=int, default=0, help="how often the job was requeued before"
    )
    logs.add_argument("--history", metavar="FILE", help="JSON lines, or SQLite (.db): kept here")
    _add_registry(logs)
    form = logs.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print the verdict as JSON")
    form.add_argument("--text", action="store_true", help="print it for people (default)")
    logs.add_argument("--follow", action="store_true", help="read the log while it grows")
    logs.add_argument(
        "--quiet-s", type=float, metavar="S", help="with --follow: end after S seconds of silence"
    )
    logs.add_argument(
        "--llm",
        action="store_true",
        help="then ask the model of NVRX_LLM_BASE_URL, and print the verdict with what it adds",
    )
    logs.add_argument(
        "--exit-code-by-action",
        action="store_true",
        help="exit with 0 for a restart, 10 for STOP, 11 when nothing is known",
    )

    traces = commands.add_parser("fr", help="name the ranks that hold a hung job up")
    traces.add_argument("path", help="directory, file or prefix of flight-recorder dumps")
    traces.add_argument("--pattern", default="_dump_*", help="files of a directory (%(default)s)")
    traces.add_argument("--rank-regex", help="finds the rank in a file's name, as first group")
    traces.add_argument("--json", action="store_true", help="print the report as JSON")

    rules = commands.add_parser("registry", help="show and check the rules")
    tasks = rules.add_subparsers(dest="task", required=True, metavar="TASK")
    for name, text in (
        ("list", "list the rules"),
        ("check", "run the examples of all rules"),
        ("explain", "say what a reason code means"),
        ("test", "show which lines of a file the rules find"),
    ):
        task = tasks.add_parser(name, help=text)
        _add_registry(task)
        if name == "explain":
            task.add_argument("code", help="such as gpu.off_bus")
        if name == "test":
            task.add_argument("file", help="any text file")

    line = commands.add_parser("explain", help="say what the rules make of one line of a log")
    line.add_argument("place", metavar="LOG:LINE", help="the log and the line's number")
    _add_registry(line)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the program.

    Args:
        argv: The arguments without the program's name; None: those of the process.

    Returns:
        0 with a result, 2 for a wrong command line or rule file, 3 for input that cannot be read.

    Example:
        >>> import tempfile
        >>> with tempfile.NamedTemporaryFile("w") as log:
        ...     _ = log.write("NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.")
        ...     log.flush()
        ...     main(["analyze", log.name])  # doctest: +ELLIPSIS
        RESTART: gpu.off_bus (infrastructure, confidence ...
        0
    """
    from nvidia_resiliency_ext.attribution._core.errors import (
        NoTraceError,
        UnreadableInputError,
    )
    from nvidia_resiliency_ext.shared_utils.errors import ConfigError, MissingExtraError

    args = build_parser().parse_args(argv)
    run = {"analyze": _analyze, "fr": _fr, "registry": _registry, "explain": _explain}[args.command]
    try:
        return run(args)
    except (ConfigError, MissingExtraError) as error:
        write_err(plain(f"nvrx-attribution: {error}") + "\n")
        return _EXIT_USAGE
    except (NoTraceError, UnreadableInputError) as error:
        write_err(plain(f"nvrx-attribution: {error}") + "\n")
        return _EXIT_UNREADABLE


def _add_registry(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--registry", action="append", default=[], metavar="FILE", help="rules of the site; repeat"
    )


def _load(args: argparse.Namespace) -> Registry:
    from nvidia_resiliency_ext.attribution.engine import load_registry

    return load_registry(*args.registry)


def _analyze(args: argparse.Namespace) -> int:
    from nvidia_resiliency_ext.attribution import engine

    if args.history and args.job_id is None:
        write_err("nvrx-attribution: --history needs --job-id: attempts are kept by job\n")
        return _EXIT_USAGE
    model = _model() if args.llm else None
    if args.follow:
        if len(args.log) > 1:
            write_err("nvrx-attribution: --follow reads one log\n")
            return _EXIT_USAGE
        verdict = _follow(args)
        if args.history:
            from nvidia_resiliency_ext.attribution._policy.history import keep_verdict

            keep_verdict(args.history, verdict, args.attempt_index)
    else:
        verdict = engine.analyze(
            args.log,
            fr_path=args.fr,
            rank_map=args.rank_map,
            history=args.history,
            job_id=args.job_id,
            cycle_id=args.cycle_id,
            attempt_index=args.attempt_index,
            registry=_load(args),
        )
        _print(verdict, as_json=args.json)
    if model is not None:
        import asyncio

        from nvidia_resiliency_ext.attribution.refine import refine

        verdict = asyncio.run(refine(verdict, client=model, registry=_load(args)))
        _print(verdict, as_json=args.json)
    return _EXIT_BY_ACTION[verdict.action] if args.exit_code_by_action else 0


def _model() -> ModelClient:
    """Return the client of the site's model.

    Raises:
        ConfigError: None is named.
        MissingExtraError: The library for it is not installed.
    """
    import os

    from nvidia_resiliency_ext.attribution.refine import ModelClient, model_settings_from_environ
    from nvidia_resiliency_ext.shared_utils.errors import ConfigError

    settings = model_settings_from_environ(os.environ)
    if settings is None:
        raise ConfigError("--llm: no model endpoint is named; set NVRX_LLM_BASE_URL")
    return ModelClient(settings)


def _follow(args: argparse.Namespace) -> Verdict:
    """Print a verdict each time the log rests and the verdict is another one."""
    from nvidia_resiliency_ext.attribution import engine
    from nvidia_resiliency_ext.attribution._logs.following import LogFollower

    scanner = engine.LogScanner(
        rank_map=args.rank_map,
        history=args.history,
        job_id=args.job_id,
        cycle_id=args.cycle_id,
        attempt_index=args.attempt_index,
        registry=_load(args),
        fr_report=engine.fr_report_of(args.fr),
    )
    shown: tuple[Any, ...] = ()

    def show(verdict: Verdict) -> None:
        nonlocal shown
        now = (verdict.action, verdict.reason_code, verdict.first_fault)
        if now != shown:
            shown = now
            _print(verdict, as_json=args.json)

    with LogFollower(args.log[0]) as follower, contextlib.suppress(KeyboardInterrupt):
        for data in follower.chunks(args.quiet_s):
            scanner.feed(data)
            if not data:
                show(scanner.snapshot())
    verdict = scanner.finish()
    show(verdict)
    return verdict


def _print(verdict: Verdict, *, as_json: bool) -> None:
    write_out(json.dumps(verdict.to_dict()) + "\n" if as_json else format_verdict(verdict))


def format_verdict(verdict: Verdict) -> str:
    """Return a verdict as text for people."""
    fault = verdict.first_fault
    lines = [
        (
            f"{verdict.action}: {verdict.reason_code} ({verdict.domain},"
            f" confidence {verdict.confidence:.2f})"
        ),
        f"  why: {verdict.explanation}",
    ]
    if fault is not None:
        where = [f"line {fault.line}"]
        where += [f"rank {fault.rank}"] if fault.rank is not None else []
        where += [f"node {fault.node}"] if fault.node is not None else []
        where += [fault.time] if fault.time is not None else []
        lines += [f"  first fault: {', '.join(where)}", f"    {fault.text}"]
    if verdict.suspect_ranks:
        from nvidia_resiliency_ext.shared_utils.rank_sets import format_ranks

        lines.append(f"  suspect ranks: {format_ranks(verdict.suspect_ranks)}")
    if verdict.exclude_nodes:
        lines.append(f"  nodes to exclude: {', '.join(verdict.exclude_nodes)}")
    progress = verdict.progress
    step = "none" if progress.last_step is None else progress.last_step
    lines.append(f"  phase: {verdict.phase}; last completed step: {step}")
    retry = verdict.retry
    lines.append(f"  retries: {retry.used} of {retry.budget} used ({retry.rule})")
    refinement = verdict.refinement
    if refinement is not None:
        added = refinement.get("summary") if refinement["used"] else refinement["error"]
        lines.append(f"  model{'' if refinement['used'] else ' (not used)'}: {added}")
        if refinement.get("refused"):
            lines.append(f"  refused of the model's answer: {', '.join(refinement['refused'])}")
    for event in verdict.events[:8]:
        ranks = f", ranks {event.ranks}" if event.ranks else ""
        lines.append(f"  {event.role} {event.code} x{event.count}, line {event.first_line}{ranks}")
    return "\n".join(plain(line) for line in lines) + "\n"


def _fr(args: argparse.Namespace) -> int:
    from nvidia_resiliency_ext.attribution._traces.analysis import analyze_traces
    from nvidia_resiliency_ext.attribution._traces.table import format_summary

    analysis = analyze_traces(args.path, args.pattern, rank_regex=args.rank_regex)
    if args.json:
        write_out(json.dumps(analysis.to_dict(), indent=2) + "\n")
    else:
        write_out(format_summary(analysis))
    return 0


def _registry(args: argparse.Namespace) -> int:
    registry = _load(args)
    if args.task == "list":
        rows = sorted(registry.rules, key=lambda rule: rule.id)
        write_out("".join(f"{rule.id:28} {rule.code:24} {rule.role}\n" for rule in rows))
        return 0
    if args.task == "check":
        problems = registry.check()
        write_out("".join(f"{problem}\n" for problem in problems))
        write_out(f"{len(registry.rules)} rules, {len(problems)} problems\n")
        return _EXIT_USAGE if problems else 0
    if args.task == "explain":
        return _explain_code(registry, args.code)
    for number, text in enumerate(_lines(args.file), 1):
        for found in _found(registry, text)[:1]:
            write_out(plain(f"{number}: {found} | {text[:160]}") + "\n")
    return 0


def _explain_code(registry: Registry, name: str) -> int:
    if name not in registry.codes:
        import difflib

        near = difflib.get_close_matches(name, registry.codes, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        write_err(plain(f"nvrx-attribution: {name!r} is no reason code{hint}") + "\n")
        return _EXIT_USAGE
    code = registry.codes[name]
    early = "; STOP before the first completed step" if code.stop_first else ""
    write_out(
        f"{code.name}: {code.domain}, {code.action}{early}, {code.budget} repeats without progress,"
        f" confidence {code.confidence}{', node excluded' if code.exclude else ''}\n"
    )
    for rule in registry.rules:
        if rule.code == name:
            write_out(f"  {rule.id} ({rule.role}): {rule.pattern}\n")
    return 0


def _explain(args: argparse.Namespace) -> int:
    from nvidia_resiliency_ext.attribution._logs.dialects import LineReader

    path, _, number_text = args.place.rpartition(":")
    is_number = number_text.isdecimal() and len(number_text) <= _LONGEST_NUMBER
    if not path or not is_number or int(number_text) < 1:
        write_err("nvrx-attribution: give LOG:LINE, such as job.log:120\n")
        return _EXIT_USAGE
    registry = _load(args)
    number = int(number_text)
    near: dict[int, str] = {}
    count = 0
    for count, text in enumerate(_lines(path), 1):
        if abs(count - number) <= _NEIGHBOURS:
            near[count] = text
    if number not in near:
        write_err(plain(f"nvrx-attribution: {path} has {count} lines") + "\n")
        return _EXIT_UNREADABLE
    for at, text in near.items():
        mark = ">" if at == number else " "
        write_out(plain(f"{mark} {at}: {text[:200]}") + "\n")
    line = LineReader().read(near[number].encode())
    write_out(plain(f"rank {line.rank}, node {line.node}, text: {line.text[:200]}") + "\n")
    found = _found(registry, near[number])
    write_out("".join(f"rule {item}\n" for item in found) or "no rule finds it\n")
    return 0


def _found(registry: Registry, text: str) -> list[str]:
    """Return the rules that find a line, the one that counts first."""
    from nvidia_resiliency_ext.attribution._logs.dialects import LineReader

    body = LineReader().read(text.encode()).text
    rules = [rule for rule in registry.rules if rule.matches(body)]
    return [f"{rule.id} -> {rule.code} ({rule.role})" for rule in rules]


def _lines(path: str) -> Iterator[str]:
    """Yield the lines of a file, each cut to what a person reads."""
    from nvidia_resiliency_ext.attribution._core.errors import UnreadableInputError

    try:
        with open(path, "rb") as file:
            while part := file.readline(_LINE_BYTES):
                line = part
                while part and not part.endswith(b"\n"):
                    part = file.readline(_LINE_BYTES)
                yield line.decode("utf-8", "replace").rstrip("\n")
    except OSError as error:
        raise UnreadableInputError(path, error.strerror or str(error)) from None


if __name__ == "__main__":
    sys.exit(main())
