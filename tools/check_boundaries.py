# SPDX-License-Identifier: Apache-2.0
"""Check that packages share only nvrx-common, and folders import downward; imports nothing.

Fails on: a module of another distribution that is not declared; a module-level import of something
that is only an extra; an undeclared third-party package; a private name of another distribution;
one file in two distributions, or a second root ``__init__.py``; nvrx-common importing a sibling.

``[tool.nvrx] host-imports`` in a package's pyproject.toml lists modules which the user's program
brings along (torch, for nvrx-common); they may be imported inside functions.

``[tool.nvrx] layers`` lists the folders and modules of a package, lowest first, without the name of
the namespace. A module may import what stands before it. Each module must be in a layer; only an
``__init__.py`` may be left out, which then may import all, and no listed one may import it. No two
files may import each other in a circle, whatever the layers. Imports inside functions count, those
for type checkers only do not.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parent.parent
NAMESPACE = "nvidia_resiliency_ext"
COMMON = "nvrx-common"
# Import name -> name on the package index, where they differ.
ALIASES = {
    "yaml": "pyyaml",
    "grpc": "grpcio",
    "google.protobuf": "protobuf",
    "pynvml": "nvidia-ml-py",
    "multistorageclient": "multi-storage-client",
    "opentelemetry": "opentelemetry-sdk",
}
# Modules of the standard library that only Pythons after the one that runs this have.
LATER_STANDARD = {"annotationlib"}
# Several distributions share these import names; longer ones are listed in ALIASES.
SHARED_NAMES = {"google"}


@dataclass
class Distribution:
    """What one package declares and which files it has."""

    name: str
    folder: Path
    required: set[str] = field(default_factory=set)
    optional: set[str] = field(default_factory=set)
    host_imports: set[str] = field(default_factory=set)
    layers: list[str] = field(default_factory=list)
    modules: dict[str, Path] = field(default_factory=dict)
    files: set[str] = field(default_factory=set)

    def declares(self, name: str) -> bool:
        """Tell whether a requirement or an extra brings that distribution."""
        return name in self.required or name in self.optional


@dataclass(frozen=True)
class Import:
    """One imported module or name, as written in one place."""

    target: str
    line: int
    inside_function: bool


def requirement(text: str) -> tuple[str, list[str]]:
    """Split 'nvrx-common[gpu,grpc]>=0.7' into the normal name and the extras."""
    match = re.match(r"\s*([A-Za-z0-9._-]+)\s*(?:\[([^\]]*)\])?", text)
    if match is None:
        raise ValueError(f"not a requirement: {text!r}")
    extras = [part.strip() for part in (match[2] or "").split(",") if part.strip()]
    return re.sub(r"[-_.]+", "-", match[1]).lower(), extras


def load(root: Path) -> dict[str, Distribution]:
    """Read every package below ``root/packages``."""
    projects: dict[str, dict[str, Any]] = {}
    found: dict[str, Distribution] = {}
    for path in sorted(root.glob("packages/*/pyproject.toml")):
        data = tomllib.loads(path.read_text())
        project = data["project"]
        dist = Distribution(project["name"], path.parent)
        settings = data.get("tool", {}).get("nvrx", {})
        dist.host_imports = set(settings.get("host-imports", []))
        dist.layers = settings.get("layers", [])
        projects[dist.name] = project
        found[dist.name] = dist
        source = path.parent / "src"
        for file in sorted(source.rglob("*")):
            if file.is_file() and "__pycache__" not in file.parts and file.suffix != ".so":
                dist.files.add(str(file.relative_to(source)))
        # A stub without a module beside it stands for a compiled extension.
        stubs = [p for p in source.rglob("*.pyi") if not p.with_suffix(".py").exists()]
        for file in sorted([*source.rglob("*.py"), *stubs]):
            parts = file.relative_to(source).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            dist.modules[name] = file
    for dist in found.values():
        project = projects[dist.name]
        dist.required = closure(project.get("dependencies", []), projects)
        groups = project.get("optional-dependencies", {})
        dist.optional = closure([item for group in groups.values() for item in group], projects)
    return found


def closure(items: list[str], projects: dict[str, dict[str, Any]]) -> set[str]:
    """Return the names required, with what the extras of our own packages bring."""
    names: set[str] = set()
    for item in items:
        name, extras = requirement(item)
        names.add(name)
        groups = projects.get(name, {}).get("optional-dependencies", {})
        for extra in extras:
            names |= closure(groups.get(extra, []), projects)
    return names


def imports_of(path: Path, module: str) -> Iterator[Import]:
    """Yield each import of a file, with relative ones made absolute."""
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    stack: list[tuple[ast.AST, bool]] = [(ast.parse(path.read_text(), str(path)), False)]
    while stack:
        node, inside = stack.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            stack.extend((child, inside) for child in node.orelse)
            continue
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, node.lineno, inside) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            stem = ".".join([*base, *([node.module] if node.module else [])])
            yield from (Import(f"{stem}.{a.name}", node.lineno, inside) for a in node.names)
        elif isinstance(node, ast.Call):
            yield from literal_import(node, inside_function=inside)
        deeper = inside or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        stack.extend((child, deeper) for child in ast.iter_child_nodes(node))


def literal_import(node: ast.Call, *, inside_function: bool) -> Iterator[Import]:
    """Yield the module of ``import_module("name")``."""
    function = node.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    if name in {"import_module", "__import__"} and node.args:
        argument = node.args[0]
        if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
            yield Import(argument.value, node.lineno, inside_function)


def owner(target: str, owners: dict[str, str]) -> tuple[str, str] | None:
    """Return (module, distribution) of the longest module that the target names."""
    parts = target.split(".")
    for length in range(len(parts), 0, -1):
        module = ".".join(parts[:length])
        if module in owners:
            return module, owners[module]
    return None


def check_import(dist: Distribution, item: Import, owners: dict[str, str]) -> str | None:
    """Return what is wrong with one import, or None."""
    first = item.target.split(".")[0]
    if first == NAMESPACE or first in owners:
        return check_own(dist, item, owners)
    if first in sys.stdlib_module_names or first in {"__future__", *LATER_STANDARD}:
        return None
    if first in dist.host_imports:
        if item.inside_function:
            return None
        return f"imports {first} at module level; the user's program brings it, import it inside"
    package = index_name(item.target)
    if not dist.declares(package):
        return f"imports {item.target}, but {dist.name} does not declare {package}; add it"
    if package not in dist.required and not item.inside_function:
        return f"imports {package}, only an extra, at module level; import it inside a function"
    return None


def index_name(target: str) -> str:
    """Return the name on the package index of the distribution that has this module."""
    parts = target.split(".")
    for length in (2, 1):
        alias = ALIASES.get(".".join(parts[:length]))
        if alias is not None:
            return alias
    name = ".".join(parts[:2]) if parts[0] in SHARED_NAMES else parts[0]
    return re.sub(r"[-_.]+", "-", name).lower()


def check_own(dist: Distribution, item: Import, owners: dict[str, str]) -> str | None:
    """Return what is wrong with an import of one of our own modules, or None."""
    found = owner(item.target, owners)
    if found is None:
        return f"imports {item.target}, which no distribution has"
    module, other = found
    if other == dist.name:
        return check_generated(dist, module, item)
    named = [part for part in item.target.split(".") if part.startswith("_")]
    problem = None
    if dist.name == COMMON:
        problem = f"{COMMON} imports {module} of {other}; it must know no sibling, use a seam"
    elif not dist.declares(other):
        problem = f"{dist.name} imports {module} of {other} and does not declare it; use {COMMON}"
    elif any(not part.endswith("__") for part in named):
        problem = f"{dist.name} imports the private name {item.target} of {other}; make it public"
    elif other not in dist.required and not item.inside_function:
        problem = f"{other} is only an extra of {dist.name}; import {module} inside a function"
    return problem


def check_generated(dist: Distribution, module: str, item: Import) -> str | None:
    """Return what is wrong with importing generated code, which itself imports protobuf at once."""
    if is_generated(module) and "protobuf" not in dist.required and not item.inside_function:
        return (
            f"imports {module} at module level, which needs an extra; import it inside a function"
        )
    return None


def is_generated(module: str) -> bool:
    """Tell whether a module was made by the protobuf compiler."""
    return module.endswith(("_pb2", "_pb2_grpc"))


def layer_of(module: str, layers: list[str]) -> int:
    """Return the number of a module's layer; one that is not listed is above all."""
    name = f"{module.removeprefix(f'{NAMESPACE}.')}."
    return next((i for i, layer in enumerate(layers) if name.startswith(f"{layer}.")), len(layers))


