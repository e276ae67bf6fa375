# SPDX-License-Identifier: Apache-2.0
"""Call the tools of one or several MCP servers that run as child processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sys
from typing import TYPE_CHECKING, Any

from nvidia_resiliency_ext.attribution.mcp_integration.registry import deserialize_result
from nvidia_resiliency_ext.shared_utils.errors import MissingExtraError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mcp import ClientSession

__all__ = [
    "MultiServerClient",
    "NVRxMCPClient",
    "create_mcp_client",
    "get_server_command",
    "is_mcp_connection_error",
    "run_distributed_attribution",
]

_PROGRAM = "nvrx-mcp-analysis"
_MODULE = "nvidia_resiliency_ext.attribution.mcp_integration.server_launcher"
_CALL_TIMEOUT_S = 330.0  # somewhat more than the server takes for one call
_START_TIMEOUT_S = 120.0
_PASSED_ON = ("NVRX_", "LLM_", "RESTART_AGENT_")
_CLOSED = frozenset({"ClosedResourceError", "BrokenResourceError", "EndOfStream"})


class NVRxMCPClient:
    """Run a server as a child process and call its tools; an asynchronous context manager.

    The connection belongs to a task of its own, so any task may call tools, and reconnect.

    Args:
        server_command: Program and arguments of the server.
        call_timeout_s: Seconds that one request may take, the first one included. Default 330.

    Raises:
        MissingExtraError: On entry, when the library `mcp` is not installed.
        OSError: On entry, when the server cannot be started.

    Example:
        >>> async def why(log: str) -> str:
        ...     async with create_mcp_client(allowed_root="/logs") as client:
        ...         reply = await client.run_module("log_analyzer", log_path=log)
        ...         return reply["recommendation"]["action"]
    """

    def __init__(
        self, server_command: Sequence[str], call_timeout_s: float = _CALL_TIMEOUT_S
    ) -> None:
        self.server_command = list(server_command)
        self._timeout_s = call_timeout_s
        self._session: ClientSession | None = None
        self._owner: asyncio.Task[None] | None = None
        self._leave: asyncio.Event | None = None
        self._reconnecting = asyncio.Lock()

    async def __aenter__(self) -> NVRxMCPClient:  # noqa: PYI034 - Self came with Python 3.11
        """Start the server and shake hands."""
        await self._connect()
        return self

    async def __aexit__(self, *_: object) -> None:
        """End the server."""
        await self._disconnect()

    async def list_tools(self) -> list[str]:
        """Return the names of the server's tools."""
        found = await self._opened().list_tools()
        return [tool.name for tool in found.tools]

    async def get_status(self) -> dict[str, Any]:
        """Return the result of the tool `status`."""
        status: dict[str, Any] = await self.call_tool("status", {})
        return status

    async def call_tool(self, name: str, arguments: Mapping[str, Any]) -> Any:
        """Call a tool, and return its decoded reply; an error of the tool is a reply, too.

        Args:
            name: The tool.
            arguments: Its arguments.

        Raises:
            mcp.MCPError: The server is gone, or does not answer in time.
        """
        found = await self._opened().call_tool(name, dict(arguments))
        text = "".join(getattr(part, "text", "") for part in getattr(found, "content", ()))
        return deserialize_result(text)

    async def run_module(self, name: str, **arguments: Any) -> Any:
        """Run an analysis, and return its reply.

        Args:
            name: The analysis.
            arguments: Its arguments.
        """
        return await self.call_tool(name, arguments)

    async def run_module_resilient(self, name: str, **arguments: Any) -> Any:
        """Run an analysis; if the connection is lost, restart the server and try once more.

        Args:
            name: The analysis.
            arguments: Its arguments.
        """
        session = self._session
        try:
            return await self.call_tool(name, arguments)
        except Exception as error:
            if not is_mcp_connection_error(error):
                raise
            async with self._reconnecting:
                if self._session is session:  # else another call has done it
                    await self.reconnect()
            return await self.call_tool(name, arguments)

    async def reconnect(self) -> None:
        """End the server and start it anew."""
        await self._disconnect()
        await self._connect()

    async def get_result(self, result_id: str) -> Any:
        """Return an earlier result, or the verdict so far about a growing log.

        Args:
            result_id: The identifier in an earlier reply.
        """
        return await self.call_tool("get_result", {"result_id": result_id})

    async def list_resources(self) -> list[str]:
        """Return the URIs of the results that the server keeps."""
        found = await self._opened().list_resources()
        return [resource.uri for resource in found.resources]

    async def read_resource(self, uri: str) -> Any:
        """Return a kept result.

        Args:
            uri: `attribution://<module>/<identifier>`.

        Raises:
            mcp.MCPError: No result is kept there.
        """
        found = await self._opened().read_resource(uri)
        return deserialize_result("".join(getattr(part, "text", "") for part in found.contents))

    def _opened(self) -> ClientSession:
        if self._session is None:
            raise ConnectionError("not connected: use 'async with', or reconnect()")
        return self._session

    async def _connect(self) -> None:
        self._leave = asyncio.Event()
        ready: asyncio.Future[ClientSession] = asyncio.get_running_loop().create_future()
        self._owner = asyncio.ensure_future(self._own(ready, self._leave))
        try:
            self._session = await asyncio.wait_for(ready, _START_TIMEOUT_S)
        except BaseException:
            await self._disconnect()
            raise

    async def _disconnect(self) -> None:
        owner, self._owner, self._session = self._owner, None, None
        if owner is None or self._leave is None:
            return
        self._leave.set()
        # What went wrong in the connection has been told to whoever waited for an answer.
        await asyncio.wait([owner])
        if not owner.cancelled():
            owner.exception()

    async def _own(self, ready: asyncio.Future[ClientSession], leave: asyncio.Event) -> None:
        """Hold the connection open; its parts must be entered and left in one task."""
        try:
            from mcp import ClientSession, StdioServerParameters
            from mcp.client.stdio import stdio_client
        except ImportError as error:
            extra = "'nvrx-attribution[mcp]'"
            ready.set_exception(MissingExtraError("the MCP client", extra, error))
            return
        environ = {k: v for k, v in os.environ.items() if k.startswith(_PASSED_ON)}
        program, *arguments = self.server_command
        parameters = StdioServerParameters(command=program, args=arguments, env=environ)
        try:
            async with contextlib.AsyncExitStack() as stack:
                streams = await stack.enter_async_context(stdio_client(parameters))
                talk = ClientSession(*streams, read_timeout_seconds=self._timeout_s)
                session = await stack.enter_async_context(talk)
                started = asyncio.ensure_future(session.initialize())
                left = asyncio.ensure_future(leave.wait())
                await asyncio.wait([started, left], return_when=asyncio.FIRST_COMPLETED)
                if not started.done():
                    started.cancel()
                    return
                left.cancel()
                started.result()
                if not ready.done():
                    ready.set_result(session)
                await leave.wait()
        except Exception as error:
            # Boundary: whoever waits for the connection gets it.
            if ready.done():
                raise
            ready.set_exception(error)


