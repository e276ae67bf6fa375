# SPDX-License-Identifier: Apache-2.0
"""Record the public names and signatures of each package as text, so that a change shows in review.

Reads sources and imports nothing: no package needs to be installed, and the text does not depend
on the Python that runs this. A module is public when no part of its name starts with ``_``; its
public names are those in ``__all__``, followed through re-exports to their definition.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import sys
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RECORD = "tests/public_api.txt"
LAZY = "resolved at run time"
MAX_VALUE_LENGTH = 60

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


class ApiError(Exception):
    """A public module whose names cannot be read; the message says which and why."""


@dataclass
class Sources:
    """Modules of all packages below a root, parsed on demand."""

    root: Path
    parsed: dict[str, ast.Module] = field(default_factory=dict)
    recorded: dict[str, set[tuple[str, str]]] = field(default_factory=dict)

    @cached_property
    def files(self) -> dict[str, tuple[str, Path]]:
        """Map each module to its distribution's folder name and its file."""
        found = {}
        for source in sorted(self.root.glob("packages/*/src")):
            for file in sorted(source.rglob("*.py")):
                parts = file.relative_to(source).with_suffix("").parts
                name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
                found[name] = (source.parent.name, file)
        return found

    def tree(self, module: str) -> ast.Module:
        """Return the parsed module."""
        if module not in self.parsed:
            path = self.files[module][1]
            self.parsed[module] = ast.parse(path.read_text(), str(path))
        return self.parsed[module]

    def public_modules(self, distribution: str) -> list[str]:
        """Return the names of the distribution's public modules, sorted."""
        return sorted(
            module
            for module, (owner, _) in self.files.items()
            if owner == distribution
            and not any(part.startswith("_") or part.endswith("_pb2") for part in module.split("."))
            and not module.endswith("_pb2_grpc")
        )

    def absolute(self, module: str, node: ast.ImportFrom) -> str:
        """Return the absolute name of the module that an import takes names from."""
        if not node.level:
            return node.module or ""
        is_package = self.files[module][1].name == "__init__.py"
        package = module.split(".") if is_package else module.split(".")[:-1]
        base = package[: len(package) - node.level + 1]
        return ".".join([*base, *([node.module] if node.module else [])])


def exported(sources: Sources, module: str) -> list[str]:
    """Return the module's ``__all__``; without one only a module without public names passes."""
    tree = sources.tree(module)
    for node in tree.body:
        for target in assigned_names(node):
            if target == "__all__" and isinstance(node, ast.Assign | ast.AnnAssign):
                return literal_names(module, node.value)
    public = [
        node.name
        for node in tree.body
        if isinstance(node, ast.ClassDef | FunctionNode) and not node.name.startswith("_")
    ]
    is_package = sources.files[module][1].name == "__init__.py"
    if public and not is_package:
        raise ApiError(f"{module} defines {', '.join(public)} and has no __all__")
    return sorted(public)


def literal_names(module: str, value: ast.expr | None) -> list[str]:
    """Return the strings of a literal list or tuple."""
    try:
        names = ast.literal_eval(value) if value is not None else None
    except ValueError:
        names = None
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise ApiError(f"{module}: __all__ must be a literal list of names")
    return sorted(names)


def assigned_names(node: ast.stmt) -> list[str]:
    """Return the plain names that a statement assigns."""
    if isinstance(node, ast.Assign):
        return [target.id for target in node.targets if isinstance(target, ast.Name)]
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return [node.target.id]
    return []


def statements(body: list[ast.stmt]) -> list[ast.stmt]:
    """Return a module's statements with those inside ``if`` and ``try`` blocks."""
    found: list[ast.stmt] = []
    for node in body:
        found.append(node)
        if isinstance(node, ast.If | ast.Try):
            found += statements([*node.body, *node.orelse])
    return found


def describe(sources: Sources, module: str, name: str, seen: frozenset[str]) -> list[str]:
    """Return the lines that describe one public name, following re-exports."""
    if module not in sources.files or module in seen:
        return [f"{name}: from {module}"]
    body = sources.tree(module).body
    for node in statements(body):
        if isinstance(node, FunctionNode) and node.name == name:
            return [signature(name, node)]
        if isinstance(node, ast.ClassDef) and node.name == name:
            return class_lines(sources, module, node)
        if name in assigned_names(node) and isinstance(node, ast.Assign | ast.AnnAssign):
            return [value_line(name, node)]
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return imported(sources, module, node, alias, seen)
    if f"{module}.{name}" in sources.files:
        return [f"{name}: module {module}.{name}"]
    if any(isinstance(node, ast.FunctionDef) and node.name == "__getattr__" for node in body):
        return [f"{name}: {LAZY}"]
    raise ApiError(f"{module}: __all__ names {name}, which the module does not define")


def imported(
    sources: Sources, module: str, node: ast.ImportFrom, alias: ast.alias, seen: frozenset[str]
) -> list[str]:
    """Describe a name that a module takes from another one, under the name it gives it."""
    name = alias.asname or alias.name
    source = sources.absolute(module, node)
    if f"{source}.{alias.name}" in sources.files:
        return [f"{name}: module {source}.{alias.name}"]
    lines = describe(sources, source, alias.name, seen | {module})
    return [lines[0].replace(alias.name, name, 1), *lines[1:]]


def signature(name: str, node: FunctionNode) -> str:
    """Return 'def name(arguments) -> result' as written."""
    prefix = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
    result = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"{prefix} {name}({ast.unparse(node.args)}){result}"


