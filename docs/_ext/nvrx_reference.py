# SPDX-License-Identifier: Apache-2.0
"""A page for each public module, and the directive `nvrx-modules DIST` that lists them.

The pages are written to `docs/reference/DIST` when a build begins. The tables of the other
reference pages stand in the repository: `tools/gen_reference.py`.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from docutils import nodes
from sphinx.util.docutils import SphinxDirective

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parents[2]
COMMON = "nvrx-common"
PACKAGE = "nvidia_resiliency_ext."
REFERENCE = ROOT / "docs" / "reference"
BACK = re.compile(r'<a class="viewcode-back" href="[^"#]*#(?P<name>[^"]*)">[^<]*</a>')


def sources(pattern: str = "*") -> Iterable[tuple[Path, ast.Module]]:
    """Yield each module of the packages with its syntax tree."""
    for path in sorted(ROOT.glob(f"packages/{pattern}/src/**/*.py")):
        yield path, ast.parse(path.read_text(), str(path))


@cache
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
    """List the public modules of a distribution with the first line of each."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Return the list and a hidden table of contents.

        An item has the anchors of what its page documents, so that links to it lead to the item.
        """
        distribution = self.arguments[0]
        names = sorted(public_modules(distribution))
        modules = [importlib.import_module(name) for name in names]
        lines = []
        for name, module in zip(names, modules, strict=True):
            summary, title = (module.__doc__ or "").splitlines()[0], name.removeprefix(PACKAGE)
            lines.append(f"- :doc:`{title} <{distribution}/{name}>`: {summary}")
        lines += ["", ".. toctree::", "   :hidden:", "   :glob:", "", f"   {distribution}/*"]
        listed = self.parse_text_to_nodes("\n".join(lines))
        for name, module, item in zip(names, modules, listed[0].children, strict=True):
            item["ids"] += [f"module-{name}", nodes.make_id(name)]
            item["ids"] += [f"{name}.{each}" for each in module.__all__]
        return listed


def page_of(name: str, homes: dict[int, str]) -> str:
    """Return the page that documents what a module exports, unless another module's page does."""
    module = importlib.import_module(name)
    own: list[str] = []
    elsewhere: list[str] = []
    for item in module.__all__:
        home = homes.get(id(getattr(module, item)), name)
        if home == name:
            own.append(item)
        else:
            elsewhere.append(f"``{item}`` (see :py:mod:`{home}`)")
    title = name.removeprefix(PACKAGE)
    lines = [title, "=" * len(title), "", f".. automodule:: {name}"]
    values = {item: getattr(module, item) for item in own}
    called = in_order({item: value for item, value in values.items() if is_shown(value)})
    others = [item for item in own if item not in called]
    lines += [f"   :members: {', '.join(others)}"] if others else []
    for item, directive in called.items():
        lines += ["", f".. {directive}:: {name}.{item}"]
        lines += ["   :members:"] if directive != "autofunction" else []
        if has_private_parts(values[item], homes):
            stops = ", ".join(documented_bases(values[item], homes))
            lines += [f"   :inherited-members: {stops}"]
    lines += ["", *([f"Also exports {', '.join(elsewhere)}.", ""] if elsewhere else [])]
    return "\n".join(lines)


def is_shown(value: object) -> bool:
    """Return whether a directive of its own documents it: a class or function with a docstring."""
    return (isinstance(value, type) or inspect.isfunction(value)) and bool(value.__doc__)


def in_order(values: dict[str, Any]) -> dict[str, str]:
    """Return the directive of each class and function: the class that can do most comes first."""
    order = ("autoclass", "autofunction", "autoexception")
    places: dict[str, tuple[int, int]] = {}
    for name, value in values.items():
        if isinstance(value, type):
            methods = [each for each in dir(value) if callable(getattr(value, each, None))]
            public = sum(not each.startswith("_") for each in methods)
            places[name] = (2 if issubclass(value, BaseException) else 0, -public)
        else:
            places[name] = (1, 0)
    return {name: order[places[name][0]] for name in sorted(values, key=places.__getitem__)}


def documented_bases(value: type, homes: dict[int, str]) -> list[str]:
    """Return the names of the bases whose members stand elsewhere, or are not ours."""
    return sorted({base.__name__ for base in value.__mro__[1:] if not is_private(base, homes)})


def has_private_parts(value: object, homes: dict[int, str]) -> bool:
    """Return whether a class has members of a base that no page documents."""
    if not isinstance(value, type) or any(base is Protocol for base in value.__mro__):
        return False
    hidden = [base for base in value.__mro__[1:] if is_private(base, homes)]
    names = {name for base in hidden for name in vars(base) if not name.startswith("_")}
    return bool(names - set(vars(value)))


def is_private(base: type, homes: dict[int, str]) -> bool:
    """Return whether a class is ours and exported by no public module."""
    return id(base) not in homes and base.__module__.startswith(PACKAGE)


@cache
def homes_of(distribution: str) -> dict[int, str]:
    """Return the first module that exports each class and function, by identity.

    What the others export of the common distribution is documented there.
    """
    homes = {} if distribution == COMMON else dict(homes_of(COMMON))
    for name in public_modules(distribution):
        module = importlib.import_module(name)
        for value in (getattr(module, item) for item in module.__all__):
            if callable(value):
                homes.setdefault(id(value), name)
    return homes


def write_pages(_: Sphinx) -> None:
    """Write a page for each public module, and delete those of modules that are gone."""
    left = set(REFERENCE.glob("nvrx-*/*.rst"))
    for distribution in [path.name for path in (ROOT / "packages").iterdir()]:
        (REFERENCE / distribution).mkdir(exist_ok=True)
        for name in public_modules(distribution):
            page = REFERENCE / distribution / f"{name}.rst"
            text = page_of(name, homes_of(distribution))
            if page not in left or page.read_text() != text:
                page.write_text(text)
            left.discard(page)
    for page in left:
        page.unlink()


def show_branch(_: Sphinx, __: str, ___: str, context: dict[str, Any], ____: Any) -> None:
    """Open only the branch of a page in the list beside it, not those of all modules."""
    tree = context["toctree"]
    context["toctree"] = lambda **options: tree(**{**options, "collapse": True})


def drop_false_modules(_: Sphinx, environment: Any) -> None:
    """Leave out of the list of source pages the modules that have none."""
    shown: dict[str, Any] = getattr(environment, "_viewcode_modules", {})
    for module in [module for module, entry in shown.items() if not entry]:
        del shown[module]


def drop_dead_links(app: Sphinx, page: str, _: str, context: dict[str, Any], __: Any) -> None:
    """Leave out links of a source page to names that stand under another module.

    All of its links go to one module, the first that showed something of it.
    """
    if page.startswith("_modules/") and "body" in context:
        objects = app.env.domaindata["py"]["objects"]
        context["body"] = BACK.sub(
            lambda link: link[0] if link["name"] in objects else "", context["body"]
        )


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directive and what is done to pages."""
    app.add_directive("nvrx-modules", Modules)
    app.connect("builder-inited", write_pages)
    app.connect("html-page-context", show_branch, priority=400)  # before the theme
    app.connect("env-check-consistency", drop_false_modules)
    app.connect("html-page-context", drop_dead_links)
    return {"version": "2", "parallel_read_safe": True, "parallel_write_safe": True}