class MultiServerClient:
    """Call tools of several servers by the servers' names; an asynchronous context manager.

    Args:
        server_commands: Name of a server -> its program and arguments.
    """

    def __init__(self, server_commands: Mapping[str, Sequence[str]]) -> None:
        self.clients = {name: NVRxMCPClient(command) for name, command in server_commands.items()}
        self._stack = contextlib.AsyncExitStack()

    async def __aenter__(self) -> MultiServerClient:  # noqa: PYI034 - as above
        """Start all servers; when one fails, the others are ended."""
        async with contextlib.AsyncExitStack() as stack:
            for client in self.clients.values():
                await stack.enter_async_context(client)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        """End all servers."""
        await self._stack.aclose()

    async def list_tools(self) -> dict[str, list[str]]:
        """Return the tools of each server."""
        return {name: await client.list_tools() for name, client in self.clients.items()}

    async def run_module(self, server: str, name: str, **arguments: Any) -> Any:
        """Run an analysis on one server, and return its reply.

        Args:
            server: Name of the server.
            name: The analysis.
            arguments: Its arguments.

        Raises:
            KeyError: There is no such server.
        """
        return await self.clients[server].run_module_resilient(name, **arguments)


def create_mcp_client(
    *, mcp_server_log_level: str = "INFO", allowed_root: str | None = None
) -> NVRxMCPClient:
    """Return a client of a server on this machine.

    Args:
        mcp_server_log_level: Level of the server's log. Default "INFO".
        allowed_root: Nothing outside of this directory is read; None: the server takes
            NVRX_ATTRSVC_ALLOWED_ROOT.
    """
    command = get_server_command(log_level=mcp_server_log_level)
    if allowed_root is not None:
        command += ["--allowed-root", allowed_root]
    return NVRxMCPClient(command)


def get_server_command(*, log_level: str = "INFO") -> list[str]:
    """Return the command of the server: its program if it is on PATH, else this interpreter's.

    Args:
        log_level: Level of the server's log. Default "INFO".
    """
    program = shutil.which(_PROGRAM)
    command = [program] if program is not None else [sys.executable, "-m", _MODULE]
    return [*command, "--log-level", log_level]


async def run_distributed_attribution(
    server_commands: Mapping[str, Sequence[str]],
    module_name: str,
    arguments: Mapping[str, Mapping[str, Any]],
) -> dict[str, Any]:
    """Run one analysis on several servers at once, each with its own arguments.

    Args:
        server_commands: Name of a server -> its program and arguments.
        module_name: The analysis.
        arguments: Name of a server -> arguments; servers without any are not asked.

    Returns:
        Name of a server -> reply; of a server that fails, an object with `error`.
    """
    asked = {name: command for name, command in server_commands.items() if name in arguments}
    async with MultiServerClient(asked) as clients:
        replies = await asyncio.gather(
            *(clients.run_module(name, module_name, **arguments[name]) for name in asked),
            return_exceptions=True,
        )
    return {
        name: {"error": str(reply) or type(reply).__name__}
        if isinstance(reply, BaseException)
        else reply
        for name, reply in zip(asked, replies, strict=True)
    }


def is_mcp_connection_error(error: BaseException) -> bool:
    """Return whether an error means that the server ended or closed the connection.

    Args:
        error: What a call raised; of a group, each member is looked at.
    """
    members = getattr(error, "exceptions", None)
    if isinstance(members, tuple):
        return any(is_mcp_connection_error(member) for member in members)
    if isinstance(error, ConnectionError | EOFError) or type(error).__name__ in _CLOSED:
        return True
    return type(error).__name__ == "MCPError" and "closed" in str(error).lower()