def check_layers(root: Path, dist: Distribution, imports: dict[str, list[Import]]) -> Iterator[str]:
    """Yield what imports upward in a distribution, names of layers that mean nothing, circles."""
    names = [module.removeprefix(f"{NAMESPACE}.") for module in dist.modules]
    for layer in dist.layers:
        if not any(f"{name}.".startswith(f"{layer}.") for name in names):
            yield f"{dist.name} lists the layer {layer}, which it does not have"
    owners = dict.fromkeys(dist.modules, dist.name)
    graph: dict[str, set[str]] = {}
    for module, path in dist.modules.items():
        graph[module] = set()
        own = layer_of(module, dist.layers)
        if dist.layers and own == len(dist.layers) and path.name != "__init__.py":
            yield f"{path.relative_to(root)}: is in no layer of {dist.name}; add it to the list"
        for item in imports[module]:
            found = owner(item.target, owners)
            if found is None or found[0] == module:
                continue
            graph[module].add(found[0])
            if layer_of(found[0], dist.layers) > own:
                yield f"{path.relative_to(root)}:{item.line}: imports {found[0]}, a layer above it"
    for circle in circles(graph):
        yield f"{dist.name}: {', '.join(sorted(circle))} import each other in a circle"


def circles(graph: dict[str, set[str]]) -> Iterator[set[str]]:
    """Yield the sets of nodes that reach each other (Tarjan 1972)."""
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []

    def visit(node: str) -> Iterator[set[str]]:
        order[node] = lowest[node] = len(order)
        stack.append(node)
        for other in graph[node]:
            if other not in order:
                yield from visit(other)
                lowest[node] = min(lowest[node], lowest[other])
            elif other in stack:
                lowest[node] = min(lowest[node], order[other])
        if lowest[node] == order[node]:
            circle = set(stack[stack.index(node) :])
            del stack[stack.index(node) :]
            if len(circle) > 1:
                yield circle

    for node in graph:
        if node not in order:
            yield from visit(node)


