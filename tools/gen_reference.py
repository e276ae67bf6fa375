# SPDX-License-Identifier: Apache-2.0
"""Write the tables of the reference pages from the code, so that they can be read anywhere.

A page of ``docs/reference`` holds each table between ``<!-- generated: KIND -->`` and
``<!-- end -->``: ``options`` are the configuration keys, ``arguments MODULE:FUNCTION`` a command
line, ``variables`` the environment variables, ``exit-codes`` the launcher's exit codes. What the
code cannot say about the last two stands in ``meanings.json``; an entry that is missing there, or
that the code no longer has, is an error.

Without arguments the pages are written; with ``--check`` a page that is not up to date is an error.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

ROOT = Path(__file__).resolve().parent.parent
FAULT_TOLERANCE = "nvidia_resiliency_ext.fault_tolerance"
VARIABLE = re.compile(r"(NVRX|FT|TORCHELASTIC|TORCH_ELASTIC|SLURM|PET)_[A-Z0-9_]*[A-Z0-9]")
EXIT_CODE = re.compile(r"EXIT_[A-Z_]+|DEFAULT_NO_RESTART_EXIT_CODE")
BLOCK = re.compile(
    r"(?P<begin><!-- generated: (?P<kind>.*?) -->\n).*?(?P<end><!-- end -->)", re.DOTALL
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


def filled(page: str) -> str:
    """Return a page with its tables made anew."""

    def made(match: re.Match[str]) -> str:
        kind, _, argument = match["kind"].partition(" ")
        if kind == "arguments":
            text = arguments(argument)
        else:
            text = {"options": options, "variables": variables, "exit-codes": exit_codes}[kind]()
        return f"{match['begin']}\n{text}\n{match['end']}"

    return BLOCK.sub(made, page)


def main() -> int:
    """Write the pages, or say which are not up to date."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing, fail on a difference")
    parser.add_argument("--pages", type=Path, default=ROOT / "docs" / "reference")
    settings = parser.parse_args()
    stale = []
    try:
        for path in sorted(settings.pages.glob("*.md")):
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
