# SPDX-License-Identifier: Apache-2.0
"""Write the tables of the reference pages from the code, so that they can be read anywhere.

A page of ``docs/reference`` or ``docs/guides`` holds each table between
``<!-- generated: KIND -->`` and ``<!-- end -->``: ``options`` are the configuration keys,
``arguments MODULE:FUNCTION`` a command line by its parser, ``program MODULE [WORD]`` one by its
``main``, ``variables`` the environment variables, ``exit-codes`` the launcher's exit codes,
``events`` the kinds of events, ``metrics`` the exported figures, ``parameters MODULE:CLASS`` what a
class is made with. ``defaults MODULE:CLASS`` fills in only the second column of a table whose first
column names parameters. What the code cannot say about variables and exit codes stands in
``meanings.json``; an entry that is missing there, or that the code no longer has, is an error.

Without arguments the pages are written; with ``--check`` a page that is not up to date is an error.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import json
import re
import sys
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

ROOT = Path(__file__).resolve().parent.parent
FAULT_TOLERANCE = "nvidia_resiliency_ext.fault_tolerance"
SHARED = "nvidia_resiliency_ext.shared_utils"
VARIABLE = re.compile(r"(NVRX|FT|TORCHELASTIC|TORCH_ELASTIC|SLURM|PET)_[A-Z0-9_]*[A-Z0-9]")
EXIT_CODE = re.compile(r"EXIT_[A-Z_]+|DEFAULT_NO_RESTART_EXIT_CODE")
BLOCK = re.compile(
    r"(?P<begin><!-- generated: (?P<kind>.*?) -->\n)(?P<old>.*?)(?P<end><!-- end -->)", re.DOTALL
)


class DriftError(Exception):
    """``meanings.json`` and the code do not have the same names."""


def cell(text: str) -> str:
    """Return text for a cell of a Markdown table; what stands between backticks is code."""
    parts = " ".join(text.split()).split("`")
    for index in range(0, len(parts), 2):
        parts[index] = re.sub(r"([\\*<\[\]])", r"\\\1", parts[index])
    return "`".join(parts).replace("|", r"\|")


def table(heading: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [heading, ["---"] * len(heading), *(map(cell, row) for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def sources(pattern: str = "*") -> Iterable[tuple[Path, ast.Module]]:
    """Yield each module of the packages with its syntax tree."""
    for path in sorted(ROOT.glob(f"packages/{pattern}/src/**/*.py")):
        yield path, ast.parse(path.read_text(), str(path))


def meanings(kind: str, found: set[str]) -> dict[str, str]:
    """Return what is written about each name found in the code.

    Raises:
        DriftError: A name has no meaning, or a meaning no name.
    """
    path = ROOT / "docs" / "reference" / "meanings.json"
    written: dict[str, str] = json.loads(path.read_text())[kind]
    drift = [
        f"{path}: {name} of the code is not in {kind!r}" for name in sorted(found - set(written))
    ]
    drift += [
        f"{path}: {kind!r} has {name}, which is not in the code"
        for name in sorted(set(written) - found)
    ]
    if drift:
        raise DriftError("\n".join(drift))
    return {name: written[name] for name in sorted(found)}


def options() -> str:
    """Return a table of configuration keys for each group."""
    option_table = importlib.import_module(f"{FAULT_TOLERANCE}._config.table")
    parts = []
    for group in option_table.GROUPS:
        rows = [
            (
                f"`{option.field}`",
                f"`--{option.flag}`",
                option.kind.expects,
                f"`{option.default_text}`",
                option.help,
            )
            for option in option_table.OPTIONS
            if option.group == group
        ]
        parts.append(
            f"## {group}\n\n" + table(("key", "flag", "value", "default", "meaning"), rows)
        )
    return "\n".join(parts)


def arguments(parser_name: str) -> str:
    """Return a table of flags for each group of the parser that MODULE:FUNCTION returns."""
    module, _, function = parser_name.partition(":")
    parser: argparse.ArgumentParser = getattr(importlib.import_module(module), function)()
    parts = []
    for group in parser._action_groups:  # noqa: SLF001 - argparse shows its groups nowhere else
        rows = [
            (spelling(action), help_of(parser, action))
            for action in group._group_actions  # noqa: SLF001
            if action.help != argparse.SUPPRESS
        ]
        if rows:
            parts.append(f"## {group.title}\n\n" + table(("argument", "meaning"), rows))
    return "\n".join(parts)


class ParserFoundError(BaseException):
    """Carries a program's parser out of its ``main``, past all that catches exceptions."""


def program(module: str, *words: str) -> str:
    """Return what a program is for, with a table of its arguments and one for each command."""

    def print_help(parser: argparse.ArgumentParser, _: object = None) -> None:
        raise ParserFoundError(parser)

    with (
        mock.patch.object(argparse.ArgumentParser, "print_help", print_help),
        mock.patch.object(sys, "argv", [module, *words, "--help"]),
    ):
        try:
            importlib.import_module(module).main()
        except ParserFoundError as found:
            return program_table(found.args[0])
    raise DriftError(f"{module}:main does not end with its help")