def problems(root: Path) -> list[str]:
    """Return one line for each broken rule below ``root/packages``."""
    dists = load(root)
    found: list[str] = []
    holders: dict[str, str] = {}
    owners: dict[str, str] = {}
    for dist in dists.values():
        for file in sorted(dist.files):
            if file in holders:
                found.append(f"{file} is in {holders[file]} and in {dist.name}; keep one")
            elif file == f"{NAMESPACE}/__init__.py" and dist.name != COMMON:
                found.append(f"{dist.name} has {file}; only {COMMON} may")
            holders.setdefault(file, dist.name)
        for module in dist.modules:
            owners.setdefault(module, dist.name)
    for dist in dists.values():
        imports = {
            module: sorted(imports_of(path, module), key=lambda item: item.line)
            for module, path in dist.modules.items()
        }
        found.extend(check_layers(root, dist, imports))
        for module, path in dist.modules.items():
            for item in imports[module]:
                # Generated code cannot do otherwise; who imports it is held to the rule instead.
                if is_generated(module):
                    item = replace(item, inside_function=True)  # noqa: PLW2901
                problem = check_import(dist, item, owners)
                if problem is not None:
                    found.append(f"{path.relative_to(root)}:{item.line}: {problem}")
    return list(dict.fromkeys(found))


def main() -> int:
    """Check the repository, or the folder given."""
    parser = argparse.ArgumentParser(description="Check that packages share only nvrx-common.")
    parser.add_argument("root", nargs="?", type=Path, default=ROOT)
    root: Path = parser.parse_args().root
    found = problems(root)
    for line in found:
        print(line)
    count = len(load(root))
    print(f"boundaries: {len(found)} problems in {count} distributions")
    return 1 if found or not count else 0


if __name__ == "__main__":
    sys.exit(main())
