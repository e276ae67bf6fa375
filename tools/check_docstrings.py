# SPDX-License-Identifier: Apache-2.0
"""Check that public docstrings name every parameter, and run the examples in them.

Public is what `check_api.py` records. A parameter is named when it has an entry under `Args:` or
`Attributes:`, or stands between backticks: in the docstring of the function itself or in that of
its class. Fields of dataclasses count as parameters.

With ``--examples`` the examples (``>>>``) in all docstrings run instead, public or not.
"""

from __future__ import annotations

import argparse
import ast
import doctest
import importlib
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import check_api  # type: ignore[import-not-found] # it stands beside this file
from check_api import FunctionNode, Sources

if TYPE_CHECKING:
    from collections.abc import Iterator

SKIPPED_DECORATORS = ("overload", "property", "functools.cached_property", "cached_property")
QUOTED = re.compile(r"(`{1,2})([^`\n]+)\1")
VALUE_BASES = ("NamedTuple", "TypedDict")


@dataclass(frozen=True)
class Documented:
    """One public callable: where it stands, its parameters, and the text that describes them."""

    path: Path
    line: int
    name: str
    parameters: tuple[str, ...]
    text: str

    def missing(self) -> list[str]:
        """Return the parameters that the text does not name."""
        return [name for name in self.parameters if not is_named(name, self.text)]


def is_named(parameter: str, text: str) -> bool:
    """Tell whether a docstring has an entry for a parameter, or its name in backticks."""
    name = re.escape(parameter)
    entry = rf"^ +(\*{{0,2}}\w+, )*\*{{0,2}}{name}(, \*{{0,2}}\w+)*:"
    if re.search(entry, text, re.MULTILINE):
        return True
    quoted = (match[2] for match in QUOTED.finditer(text))
    return any(re.search(rf"\b{name}\b", part) for part in quoted)


def parameters_of(node: ast.FunctionDef | ast.AsyncFunctionDef, *, is_method: bool) -> list[str]:
    """Return the names of a function's parameters, without `self`, `cls` and private ones."""
    names = [each.arg for each in (*node.args.posonlyargs, *node.args.args)]
    if is_method and "staticmethod" not in map(ast.unparse, node.decorator_list):
        names = names[1:]
    names += [each.arg for each in node.args.kwonlyargs]
    names += [each.arg for each in (node.args.vararg, node.args.kwarg) if each is not None]
    return [name for name in names if not name.startswith("_")]


def fields_of(node: ast.ClassDef) -> list[str]:
    """Return the public fields of a dataclass or a named tuple; none for other classes."""
    bases = {ast.unparse(base) for base in node.bases}
    is_dataclass = any("dataclass" in ast.unparse(mark) for mark in node.decorator_list)
    if not is_dataclass and bases.isdisjoint(VALUE_BASES):
        return []
    return [
        item.target.id
        for item in node.body
        if isinstance(item, ast.AnnAssign)
        and isinstance(item.target, ast.Name)
        and not item.target.id.startswith("_")
        and "ClassVar" not in ast.unparse(item.annotation)
    ]


def definition(
    sources: Sources, module: str, name: str, seen: frozenset[str] = frozenset()
) -> tuple[str, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef] | None:
    """Return module and node of what a module calls `name`; None for values and other packages."""
    if module not in sources.files or module in seen:
        return None
    for node in check_api.statements(sources.tree(module).body):
        if isinstance(node, ast.ClassDef | FunctionNode) and node.name == name:
            return module, node
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    source = sources.absolute(module, node)
                    return definition(sources, source, alias.name, seen | {module})
    return None


def callables_of(sources: Sources, distribution: str) -> Iterator[Documented]:
    """Yield each public callable of a distribution that has parameters, once."""
    seen: set[tuple[Path, int]] = set()
    for module in sources.public_modules(distribution):
        for name in check_api.exported(sources, module):
            found = definition(sources, module, name)
            if found is None or sources.files[found[0]][0] != distribution:
                continue
            for each in described(sources, *found):
                if (each.path, each.line) not in seen and each.parameters:
                    seen.add((each.path, each.line))
                    yield each


