# SPDX-License-Identifier: Apache-2.0
"""Analyses by name with the schema of their arguments, and their stored results.

A result is stored under the hash of its arguments, together with size and time of the files that
it is about: when one of them has changed, the result is dropped.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
import os
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nvidia_resiliency_ext.shared_utils.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

__all__ = [
    "AttributionModuleRegistry",
    "ModuleMetadata",
    "deserialize_result",
    "global_registry",
    "serialize_result",
    "stamp_of",
]

_MOST_RESULTS = 256
_MOST_RESULTS_VARIABLE = "NVRX_MCP_RESULTS_CACHE_MAX_ENTRIES"
URI = "attribution://"
_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list, tuple),
    "object": (dict,),
}


@dataclass(frozen=True)
class ModuleMetadata:
    """One analysis.

    Attributes:
        name: Name of the tool.
        module_class: Called with the arguments; returns a pipeline such as `NVRxAttribution`.
        description: What it does, for people and assistants.
        input_schema: JSON schema of the arguments: `type`, `properties`, `required`.
        output_schema: JSON schema of the result.
        requires_llm: It has no effect without a model.
        dependencies: Modules whose results it uses.
    """

    name: str
    module_class: Callable[[Any], Any]
    description: str
    input_schema: dict[str, Any]
    output_schema: dict[str, Any] = field(default_factory=dict)
    requires_llm: bool = False
    dependencies: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Kept:
    """A result with the files that it is about."""

    module: str
    result: Any
    paths: tuple[str, ...]
    stamp: str


class AttributionModuleRegistry:
    """Know analyses by name, and keep their results; for all threads.

    In all methods `name` is the analysis, `args` are its arguments, `result_id` is what
    `result_id_for_args` returned, and `uri` is `attribution://<module>/<identifier>`.

    Args:
        cache_max_entries: Results that are kept; when there are more, the older half goes.
            Default: NVRX_MCP_RESULTS_CACHE_MAX_ENTRIES, else 256.

    Example:
        >>> registry = AttributionModuleRegistry()
        >>> schema = {"type": "object", "properties": {"n": {"type": "integer", "default": 3}}}
        >>> registry.register("count", dict, "counts", schema, {})
        >>> registry.apply_defaults("count", {})
        {'n': 3}
    """

    def __init__(self, cache_max_entries: int | None = None) -> None:
        self._modules: dict[str, ModuleMetadata] = {}
        self._results: dict[str, _Kept] = {}
        self._lock = threading.Lock()
        self._given_capacity = cache_max_entries

    @property
    def capacity(self) -> int:
        """Results that are kept.

        Raises:
            ConfigError: NVRX_MCP_RESULTS_CACHE_MAX_ENTRIES is no number above 0.
        """
        given = self._given_capacity
        return _most_results() if given is None else max(1, given)

    def register(  # noqa: PLR0913, PLR0917 - the public signature
        self,
        name: str,
        module_class: Callable[[Any], Any],
        description: str,
        input_schema: dict[str, Any],
        output_schema: dict[str, Any],
        requires_llm: bool = False,
        dependencies: Sequence[str] | None = None,
    ) -> None:
        """Add an analysis, or replace the one of this name.

        Args:
            name: Name of the tool.
            module_class: Called with the arguments; returns a pipeline such as `NVRxAttribution`.
            description: One sentence for people and assistants.
            input_schema: JSON schema of the arguments: `type`, `properties`, `required`.
            output_schema: JSON schema of the result.
            requires_llm: It does nothing without a model. Default False.
            dependencies: Names of the modules whose results it takes. Default: none.
        """
        self._modules[name] = ModuleMetadata(
            name,
            module_class,
            description,
            input_schema,
            output_schema,
            requires_llm,
            tuple(dependencies or ()),
        )

    def unregister(self, name: str) -> bool:
        """Remove an analysis and its results; return whether there was one."""
        self.clear_cache(name)
        return self._modules.pop(name, None) is not None

    def get_module_metadata(self, name: str) -> ModuleMetadata | None:
        """Return the metadata of an analysis; None if there is no such analysis."""
        return self._modules.get(name)

    def list_modules(self) -> list[str]:
        """Return the names, in the order of their registration."""
        return list(self._modules)

    def create_instance(self, name: str, args: Any = None) -> Any:
        """Return a new pipeline; the caller owns it.

        Raises:
            ValueError: There is no such module.
        """
        return self._known(name).module_class({} if args is None else args)

    def get_instance(self, name: str) -> Any:
        """Return a new pipeline with default arguments: instances are never shared between calls.

        Raises:
            ValueError: There is no such module.
        """
        return self.create_instance(name, self.apply_defaults(name, {}))

    def apply_defaults(self, name: str, args: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments with the schema's defaults for those that are missing.

        Raises:
            ValueError: There is no such module.
        """
        properties = self._known(name).input_schema.get("properties", {})
        defaults = {key: spec["default"] for key, spec in properties.items() if "default" in spec}
        return {**defaults, **args}

    def check_arguments(self, name: str, args: Any) -> dict[str, Any]:
        """Return arguments that fit the schema.

        Raises:
            ValueError: There is no such module, an argument is unknown, missing or of a wrong type.
        """
        schema = self._known(name).input_schema
        properties = schema.get("properties", {})
        if not isinstance(args, dict):
            raise ValueError(f"{name}: arguments are an object")  # noqa: TRY004
        for key in schema.get("required", ()):
            if args.get(key) is None:
                raise ValueError(f"{name}: argument {key!r} is missing")
        for key, value in args.items():
            if key not in properties:
                allowed = ", ".join(properties)
                raise ValueError(f"{name}: no argument {key!r:.100}; there are {allowed}")
            kind = properties[key].get("type")
            is_number = kind in {"integer", "number"} and isinstance(value, bool)
            if value is not None and (is_number or not isinstance(value, _TYPES.get(kind, object))):
                raise ValueError(f"{name}: argument {key!r} must be of type {kind}")
        return {key: value for key, value in args.items() if value is not None}

    def result_id_for_args(self, name: str, args: Mapping[str, Any]) -> str:
        """Return the identifier of a result: the hash of the module and its sorted arguments."""
        text = json.dumps([name, dict(args)], sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()

    def cache_result(
        self,
        name: str,
        args: Mapping[str, Any],
        result: Any,
        paths: Sequence[str] = (),
        stamp: str | None = None,
    ) -> str:
        """Keep a result until one of its files changes, and return its identifier.

        Args:
            name: The module.
            args: Its arguments.
            result: The result.
            paths: Files and folders that it is about.
            stamp: What `stamp_of(paths)` returned before they were read; default: as they are now.
        """
        result_id = self.result_id_for_args(name, args)
        self.cache_result_by_id(name, result_id, result, paths, stamp)
        return result_id

    def cache_result_by_id(
        self,
        name: str,
        result_id: str,
        result: Any,
        paths: Sequence[str] = (),
        stamp: str | None = None,
    ) -> None:
        """Keep a result under an identifier.

        Args:
            name: The analysis.
            result_id: The identifier.
            result: The result.
            paths: Files and folders that the result is about; it is dropped when one of them
                changes.
            stamp: What `stamp_of(paths)` returned before the analysis; None: computed now.
        """
        kept = _Kept(name, result, tuple(paths), stamp_of(paths) if stamp is None else stamp)
        capacity = self.capacity
        with self._lock:
            self._results.pop(result_id, None)
            if len(self._results) >= capacity:
                for old in list(self._results)[: (capacity + 1) // 2]:
                    del self._results[old]
            self._results[result_id] = kept

    def get_cached_result_by_id(self, result_id: str) -> Any | None:
        """Return a kept result whose files are unchanged, or None."""
        with self._lock:
            kept = self._results.get(result_id)
        if kept is None:
            return None
        if kept.paths and stamp_of(kept.paths) != kept.stamp:
            with self._lock:
                if self._results.get(result_id) is kept:
                    del self._results[result_id]
            return None
        return kept.result

    def get_cached_result_by_uri(self, uri: str) -> Any | None:
        """Return a kept result whose files are unchanged, or None.

        Args:
            uri: `attribution://<module>/<identifier>`.
        """
        module, _, result_id = uri.removeprefix(URI).partition("/")
        with self._lock:
            kept = self._results.get(result_id)
        if kept is None or kept.module != module or not uri.startswith(URI):
            return None
        return self.get_cached_result_by_id(result_id)

    def get_cached_result_by_args(self, name: str, args: Mapping[str, Any]) -> Any | None:
        """Return a kept result whose files are unchanged, or None.

        Args:
            name: The analysis.
            args: The arguments that it had.
        """
        return self.get_cached_result_by_id(self.result_id_for_args(name, args))

    def iter_results_cache_items(self) -> Iterator[tuple[str, str, Any]]:
        """Yield (module, identifier, result) of the kept results, the oldest first."""
        with self._lock:
            items = list(self._results.items())
        for result_id, kept in items:
            yield kept.module, result_id, kept.result

    def count_results_cache_entries(self) -> int:
        """Return how many results are kept."""
        return len(self._results)

    def clear_cache(self, name: str | None = None) -> None:
        """Drop kept results.

        Args:
            name: The analysis whose results are dropped; None: all.
        """
        with self._lock:
            kept = self._results.items()
            self._results = {
                key: value for key, value in kept if name is not None and value.module != name
            }

    def to_mcp_tools(self) -> list[dict[str, Any]]:
        """Return each module as `{"name", "description", "inputSchema"}`."""
        return [
            {"name": m.name, "description": m.description, "inputSchema": m.input_schema}
            for m in self._modules.values()
        ]

    def get_dependency_graph(self) -> dict[str, list[str]]:
        """Return the modules that each takes results of."""
        return {name: list(module.dependencies) for name, module in self._modules.items()}

    def get_execution_order(self, names: Iterable[str] | None = None) -> list[str]:
        """Return modules and all their dependencies, each after its dependencies.

        Args:
            names: The modules; None: all.

        Raises:
            ValueError: Modules depend on each other, or one is unknown.
        """
        order: list[str] = []
        stack: list[str] = []

        def visit(name: str) -> None:
            if name in order:
                return
            if name in stack:
                raise ValueError(f"modules depend on each other: {' -> '.join([*stack, name])}")
            stack.append(name)
            for other in self._known(name).dependencies:
                visit(other)
            stack.pop()
            order.append(name)

        for name in self._modules if names is None else names:
            visit(name)
        return order

    def _known(self, name: str) -> ModuleMetadata:
        module = self._modules.get(name)
        if module is None:
            known = ", ".join(self._modules) or "none"
            raise ValueError(f"no module {name!r:.100}; there are: {known}")
        return module


global_registry = AttributionModuleRegistry()


def serialize_result(result: Any) -> str:
    """Return a result of an analysis as JSON text; sets, bytes and objects take the nearest form.

    Args:
        result: The result.

    Example:
        >>> serialize_result(("text", {1, 2}))
        '["text", [1, 2]]'
    """
    return json.dumps(result, default=_plain)


def deserialize_result(text: str) -> Any:
    """Return the value in a JSON text; another text is returned unchanged.

    Args:
        text: The text.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def stamp_of(paths: Iterable[str]) -> str:
    """Return a hash that changes when one of the files, or a file of one of the folders, changes.

    Args:
        paths: Files, prefixes of files, and folders.
    """
    seen = hashlib.sha256()
    for path in paths:
        folder, name = (path, "") if os.path.isdir(path) else os.path.split(path)
        try:
            entries = [e for e in os.scandir(folder) if e.name.startswith(name)]
            rows = [(e.name, e.stat()) for e in entries]
        except OSError:
            rows = []
        for entry, status in sorted(rows, key=lambda row: row[0]):
            seen.update(f"{entry} {status.st_ino} {status.st_size} {status.st_mtime_ns}\n".encode())
    return seen.hexdigest()


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, set | frozenset):
        return sorted(value, key=str)
    return str(value)


def _most_results() -> int:
    text = os.environ.get(_MOST_RESULTS_VARIABLE, "")
    if not text:
        return _MOST_RESULTS
    if not (text.isascii() and text.isdigit()) or int(text[:9]) < 1:
        raise ConfigError(f"{_MOST_RESULTS_VARIABLE}={text!r:.100}: must be a number above 0")
    return int(text[:9])
