# SPDX-License-Identifier: Apache-2.0
"""The MCP server: tools over the registered analyses, below one directory, with limits.

An assistant that calls these tools may follow instructions in a log. So no argument of a tool can
lead outside of the allowed root or set an address to which logs are sent, and every call has
limits of time, memory and output.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from typing import TYPE_CHECKING, Any

from nvidia_resiliency_ext.attribution.analyzer import Analyzer
from nvidia_resiliency_ext.attribution.combined_log_fr.llm_merge import summarize
from nvidia_resiliency_ext.attribution.mcp_integration.module_definitions import (
    FR_ANALYZER,
    register_all_modules,
)
from nvidia_resiliency_ext.attribution.mcp_integration.registry import (
    URI,
    AttributionModuleRegistry,
    serialize_result,
    stamp_of,
)
from nvidia_resiliency_ext.attribution.orchestration.config import (
    DEFAULT_COMPUTE_TIMEOUT_SECONDS,
    MODULE_LOG_ANALYZER,
    MODULE_LOG_FR_ANALYZER,
    ErrorCode,
)
from nvidia_resiliency_ext.attribution.orchestration.progressive import (
    ANALYSIS_INTENT_PROGRESSIVE,
    PROGRESSIVE_START_TOOL,
    STATUS_STARTED,
)
from nvidia_resiliency_ext.attribution.orchestration.types import LogAnalyzerError
from nvidia_resiliency_ext.attribution.orchestration.utils import validate_log_path
from nvidia_resiliency_ext.attribution.refine import (
    ModelClient,
    ModelSettings,
    model_settings_from_environ,
    refine,
)
from nvidia_resiliency_ext.shared_utils.console import plain
from nvidia_resiliency_ext.shared_utils.errors import (
    ConfigError,
    MissingExtraError,
    NvrxError,
)
from nvidia_resiliency_ext.shared_utils.os_utils import resolve_under_allowed_roots

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mcp.server.lowlevel import Server

__all__ = ["GET_RESULT_TOOL", "STATUS_TOOL", "AttributionTools", "create_server", "serve_stdio"]

logger = logging.getLogger("nvrx")

GET_RESULT_TOOL = "get_result"
STATUS_TOOL = "status"

_JSON = "application/json"
_AT_ONCE = 4
_MOST_WAITING = 64
_MOST_GROWING = 1000
_REPLY_BYTES = 1 << 20
_MESSAGE_BYTES = 4 << 20
_MOST_LISTED = 100
_LONGEST_ERROR = 500
_READ_S = 0.8  # share of the time of a call in which the log is read
_PATHS = ("log_path", "fr_path")
_OWN_TOOLS: tuple[dict[str, Any], ...] = (
    {
        "name": PROGRESSIVE_START_TOOL,
        "description": "Read the log of a running job while it grows; the result_id that comes"
        " back gives get_result the verdict so far.",
        "inputSchema": {
            "type": "object",
            "properties": {
                "log_path": {"type": "string", "description": "absolute path of the log"},
                "user": {"type": "string"},
                "job_id": {"type": "string"},
                "cycle_id": {"type": "integer"},
            },
            "required": ["log_path"],
            "additionalProperties": False,
        },
    },
    {
        "name": GET_RESULT_TOOL,
        "description": "Return an earlier result, or the verdict so far about a growing log.",
        "inputSchema": {
            "type": "object",
            "properties": {"result_id": {"type": "string"}},
            "required": ["result_id"],
            "additionalProperties": False,
        },
    },
    {
        "name": STATUS_TOOL,
        "description": "Return which analyses there are, and how many results are kept.",
        "inputSchema": {"type": "object", "properties": {}, "additionalProperties": False},
    },
)


class AttributionTools:
    """Answer calls of tools; for one event loop.

    Args:
        allowed_root: Absolute path; nothing outside of it is read.
        modules: Names of the analyses to offer; None: all.
        timeout_s: Seconds that one call may take. Default 300.
        registry: Where the analyses and their results are; default: a new one.

    Raises:
        ConfigError: The root is not a directory with an absolute path, or a module is unknown.

    Example:
        >>> tools = AttributionTools("/", modules=["fr_analyzer"])
        >>> [tool["name"] for tool in tools.list_tools()]
        ['fr_analyzer', 'log_analyzer_progressive_start', 'get_result', 'status']
    """

    def __init__(
        self,
        allowed_root: str,
        modules: list[str] | None = None,
        timeout_s: float = DEFAULT_COMPUTE_TIMEOUT_SECONDS,
        registry: AttributionModuleRegistry | None = None,
    ) -> None:
        if not os.path.isabs(allowed_root) or not os.path.isdir(allowed_root):
            raise ConfigError(f"allowed root {allowed_root!r}: must be a directory, absolute path")
        self._root = os.path.realpath(allowed_root)
        self._timeout_s = timeout_s
        self.registry = AttributionModuleRegistry() if registry is None else registry
        if registry is None:
            register_all_modules(self.registry)
        known = self.registry.list_modules()
        for name in modules or ():
            if name not in known:
                raise ConfigError(f"no module {name!r}; there are: {', '.join(known)}")
        for name in known:
            if modules is not None and name not in modules:
                self.registry.unregister(name)
        own = AttributionModuleRegistry(1)
        for tool in _OWN_TOOLS:
            own.register(tool["name"], dict, tool["description"], tool["inputSchema"], {})
        self._own = own
        _ = self.registry.capacity  # a wrong variable is to be known before the first call
        self._growing: dict[str, dict[str, Any]] = {}
        self._analyzer: Analyzer | None = None
        self._turn = asyncio.Semaphore(_AT_ONCE)
        self._waiting = 0

    def list_tools(self) -> list[dict[str, Any]]:
        """Return each tool as `{"name", "description", "inputSchema"}`."""
        return [*self.registry.to_mcp_tools(), *self._own.to_mcp_tools()]

    def list_resources(self) -> list[tuple[str, str]]:
        """Return (name, URI) of each kept result, the newest last."""
        items = self.registry.iter_results_cache_items()
        return [(f"{name} {key[:16]}", f"{URI}{name}/{key}") for name, key, _ in items]

    def read_resource(self, uri: str) -> str | None:
        """Return a kept result as JSON text; None if there is none.

        Args:
            uri: `attribution://<module>/<identifier>`.
        """
        reply = self.registry.get_cached_result_by_uri(uri)
        return None if reply is None else serialize_result(reply)

    async def call(self, name: str, arguments: Any) -> tuple[dict[str, Any], bool]:
        """Run a tool; any input gives a reply, none raises.

        Args:
            name: The tool.
            arguments: Its arguments, as decoded from JSON.

        Returns:
            The reply, and whether it is an error.
        """
        try:
            if name == STATUS_TOOL:
                self._own.check_arguments(name, arguments or {})
                return self._status(), False
            if name in self._own.list_modules():
                arguments = self._own.check_arguments(name, arguments or {})
                growing = name == PROGRESSIVE_START_TOOL
                answer = self._start if growing else self._get_result
                return await answer(arguments), False
            arguments = self.registry.check_arguments(name, arguments or {})
            return await self._run(name, arguments), False
        except (asyncio.TimeoutError, TimeoutError):
            return _failure(name, f"not done within {self._timeout_s:g} s"), True
        except (ValueError, OSError, NvrxError) as error:
            return _failure(name, str(error)), True
        except Exception as error:
            # Boundary: one call that fails must not end the server for the others.
            logger.exception("the tool %s failed", plain(name))
            return _failure(name, f"internal error: {type(error).__name__}"), True

    async def close(self) -> None:
        """End the reading of growing logs."""
        if self._analyzer is not None:
            await self._analyzer.shutdown_async()

    async def _run(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        given = {**arguments, **self._confined(arguments)}
        model = _model(given)
        result_id = self.registry.result_id_for_args(name, given)
        kept = self.registry.get_cached_result_by_id(result_id)
        if kept is not None:
            return dict(kept)
        if self._waiting >= _MOST_WAITING:
            raise ValueError(f"{_MOST_WAITING} calls are waiting already; try again later")
        self._waiting += 1
        try:
            async with self._turn:
                paths = [given[key] for key in _PATHS if key in given]
                stamp = await asyncio.to_thread(stamp_of, paths)
                work = self._analyze(name, given, model)
                parts = await asyncio.wait_for(work, self._timeout_s)
        finally:
            self._waiting -= 1
        reply = {
            "module": name,
            "result_id": result_id,
            "resource_uri": f"{URI}{name}/{result_id}",
            **_bounded(parts),
        }
        refinement = (parts.get("attribution") or {}).get("refinement") or {"used": True}
        if refinement["used"] and parts.get("llm_merged_summary", "") is not None:
            # Where a model failed, the next call asks it again.
            self.registry.cache_result_by_id(name, result_id, reply, paths, stamp)
        return reply

    async def _analyze(
        self, name: str, given: dict[str, Any], model: ModelSettings | None
    ) -> dict[str, Any]:
        args = self.registry.apply_defaults(name, given)
        limits = {"allowed_root": self._root, "deadline_s": self._timeout_s * _READ_S}
        instance = self.registry.create_instance(name, args)
        try:
            result, state = await instance.run({**args, **limits})
            if not hasattr(instance, "reply_parts"):
                advice = {"action": state.name, "source": name}
                return {"result": json.loads(serialize_result(result)), "recommendation": advice}
            parts: dict[str, Any] = instance.reply_parts(result, state)
            parts["recommendation"].setdefault("source", name)
            verdict = getattr(instance, "verdict", None)
            if model is not None and verdict is not None:
                refined = await refine(verdict, client=ModelClient(model))
                parts["attribution"] = refined.to_dict()
                parts["recommendation"] = {"action": refined.action, "source": name}
            if model is not None and given.get("merge_llm"):
                traces = (parts.get("attribution") or {}).get("fr")
                results = given.get("input_data") or [parts["result"], traces]
                log, traces = (*results, "")[:2]
                parts["llm_merged_summary"] = await summarize(log, traces, model)
            return parts
        finally:
            # Its threads may still read, up to the deadline: not a wait for the event loop.
            await asyncio.to_thread(instance.close)

    def _confined(self, arguments: Mapping[str, Any]) -> dict[str, str]:
        """Return the paths among the arguments, resolved.

        Raises:
            LogAnalyzerError: A log is refused.
            PathOutsideRootsError: Dumps lie elsewhere.
        """
        found = {}
        if "log_path" in arguments:
            found["log_path"] = validate_log_path(arguments["log_path"], self._root)
        if "fr_path" in arguments:
            path = arguments["fr_path"]
            if not os.path.isabs(path):
                raise LogAnalyzerError(ErrorCode.INVALID_PATH, f"not an absolute path: {path!r}")
            found["fr_path"] = resolve_under_allowed_roots(path, [self._root])
            pattern = arguments.get("pattern", "")
            if os.sep in pattern or os.pardir in pattern:
                raise LogAnalyzerError(ErrorCode.INVALID_PATH, f"pattern {pattern!r} has a path")
        return found

    async def _follow(self, arguments: dict[str, Any]) -> tuple[Analyzer, str]:
        """Have a log read while it grows, also when reading ended since it did not grow."""
        if self._analyzer is None:
            self._analyzer = Analyzer(self._root, use_lib_log_analysis=False)
        submitted = await self._analyzer.submit(
            arguments["log_path"],
            arguments.get("user", "unknown"),
            arguments.get("job_id"),
            arguments.get("cycle_id"),
            ANALYSIS_INTENT_PROGRESSIVE,
        )
        return self._analyzer, submitted.normalized_path

    async def _start(self, arguments: dict[str, Any]) -> dict[str, Any]:
        _, path = await self._follow(arguments)
        result_id = self.registry.result_id_for_args(PROGRESSIVE_START_TOOL, {"log_path": path})
        self._growing.pop(result_id, None)
        self._growing[result_id] = arguments
        if len(self._growing) > _MOST_GROWING:
            del self._growing[next(iter(self._growing))]
        return {
            "module": PROGRESSIVE_START_TOOL,
            "result_id": result_id,
            "result": {"status": STATUS_STARTED, "message": "", "handle": result_id},
        }

    async def _get_result(self, arguments: dict[str, Any]) -> dict[str, Any]:
        result_id = arguments["result_id"]
        followed = self._growing.get(result_id)
        if followed is not None:
            analyzer, path = await self._follow(followed)
            found = (await analyzer.analyze(path, wait=False)).to_payload()
            is_done = found["status"] == "completed"
            key = "recommendation" if is_done else "candidate_recommendation"
            return {
                "module": PROGRESSIVE_START_TOOL,
                "result_id": result_id,
                "status": found["status"],
                "result": found["result"],
                "recommendation": found[key],
            }
        kept = self.registry.get_cached_result_by_id(result_id)
        if kept is None:
            raise ValueError(f"no result {result_id!r:.100} is kept; its file may have changed")
        return dict(kept)

    def _status(self) -> dict[str, Any]:
        return {
            "status": "ok",
            "modules": self.registry.list_modules(),
            "allowed_root": self._root,
            "results": self.registry.count_results_cache_entries(),
            "growing": len(self._growing),
            "waiting": self._waiting,
        }


def create_server(tools: AttributionTools, name: str, version: str) -> Server[Any]:
    """Return the server of the `mcp` library that offers the tools and kept results.

    Args:
        tools: What answers.
        name: Name of the server, as clients see it.
        version: Its version.

    Raises:
        MissingExtraError: The library is not installed.
    """
    try:
        import mcp.types as wire
        from mcp import MCPError
        from mcp.server.lowlevel import Server
    except ImportError as error:
        raise MissingExtraError("nvrx-mcp-analysis", "'nvrx-attribution[mcp]'", error) from None

    async def list_tools(_: Any, __: Any) -> wire.ListToolsResult:
        found = [wire.Tool.model_validate(tool) for tool in tools.list_tools()]
        return wire.ListToolsResult(tools=found)

    async def call_tool(_: Any, params: wire.CallToolRequestParams) -> wire.CallToolResult:
        reply, is_error = await tools.call(params.name, params.arguments)
        text = wire.TextContent(type="text", text=serialize_result(reply))
        return wire.CallToolResult(content=[text], is_error=is_error)

    async def list_resources(_: Any, __: Any) -> wire.ListResourcesResult:
        found = [
            wire.Resource(name=title, uri=uri, mime_type=_JSON)
            for title, uri in tools.list_resources()
        ]
        return wire.ListResourcesResult(resources=found)

    async def read_resource(
        _: Any, params: wire.ReadResourceRequestParams
    ) -> wire.ReadResourceResult:
        text = tools.read_resource(params.uri)
        if text is None:
            raise MCPError(wire.INVALID_PARAMS, f"no result is kept at {params.uri:.200}")
        content = wire.TextResourceContents(uri=params.uri, mime_type=_JSON, text=text)
        return wire.ReadResourceResult(contents=[content])

    return Server(
        name,
        version=version,
        on_list_tools=list_tools,
        on_call_tool=call_tool,
        on_list_resources=list_resources,
        on_read_resource=read_resource,
    )


async def serve_stdio(tools: AttributionTools, name: str, version: str) -> None:
    """Answer on stdin and stdout until stdin ends.

    Args:
        tools: The tools to offer.
        name: Name of the server, for clients.
        version: Version of the server, for clients.

    Raises:
        MissingExtraError: The library `mcp` is not installed.
    """
    server = create_server(tools, name, version)
    import anyio
    from mcp.server.stdio import stdio_server

    lines: Any = _ShortLines()
    try:
        async with stdio_server(stdin=anyio.wrap_file(lines)) as (read_stream, write_stream):
            options = server.create_initialization_options()
            await server.run(read_stream, write_stream, options)
    finally:
        lines.close()
        await tools.close()


class _ShortLines:
    """Text of stdin in lines of limited length; of longer ones only the beginning.

    It keeps stdin to itself: readers of dumps find it empty.
    """

    def __init__(self) -> None:
        self._file = os.fdopen(os.dup(0), "rb")
        with open(os.devnull, "rb") as empty:
            os.dup2(empty.fileno(), 0)

    def readline(self) -> str:
        """Return the next line; one that is too long is cut, and answered as no message."""
        line = part = self._file.readline(_MESSAGE_BYTES)
        while part and not part.endswith(b"\n"):
            part = self._file.readline(_MESSAGE_BYTES)
        return line.decode("utf-8", "replace")

    def close(self) -> None:
        """Close the descriptor."""
        self._file.close()


def _model(given: Mapping[str, Any]) -> ModelSettings | None:
    """Return the model that a call asks for; its address is the server's own, never the caller's.

    Raises:
        ConfigError: The server was given no model, or another address is named.
    """
    if "model" not in given and not given.get("merge_llm"):
        return None
    settings = model_settings_from_environ(os.environ, given)
    if settings is None:
        raise ConfigError("this server was given no model: NVRX_LLM_BASE_URL is not set")
    if given.get("base_url", settings.base_url) != settings.base_url:
        raise ConfigError("base_url: only the address that the server was given is asked")
    return settings


def _failure(name: str, text: str) -> dict[str, Any]:
    known = (MODULE_LOG_ANALYZER, FR_ANALYZER, MODULE_LOG_FR_ANALYZER)
    return {
        "module": plain(name)[:100],
        "result": [],
        "recommendation": {"action": "UNKNOWN", "source": name if name in known else ""},
        "error": plain(text)[:_LONGEST_ERROR],
    }


def _bounded(parts: dict[str, Any]) -> dict[str, Any]:
    """Return the parts of a reply with long lists cut until they fit a message."""
    most = _MOST_LISTED
    while len(serialize_result(parts)) > _REPLY_BYTES and most:
        parts, most = {key: _cut(value, most) for key, value in parts.items()}, most // 2
    return parts


def _cut(value: Any, most: int) -> Any:
    if isinstance(value, dict):
        return {key: _cut(item, most) for key, item in value.items()}
    if isinstance(value, list):
        return [_cut(item, most) for item in value[-most:]]
    return value[: most * 1000] if isinstance(value, str) else value