def described(
    sources: Sources, module: str, node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
) -> Iterator[Documented]:
    """Yield a function, or a class's fields and its public methods, private bases included."""
    path = sources.files[module][1]
    if not isinstance(node, ast.ClassDef):
        parameters = parameters_of(node, is_method=False)
        text = ast.get_docstring(node) or ""
        yield Documented(path, node.lineno, node.name, tuple(parameters), text)
        return
    for ancestor in check_api.lineage(sources, module, node, set()):
        home = module if ancestor is node else home_of(sources, ancestor)
        path = sources.files[home][1]
        about = "\n".join(ast.get_docstring(each) or "" for each in (node, ancestor))
        yield Documented(path, ancestor.lineno, ancestor.name, tuple(fields_of(ancestor)), about)
        for item in ancestor.body:
            if not isinstance(item, FunctionNode) or not is_public(item):
                continue
            text = f"{about}\n{ast.get_docstring(item) or ''}"
            parameters = parameters_of(item, is_method=True)
            name = f"{ancestor.name}.{item.name}"
            yield Documented(path, item.lineno, name, tuple(parameters), text)


def home_of(sources: Sources, node: ast.ClassDef) -> str:
    """Return the module whose syntax tree holds a class."""
    return str(next(name for name, tree in sources.parsed.items() if is_in(node, tree)))


def is_in(node: ast.ClassDef, tree: ast.Module) -> bool:
    """Tell whether a class stands at the top of a module, or in an `if` or a `try` there."""
    return any(each is node for each in check_api.statements(tree.body))


def is_public(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Tell whether a method is called by users with arguments of their own."""
    marks = [ast.unparse(mark) for mark in node.decorator_list]
    if any(mark in SKIPPED_DECORATORS or mark.endswith(".setter") for mark in marks):
        return False
    return not node.name.startswith("_") or node.name in {"__init__", "__call__"}


def completed(sources: Sources, each: Documented) -> Documented:
    """Return a class with its docstring at run time: one may be completed from a table."""
    module = next(name for name, (_, path) in sources.files.items() if path == each.path)
    if "__doc__ = " not in each.path.read_text():
        return each
    text = getattr(importlib.import_module(module), each.name.partition(".")[0]).__doc__ or ""
    return Documented(each.path, each.line, each.name, each.parameters, f"{each.text}\n{text}")


def unnamed(root: Path, distributions: list[str]) -> list[str]:
    """Return a line for each public callable whose docstring lacks a parameter."""
    sources = Sources(root)
    lines = []
    for distribution in distributions:
        for each in callables_of(sources, distribution):
            missing = each.missing() and completed(sources, each).missing()
            if missing:
                place = f"{each.path.relative_to(root)}:{each.line}"
                lines.append(f"{place}: {each.name} does not name {', '.join(missing)}")
    return lines


def failed_examples(root: Path, distributions: list[str]) -> int:
    """Run the examples of all modules; return how many failed, after doctest has shown them."""
    failed = count = 0
    for name, (distribution, path) in Sources(root).files.items():
        if distribution in distributions and ">>> " in path.read_text():
            result = doctest.testmod(importlib.import_module(name))
            failed, count = failed + result.failed, count + result.attempted
    print(f"docstrings: {count - failed} of {count} lines of examples work")
    return failed


def main() -> int:
    """Check all distributions, or the named ones."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("distributions", nargs="*")
    parser.add_argument("--examples", action="store_true", help="run the examples instead")
    parser.add_argument("--root", type=Path, default=check_api.ROOT)
    options = parser.parse_args()
    root: Path = options.root
    names = options.distributions or [p.parent.name for p in sorted(root.glob("packages/*/src"))]
    if options.examples:
        return 1 if failed_examples(root, names) else 0
    lines = unnamed(root, names)
    print("\n".join(lines), end="\n" if lines else "")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
