# SPDX-License-Identifier: Apache-2.0
"""Sphinx directives that make the reference pages from the code itself.

``nvrx-modules DIST`` documents every public module of a distribution; ``nvrx-options`` the
configuration keys; ``nvrx-arguments MODULE:FUNCTION`` a command line; ``nvrx-variables`` the
environment variables and ``nvrx-exit-codes`` the exit codes. What the code cannot say about the
last two stands in ``reference/meanings.json``; an entry that is missing there, or that the code no
longer has, is a warning, and so ends the build.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from docutils import nodes
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parents[2]
MEANINGS = ROOT / "docs" / "reference" / "meanings.json"
COMMON = "nvrx-common"
FAULT_TOLERANCE = "nvidia_resiliency_ext.fault_tolerance"
VARIABLE = re.compile(r"(NVRX|FT|TORCHELASTIC|SLURM|PET)_[A-Z0-9_]*[A-Z0-9]")
EXIT_CODE = re.compile(r"EXIT_[A-Z_]+|DEFAULT_NO_RESTART_EXIT_CODE")

logger = logging.getLogger(__name__)


def paragraph(text: str) -> nodes.paragraph:
    """Return a paragraph in which text between backticks is code."""
    node = nodes.paragraph()
    for index, part in enumerate(text.split("`")):
        if part:
            node += nodes.literal(part, part) if index % 2 else nodes.Text(part)
    return node


def table(heading: Sequence[str], rows: Iterable[Sequence[str]]) -> nodes.table:
    """Return a table of paragraphs."""
    group = nodes.tgroup(cols=len(heading))
    group += [nodes.colspec(colwidth=1) for _ in heading]
    head, body = nodes.thead(), nodes.tbody()
    for part, cells in [(head, heading), *((body, row) for row in rows)]:
        part.append(nodes.row("", *(nodes.entry("", paragraph(cell)) for cell in cells)))
    group += [head, body]
    node = nodes.table()
    node += group
    return node


def sources(pattern: str = "*") -> Iterable[tuple[Path, ast.Module]]:
    """Yield each module of the packages with its syntax tree."""
    for path in sorted(ROOT.glob(f"packages/{pattern}/src/**/*.py")):
        yield path, ast.parse(path.read_text(), str(path))


def meanings(kind: str, found: set[str]) -> dict[str, str]:
    """Return what is written about each name found in the code, warning of both kinds of drift."""
    written: dict[str, str] = json.loads(MEANINGS.read_text())[kind]
    for name in sorted(found - set(written)):
        logger.warning("%s: the code has %s, which is not in %r", MEANINGS, name, kind)
    for name in sorted(set(written) - found):
        logger.warning("%s: %r has %s, which is not in the code", MEANINGS, kind, name)
    return {name: written[name] for name in sorted(found & set(written))}


def public_modules(distribution: str) -> list[str]:
    """Return the modules that export something, packages last."""
    found: list[tuple[bool, str]] = []
    for path, tree in sources(distribution):
        parts = path.relative_to(ROOT / "packages" / distribution / "src").parts
        names = [part.removesuffix(".py") for part in parts if part != "__init__.py"]
        if any(name.startswith("_") or "_pb2" in name for name in names):
            continue
        if any("__all__" in ast.unparse(node).split("=")[0] for node in tree.body):
            found.append((path.name == "__init__.py", ".".join(names)))
    return [module for _, module in sorted(found)]


class Modules(SphinxDirective):
    """Document what every public module of a distribution exports, each thing once."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Return what autodoc makes of each module."""
        lines: list[str] = []
        # What the others export of the common distribution is documented there.
        homes = homes_of(self.arguments[0], homes_of(COMMON, {}))
        for name in public_modules(self.arguments[0]):
            module = importlib.import_module(name)
            own: list[str] = []
            elsewhere: list[str] = []
            for item in module.__all__:
                home = homes.get(id(getattr(module, item)), name)
                if home == name:
                    own.append(item)
                else:
                    elsewhere.append(f"``{item}`` (see ``{home}``)")
            lines += [f".. rubric:: {name}", "", f".. automodule:: {name}"]
            lines += [f"   :members: {', '.join(own)}"] if own else []
            lines += ["", *([f"Also exports {', '.join(elsewhere)}.", ""] if elsewhere else [])]
        return self.parse_text_to_nodes("\n".join(lines))