def program_table(parser: argparse.ArgumentParser) -> str:
    """Return the description and arguments of a parser, then those of each of its commands."""
    rows: list[tuple[str, str]] = []
    commands: list[tuple[argparse.ArgumentParser, str | None]] = []
    for action in parser._actions:  # noqa: SLF001 - argparse shows its actions nowhere else
        if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001
            texts = {each.dest: each.help for each in action._choices_actions}  # noqa: SLF001
            commands += [(each, texts.get(name)) for name, each in action.choices.items()]
        elif action.help not in {argparse.SUPPRESS, None} and action.dest != "help":
            rows.append((spelling(action), help_of(parser, action)))
    parts = [f"{cell(parser.description)}\n"] if parser.description else []
    parts += [table(("argument", "meaning"), rows)] if rows else []
    for command, text in commands:
        said = f"{cell(text)}\n\n" if text and not command.description else ""
        parts.append(f"### `{command.prog}`\n\n{said}{program_table(command)}")
    return "\n".join(parts)


def spelling(action: argparse.Action) -> str:
    """Return how the argument is written; of two spellings, the one with dashes."""
    names = [name for name in action.option_strings if "_" not in name]
    shown = names or list(action.option_strings) or [action.dest]
    if action.choices is not None:
        value = " {" + ",".join(map(str, action.choices)) + "}"
    else:
        value = f" {action.metavar or action.dest.upper()}" if action.nargs != 0 else ""
    return ", ".join(f"`{name}{value if action.option_strings else ''}`" for name in shown)