def value_line(name: str, node: ast.Assign | ast.AnnAssign) -> str:
    """Return 'name: type = value', with a long value left out."""
    kind = f": {ast.unparse(node.annotation)}" if isinstance(node, ast.AnnAssign) else ""
    value = ast.unparse(node.value) if node.value is not None else ""
    shown = value if len(value) <= MAX_VALUE_LENGTH else "..."
    return f"{name}{kind} = {shown}" if value else f"{name}{kind}"


def class_lines(sources: Sources, module: str, node: ast.ClassDef) -> list[str]:
    """Return a class's heading and its public members: its own ones, then inherited ones.

    Inherited are those of the distribution's private classes; public ones have their own record.
    """
    bases = [ast.unparse(base) for base in node.bases]
    bases += [f"{key.arg}={ast.unparse(key.value)}" for key in node.keywords]
    lines = [f"class {node.name}({', '.join(bases)})" if bases else f"class {node.name}"]
    shown: set[str] = set()
    for ancestor in lineage(sources, module, node, set()):
        members = member_lines(ancestor)
        lines += [f"    {line}" for name, line in members if name not in shown]
        shown.update(name for name, _ in members)
    return lines


def member_lines(node: ast.ClassDef) -> list[tuple[str, str]]:
    """Return the public members that a class defines, each line with the member's name."""
    members = []
    for item in node.body:
        if isinstance(item, FunctionNode):
            if item.name.startswith("_") and item.name not in {"__init__", "__call__"}:
                continue
            marks = [ast.unparse(mark) for mark in item.decorator_list]
            if "overload" in marks:
                continue
            members += [(item.name, f"@{mark}") for mark in marks]
            members.append((item.name, signature(item.name, item)))
        elif isinstance(item, ast.Assign | ast.AnnAssign):
            members += [
                (name, value_line(name, item))
                for name in assigned_names(item)
                if not name.startswith("_")
            ]
    return members


def lineage(
    sources: Sources, module: str, node: ast.ClassDef, seen: set[tuple[str, str]]
) -> list[ast.ClassDef]:
    """Return a class and the private classes of its distribution that it inherits from.

    Each base comes with its own bases before the next one.
    """
    distribution = sources.files[module][0]
    if (module, node.name) in seen:
        return []
    seen.add((module, node.name))
    found = [node]
    for base in node.bases:
        plain = base.value if isinstance(base, ast.Subscript) else base
        place = find_class(sources, module, ast.unparse(plain), frozenset())
        if place is None or sources.files[place[0]][0] != distribution:
            continue
        if (place[0], place[1].name) not in recorded_classes(sources, distribution):
            found += lineage(sources, *place, seen)
    return found


def recorded_classes(sources: Sources, distribution: str) -> set[tuple[str, str]]:
    """Return module and name of each class that a public module of the distribution exports."""
    if distribution not in sources.recorded:
        places = [
            find_class(sources, module, name, frozenset())
            for module in sources.public_modules(distribution)
            for name in exported(sources, module)
        ]
        sources.recorded[distribution] = {(place[0], place[1].name) for place in places if place}
    return sources.recorded[distribution]


def find_class(
    sources: Sources, module: str, name: str, seen: frozenset[str]
) -> tuple[str, ast.ClassDef] | None:
    """Return where the class is defined that a module calls `name`, or `module.name`."""
    if module not in sources.files or module in seen:
        return None
    first, _, rest = name.partition(".")
    for node in statements(sources.tree(module).body):
        if isinstance(node, ast.ClassDef) and node.name == name:
            return module, node
        if not isinstance(node, ast.ImportFrom):
            continue
        for alias in node.names:
            if (alias.asname or alias.name) == first:
                source = sources.absolute(module, node)
                if rest:
                    return find_class(sources, f"{source}.{alias.name}", rest, seen | {module})
                return find_class(sources, source, alias.name, seen | {module})
    return None


def report(root: Path, distribution: str) -> str:
    """Return the text that records a distribution's public API."""
    sources = Sources(root)
    blocks = []
    for module in sources.public_modules(distribution):
        names = exported(sources, module)
        lines = [
            f"  {line}" for name in names for line in describe(sources, module, name, frozenset())
        ]
        blocks.append("\n".join([module, *lines]))
    return "\n\n".join(blocks) + "\n"


def difference(root: Path, distribution: str) -> str:
    """Return what changed against the record, as a diff; empty when nothing did."""
    path = root / "packages" / distribution / RECORD
    recorded = path.read_text() if path.exists() else ""
    return "\n".join(
        difflib.unified_diff(
            recorded.splitlines(),
            report(root, distribution).splitlines(),
            f"{distribution} (recorded)",
            f"{distribution} (now)",
            lineterm="",
        )
    )


def agrees(root: Path, distribution: str, *, write: bool) -> bool:
    """Tell whether the record is right, saying what is not; or write it."""
    try:
        if not write:
            text = difference(root, distribution)
            print(text, end="\n" if text else "")
            return not text
        path = root / "packages" / distribution / RECORD
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(report(root, distribution))
    except ApiError as error:
        print(f"{distribution}: {error}")
        return False
    return True


def main() -> int:
    """Compare or write the records of all distributions, or of the named ones."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("distributions", nargs="*")
    parser.add_argument("--write", action="store_true", help="record the API as it is now")
    parser.add_argument("--root", type=Path, default=ROOT)
    options = parser.parse_args()
    root: Path = options.root
    names = options.distributions or [p.parent.name for p in sorted(root.glob("packages/*/src"))]
    changed = [name for name in names if not agrees(root, name, write=options.write)]
    if changed and not options.write:
        print("If the change is meant: python3 tools/dev.py api --write")
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main())