def homes_of(distribution: str, known: dict[int, str]) -> dict[int, str]:
    """Return the first module that exports each class and function, by identity."""
    homes = dict(known)
    for name in public_modules(distribution):
        module = importlib.import_module(name)
        for value in (getattr(module, item) for item in module.__all__):
            if callable(value):
                homes.setdefault(id(value), name)
    return homes


class Options(SphinxDirective):
    """Tabulate the configuration keys, by group."""

    def run(self) -> list[nodes.Node]:
        """Return one table per group."""
        option_table = importlib.import_module(f"{FAULT_TOLERANCE}._config.table")
        found: list[nodes.Node] = []
        for group in option_table.GROUPS:
            rows = [
                (
                    f"`{option.field}`",
                    f"`--{option.flag}`",
                    f"`{shown_default(option.default)}`",
                    option.help,
                )
                for option in option_table.OPTIONS
                if option.group == group
            ]
            found += [nodes.rubric(group, group), table(("key", "flag", "default", ""), rows)]
        return found


def shown_default(value: object) -> str:
    """Return a default as one writes it in YAML."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    return getattr(value, "name", None) or str(value)


class Arguments(SphinxDirective):
    """Tabulate the flags of an argument parser, by group; the argument is MODULE:FUNCTION."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Return one table per group that has flags."""
        module, _, function = self.arguments[0].partition(":")
        parser: argparse.ArgumentParser = getattr(importlib.import_module(module), function)()
        found: list[nodes.Node] = []
        for group in parser._action_groups:  # noqa: SLF001 - argparse shows its groups nowhere else
            rows = [
                (self.spelling(action), self.help(parser, action))
                for action in group._group_actions  # noqa: SLF001
                if action.help != argparse.SUPPRESS
            ]
            if rows:
                title = group.title or ""
                found += [nodes.rubric(title, title), table(("argument", ""), rows)]
        return found

    @staticmethod
    def spelling(action: argparse.Action) -> str:
        """Return how the argument is written; of two spellings, the one with dashes."""
        names = [name for name in action.option_strings if "_" not in name]
        shown = names or list(action.option_strings) or [action.dest]
        if action.choices is not None:
            value = " {" + ",".join(map(str, action.choices)) + "}"
        else:
            value = f" {action.metavar or action.dest.upper()}" if action.nargs != 0 else ""
        return ", ".join(f"`{name}{value if action.option_strings else ''}`" for name in shown)

    @staticmethod
    def help(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
        """Return the help text with its placeholders filled in."""
        values: dict[str, Any] = {**vars(action), "prog": parser.prog}
        return (action.help or "") % values


class Variables(SphinxDirective):
    """Tabulate the environment variables that appear in the code, with where they are used."""

    def run(self) -> list[nodes.Node]:
        """Return the table."""
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
        return [table(("variable", "package", "meaning"), rows)]


class ExitCodes(SphinxDirective):
    """Tabulate the exit codes of the launcher."""

    def run(self) -> list[nodes.Node]:
        """Return the table."""
        codes: dict[str, int] = {}
        for _, tree in sources("nvrx-ft"):
            for node in tree.body:
                if isinstance(node, ast.Assign | ast.AnnAssign):
                    target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
                    name, value = ast.unparse(target), node.value
                    if EXIT_CODE.fullmatch(name) and isinstance(value, ast.Constant):
                        codes[name] = int(str(value.value))
        rows = [
            (f"`{codes[name]}`", text) for name, text in meanings("exit_codes", set(codes)).items()
        ]
        return [table(("code", "meaning"), sorted(rows))]


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directives."""
    app.add_directive("nvrx-modules", Modules)
    app.add_directive("nvrx-options", Options)
    app.add_directive("nvrx-arguments", Arguments)
    app.add_directive("nvrx-variables", Variables)
    app.add_directive("nvrx-exit-codes", ExitCodes)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