def help_of(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    """Return the help text with its placeholders filled in."""
    values: dict[str, Any] = {**vars(action), "prog": parser.prog}
    return (action.help or "") % values


def variables() -> str:
    """Return a table of the environment variables that appear in the code, and where."""
    users: dict[str, set[str]] = {}
    for path, tree in sources():
        # What a module exports names its constants, not variables.
        body = [node for node in tree.body if "__all__" not in ast.unparse(node).split("=")[0]]
        for node in ast.walk(ast.Module(body, [])):
            value = node.value if isinstance(node, ast.Constant) else None
            if isinstance(value, str) and VARIABLE.fullmatch(value):
                users.setdefault(value, set()).add(path.relative_to(ROOT).parts[1])
    rows = [
        (f"`{name}`", ", ".join(sorted(users[name])), text)
        for name, text in meanings("variables", set(users)).items()
    ]
    return table(("variable", "package", "meaning"), rows)


def exit_codes() -> str:
    """Return a table of the exit codes of the launcher."""
    codes: dict[str, int] = {}
    for _, tree in sources("nvrx-ft"):
        for node in tree.body:
            if isinstance(node, (ast.Assign, ast.AnnAssign)):
                target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
                name, value = ast.unparse(target), node.value
                if EXIT_CODE.fullmatch(name) and isinstance(value, ast.Constant):
                    codes[name] = int(str(value.value))
    rows = [(f"`{codes[name]}`", text) for name, text in meanings("exit_codes", set(codes)).items()]
    return table(("code", "meaning"), sorted(rows))


def events() -> str:
    """Return a section for each kind of event, with a table of its fields."""
    classes = vars(importlib.import_module(f"{SHARED}._events.kinds")).values()
    kinds: list[Any] = [e for e in classes if isinstance(e, type) and vars(e).get("kind")]
    parts = []
    for each in kinds:
        summary, entries = documented(each)
        types: dict[str, str] = {}
        for base in reversed(each.__mro__):
            types.update(vars(base).get("__annotations__", {}))
        if set(entries) != set(each.field_names()):
            raise DriftError(f"{each.__name__}: `Args:` and fields differ: {', '.join(entries)}")
        rows = [(f"`{name}`", type_in_words(types[name]), text) for name, text in entries.items()]
        parts.append(
            f"### `{each.kind}`\n\n{summary}\n\n" + table(("field", "type", "meaning"), rows)
        )
    return "\n".join(parts)


def documented(each: type) -> tuple[str, dict[str, str]]:
    """Return the first line of a class's docstring, and the text of each entry of `Args:`.

    A class without entries has those of its base.
    """
    lines = inspect.cleandoc(each.__doc__ or "").splitlines()
    entries: dict[str, str] = {}
    name = ""
    for line in lines[lines.index("Args:") + 1 if "Args:" in lines else len(lines) :]:
        if line and not line.startswith(" "):
            break
        if line.startswith("    ") and not line.startswith("     "):
            name, _, text = line.strip().partition(": ")
            entries[name] = text
        elif line:
            entries[name] += f" {line.strip()}"
    if not entries and each.__mro__[1] is not object:
        entries = documented(each.__mro__[1])[1]
    return lines[0], entries


def type_in_words(annotation: str) -> str:
    """Return the JSON types that an annotation stands for."""
    words = {
        "str": "text",
        "int": "whole number",
        "float": "number",
        "bool": "true or false",
        "Sequence[int]": "list of whole numbers",
        "Sequence[str]": "list of texts",
        "Sequence[float]": "list of numbers",
        "Mapping[str, float]": "object of numbers",
    }
    return " or ".join(words[part] for part in annotation.split(" | ") if part != "None")


def metrics() -> str:
    """Return a table of the figures that `nvrx-report` exports."""
    module = importlib.import_module(f"{SHARED}._report.metrics")
    calls = [
        node
        for node in ast.walk(ast.parse(inspect.getsource(module.metrics_of)))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "_metric"
    ]
    rows = []
    for call in sorted(calls, key=lambda call: call.lineno):
        name, text, *rest = (getattr(each, "value", None) for each in call.args)
        labels = f"{{{rest[1]}}}" if rest[1:] else ""
        kind = module.Metric(name, text, {}, "").kind
        rows.append((f"`{name}{labels}`", kind, str(text)))
    return table(("metric", "type", "meaning"), rows)


def defaults_of(class_name: str) -> dict[str, str]:
    """Return the default of each parameter of MODULE:CLASS, as text for people."""
    module, _, name = class_name.partition(":")
    signature = inspect.signature(getattr(importlib.import_module(module), name))
    return {each.name: in_words(each.default) for each in signature.parameters.values()}


def in_words(value: object) -> str:
    """Return a default as a reader writes it; times in seconds."""
    if value is inspect.Parameter.empty:
        return "required"
    if isinstance(value, timedelta):
        return f"{value.total_seconds():g} s"
    if isinstance(value, type):
        return f"`{value.__name__}`"
    parts = getattr(value, "instances", (value,))
    if value is None or isinstance(value, (bool, int, float, str)):
        return f"`{value!r}`"
    return ", ".join(f"`{type(part).__name__}()`" for part in parts)


def parameters(class_name: str) -> str:
    """Return a table of the parameters of MODULE:CLASS."""
    module, _, name = class_name.partition(":")
    _, entries = documented(getattr(importlib.import_module(module), name))
    found = defaults_of(class_name)
    if set(found) != set(entries):
        raise DriftError(f"{class_name}: `Args:` names {sorted(set(found) ^ set(entries))}")
    rows = [(f"`{each}`", found[each], text) for each, text in entries.items()]
    return table(("parameter", "default", "meaning"), rows)


def with_defaults(class_name: str, text: str) -> str:
    """Return a table with its second column filled in, by the names in its first.

    Raises:
        DriftError: The first column names something that is no parameter.
    """
    known = defaults_of(class_name)
    lines = text.strip().splitlines()
    for number, line in enumerate(lines[2:], 2):
        cells = line.split(" | ")
        names = re.findall(r"`(\w+)`", cells[0])
        if not names or not set(names) <= set(known):
            raise DriftError(f"{class_name} has no parameter of the row: {line}")
        lines[number] = " | ".join([cells[0], ", ".join(known[each] for each in names), *cells[2:]])
    return "\n".join(lines) + "\n"


def filled(page: str) -> str:
    """Return a page with its tables made anew."""
    plain = {
        "options": options,
        "variables": variables,
        "exit-codes": exit_codes,
        "events": events,
        "metrics": metrics,
    }

    def made(match: re.Match[str]) -> str:
        kind, _, argument = match["kind"].partition(" ")
        if kind == "arguments":
            text = arguments(argument)
        elif kind == "program":
            text = program(*argument.split())
        elif kind == "parameters":
            text = parameters(argument)
        elif kind == "defaults":
            text = with_defaults(argument, match["old"])
        else:
            text = plain[kind]()
        return f"{match['begin']}\n{text}\n{match['end']}"

    return BLOCK.sub(made, page)


def main() -> int:
    """Write the pages, or say which are not up to date."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing, fail on a difference")
    folders = [ROOT / "docs" / "reference", ROOT / "docs" / "guides"]
    parser.add_argument("--pages", type=Path, nargs="+", default=folders, metavar="FOLDER")
    settings = parser.parse_args()
    stale = []
    try:
        for path in [path for folder in settings.pages for path in sorted(folder.glob("*.md"))]:
            before = path.read_text()
            after = filled(before)
            if after != before:
                stale.append(path)
                if not settings.check:
                    path.write_text(after)
    except DriftError as error:
        print(error, file=sys.stderr)
        return 1
    for path in stale:
        print(f"{path}: {'is not up to date' if settings.check else 'written'}")
    if settings.check and stale:
        print("reference: run python3 tools/dev.py reference", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
