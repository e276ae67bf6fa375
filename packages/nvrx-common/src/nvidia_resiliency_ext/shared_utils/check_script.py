# SPDX-License-Identifier: Apache-2.0
"""Check scripts for names and arguments of `nvidia_resiliency_ext` that nvrx lacks or changes.

``python -m nvidia_resiliency_ext.shared_utils.check_script FILE...`` reads Python files and folders
of them without running them. The names are looked up in the installed packages, by import.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import os
import sys
import tokenize
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pkgutil import iter_modules
from typing import Any

from nvidia_resiliency_ext import distribution_versions

from .console import plain, write_err, write_out
from .errors import NvrxError

__all__ = ["Problem", "ScriptError", "check_file", "main"]

_ROOT = "nvidia_resiliency_ext"
_MAX_BYTES = 16 << 20
# The longest prefix that fits decides.
_OWNERS = {
    "attribution": "nvrx-attribution",
    "attribution.straggler": "nvrx-straggler",
    "checkpointing": "nvrx-ckpt",
    "fault_tolerance": "nvrx-ft",
    "inprocess": "nvrx-inprocess",
    "ptl_resiliency": "nvrx-lightning",
    "services": "nvrx-attribution",
    "straggler": "nvrx-straggler",
}
# What a script may rely on and the public package does otherwise; all of it: docs/differences.
_CHANGED = {
    "LocalCheckpointManager": "shards that the public package wrote count as missing",
    "BasicTensorAwareStateDict": "values that only run code could load again are refused",
    "get_write_results_queue": "nothing travels through the queue that it returns",
    "daemonize_fn": "it starts a program: the function must be importable by its name, and its"
    " arguments must be plain values",
    "NVRxLogAnalyzer": "rules give the verdict; arguments about a model change nothing",
}


class ScriptError(NvrxError):
    """A script cannot be read; the message names it and says why."""


@dataclass(frozen=True)
class Problem:
    """A name to check in `line` (from 1) of script `path`; `text` is the reason."""

    path: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.text}"


def check_file(path: str) -> list[Problem]:
    """Return uses of names that the installed nvrx packages do not have or handle differently.

    Args:
        path: A Python file of at most 16 MiB. It is parsed, never run.

    Raises:
        ScriptError: The file cannot be read, or is no Python.

    Example:
        >>> import pathlib, tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     script = pathlib.Path(folder, "train.py")
        ...     _ = script.write_text("from nvidia_resiliency_ext.shared_utils.os_utils import no")
        ...     [problem.line for problem in check_file(str(script))]
        [1]
    """
    try:
        if os.path.getsize(path) > _MAX_BYTES:
            raise ScriptError(f"{path}: larger than {_MAX_BYTES >> 20} MiB, so hardly a script")
        with tokenize.open(path) as file:
            tree = ast.parse(file.read(), path)
    except OSError as error:
        raise ScriptError(f"{path}: {error.strerror}") from error
    except SyntaxError as error:
        raise ScriptError(f"{path}:{error.lineno or 1}: no Python: {error.msg}") from error
    except (ValueError, RecursionError) as error:
        raise ScriptError(f"{path}: no Python: {error}") from error
    visitor = _Uses()
    visitor.visit(tree)
    found = sorted({(line, text) for line, text in visitor.problems})
    return [Problem(path, line, text) for line, text in found]


class _Uses(ast.NodeVisitor):
    """Follow imported names through a script, in the order of its lines."""

    def __init__(self) -> None:
        self.problems: list[tuple[int, str]] = []
        # What a dotted text of the script stands for, and the object of which it is an instance.
        self._known: dict[str, Any] = {}
        self._instances: dict[str, type] = {}

    def visit_Import(self, node: ast.Import) -> None:
        """Record `import nvidia_resiliency_ext.x [as y]`."""
        for alias in node.names:
            if _is_ours(alias.name):
                module = self._module(alias.name, node.lineno)
                if alias.asname is None:
                    module = self._module(_ROOT, node.lineno)
                self._known[alias.asname or _ROOT] = module

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        """Record `from nvidia_resiliency_ext.x import y [as z]`."""
        if node.level or not _is_ours(node.module or ""):
            return
        module = self._module(str(node.module), node.lineno)
        for alias in node.names:
            if module is not None and alias.name != "*":
                found = self._member(module, alias.name, node.lineno)
                self._known[alias.asname or alias.name] = found

    def visit_Assign(self, node: ast.Assign) -> None:
        """Record `x = Class(...)` and `x = importlib.import_module(...)`."""
        self.generic_visit(node)
        value = node.value
        made = self._resolve(value.func) if isinstance(value, ast.Call) else None
        for target in node.targets:
            text = ast.unparse(target)
            self._instances.pop(text, None)
            self._known.pop(text, None)
            if isinstance(made, type):
                self._instances[text] = made
            elif (found := self._imported(value)) or (found := self._resolve(value)):
                self._known[text] = found

    def visit_Attribute(self, node: ast.Attribute) -> None:
        """Check `module.name`, and further names below a class or module."""
        self._resolve(node)
        if not isinstance(node.value, ast.Attribute | ast.Name):
            self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        self._imported(node)
        called = self._resolve(node.func)
        if called is None and isinstance(node.func, ast.Attribute):
            owner = self._instances.get(ast.unparse(node.func.value))
            if owner is not None and not hasattr(owner, "__getattr__"):
                method = self._member(owner, node.func.attr, node.lineno)
                self._check_arguments(method, node, is_bound=True)
        elif called is not None:
            self._check_arguments(called, node, is_bound=False)

    def _imported(self, node: ast.expr) -> Any:
        """Return the module of `import_module("nvidia_resiliency_ext.x")`, else None."""
        match node:
            case ast.Call(
                func=ast.Attribute(attr="import_module") | ast.Name(id="import_module"),
                args=[ast.Constant(value=str(name)), *_],
            ) if _is_ours(name):
                return self._module(name, node.lineno)
        return None

    def _resolve(self, node: ast.expr) -> Any:
        """Return the object that an expression of dotted names denotes; None if it is unknown."""
        if not isinstance(node, ast.Attribute | ast.Name):
            return None
        known = self._known.get(ast.unparse(node))
        if known is None and isinstance(node, ast.Attribute):
            owner = self._resolve(node.value)
            if inspect.ismodule(owner) or isinstance(owner, type):
                return self._member(owner, node.attr, node.lineno)
        return known

    def _module(self, name: str, line: int) -> Any:
        try:
            return importlib.import_module(name)
        except ImportError as error:
            owner = _owner(name)
            text = f"{name} cannot be imported here: {error}"
            if owner not in distribution_versions():
                text = f"{name}: pip install {owner}"
            elif error.name and f"{name}.".startswith(f"{error.name}."):
                text = f"there is no module {error.name}{_nearest_module(error.name)}"
            self.problems.append((line, text))
        return None

    def _member(self, owner: Any, name: str, line: int) -> Any:
        where = getattr(owner, "__qualname__", owner.__name__)
        if name in _CHANGED:
            self.problems.append((line, f"{name}: {_CHANGED[name]}"))
        try:
            return getattr(owner, name)
        except ImportError as error:
            self.problems.append((line, f"{where}.{name} cannot be imported here: {error}"))
        except AttributeError:
            if inspect.ismodule(owner):
                is_package = hasattr(owner, "__path__")
                if is_package and importlib.util.find_spec(f"{where}.{name}") is not None:
                    return self._module(f"{where}.{name}", line)
                if _owner(where) not in distribution_versions():
                    self.problems.append((line, f"{where}.{name}: pip install {_owner(where)}"))
                    return None
            near = _nearest(name, dir(owner))
            self.problems.append((line, f"{where} has no {name}{near}"))
        return None

    def _check_arguments(
        self, called: Callable[..., Any], node: ast.Call, *, is_bound: bool
    ) -> None:
        try:
            parameters = list(inspect.signature(called).parameters.values())
        except (TypeError, ValueError):
            return
        if is_bound and parameters and not inspect.ismethod(called):
            parameters = parameters[1:]
        kinds = {parameter.kind for parameter in parameters}
        name = ast.unparse(node.func)
        if inspect.Parameter.VAR_KEYWORD not in kinds:
            known = [p.name for p in parameters if p.kind is not p.POSITIONAL_ONLY]
            for keyword in node.keywords:
                if keyword.arg is not None and keyword.arg not in known:
                    near = _nearest(keyword.arg, known)
                    text = f"{name}() takes no argument {keyword.arg}{near}"
                    self.problems.append((keyword.value.lineno, text))
        is_open = any(isinstance(argument, ast.Starred) for argument in node.args)
        if inspect.Parameter.VAR_POSITIONAL not in kinds and not is_open:
            places = [
                p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
            ]
            if len(node.args) > len(places):
                text = f"{name}() takes {len(places)} positional arguments, not {len(node.args)}"
                self.problems.append((node.lineno, text))


def _is_ours(module: str) -> bool:
    return module == _ROOT or module.startswith(f"{_ROOT}.")


def _owner(module: str) -> str:
    path = module.removeprefix(f"{_ROOT}.")
    fitting = [prefix for prefix in _OWNERS if f"{path}.".startswith(f"{prefix}.")]
    return _OWNERS[max(fitting, key=len)] if fitting else "nvrx-common"


def _nearest(name: str, known: Sequence[str]) -> str:
    from difflib import get_close_matches

    near = get_close_matches(name, known, 1)
    return f"; did you mean {near[0]}?" if near else ""


def _nearest_module(name: str) -> str:
    package, _, own = name.rpartition(".")
    try:
        folders = getattr(importlib.import_module(package), "__path__", ())
    except ImportError:
        return ""
    return _nearest(own, [each.name for each in iter_modules(folders)])


def _scripts(paths: Sequence[str]) -> Iterator[str]:
    """Yield the files, and the Python files below the folders."""
    for path in paths:
        if not os.path.isdir(path):
            yield path
            continue
        for folder, folders, files in os.walk(path):
            folders[:] = sorted(each for each in folders if not each.startswith("."))
            yield from (os.path.join(folder, file) for file in sorted(files) if file[-3:] == ".py")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program on `argv`; return 1 if a line needs a look, 2 if a file cannot be read."""
    from argparse import ArgumentParser

    parser = ArgumentParser(
        prog="python -m nvidia_resiliency_ext.shared_utils.check_script",
        description="Check scripts for names of nvidia_resiliency_ext that nvrx lacks or changes."
        " Nothing in them is run.",
    )
    parser.add_argument(
        "paths", nargs="+", metavar="FILE", help="a Python file, or a folder of them"
    )
    options = parser.parse_args(argv)
    try:
        found = [check_file(path) for path in _scripts(options.paths)]
    except ScriptError as error:
        write_err(f"check_script: {plain(str(error))}\n")
        return 2
    if not found:
        write_err(f"check_script: no Python file below {plain(', '.join(options.paths))}\n")
        return 2
    problems = [problem for each in found for problem in each]
    summary = f"{len(found)} file{'s' * (len(found) != 1)}: {len(problems) or 'no'} line"
    summary += f"{'s' * (len(problems) != 1)} to look at"
    write_out("".join(f"{plain(str(each))}\n" for each in [*problems, summary]))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
