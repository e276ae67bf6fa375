# SPDX-License-Identifier: Apache-2.0
"""Where lines are written: a local file, or a file that a log server keeps."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from nvidia_resiliency_ext.shared_utils.errors import NvrxError

if TYPE_CHECKING:
    from nvidia_resiliency_ext.shared_utils.grpc_log_client import LogFunnelClient, LogTarget


# Together with what waits before it this is the 64 MiB that a node may hold.
FUNNEL_MEMORY_BYTES = 48 << 20
_FORK_SUPPORT = "GRPC_ENABLE_FORK_SUPPORT"


class NotYetError(OSError):
    """A log cannot be opened before something else has happened that is on its way."""


class LocalFile:
    """A log on this node, or on a file system that it shares with others."""

    def __init__(self, path: str) -> None:
        folder = os.path.dirname(path)
        os.makedirs(folder, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOCTTY
        self._fd = os.open(path, flags, 0o644)

    def write(self, data: memoryview) -> int:
        """Append lines; the kernel may take less than all."""
        return os.write(self._fd, data)

    def close(self) -> None:
        with contextlib.suppress(OSError):  # NFS tells late that something was not written.
            os.close(self._fd)


class RemoteFile:
    """A log that the log server keeps; closing it waits for nobody."""

    def __init__(self, target: LogTarget) -> None:
        self._target = target

    def write(self, data: memoryview) -> int:
        """Hand lines to the client, which keeps them until the server has them."""
        self._target.write(data)
        return len(data)

    def close(self) -> None:
        """Let a thread wait until the server has everything, however long it is away."""
        threading.Thread(
            target=self._target.close, args=(None,), name="nvrx-log-close", daemon=True
        ).start()


LogFile: TypeAlias = LocalFile | RemoteFile


@dataclass(eq=False)
class FunnelSink:
    """Logs on a log server. One thread only, but for methods that say otherwise."""

    endpoint: str
    node_id: str  # what the server calls this node
    token_file: str | None = None  # may be written later; None: no token is sent

    def __post_init__(self) -> None:
        self._client: LogFunnelClient | None = None
        self._writes_here = False

    def write_files_instead(self) -> None:
        """Open all further logs on this node: there is no server after all; any thread."""
        self._writes_here = True

    def try_again(self) -> None:
        """Ask the server at once, which may have refused us until now; any thread."""
        client = self._client
        if client is not None:
            client.try_again()

    def open(self, path: str) -> LogFile:
        """Open a log on the server, which need not be there yet. Raises OSError or NvrxError."""
        if self._writes_here:
            return LocalFile(path)
        if self._client is None:
            if self.token_file is not None and not os.path.exists(self.token_file):
                raise NotYetError(f"the token {self.token_file} is not there yet")
            self._client = self._connect()
        return RemoteFile(self._client.open(path))

    def _connect(self) -> LogFunnelClient:
        if _FORK_SUPPORT not in os.environ:
            # Our forks only start programs. gRPC would stop its threads for each, or say that it
            # cannot. The C library reads it; workers get an environment made from os.environ.
            os.putenv(_FORK_SUPPORT, "0")
        from nvidia_resiliency_ext.shared_utils.grpc_log_client import LogFunnelClient

        return LogFunnelClient(
            self.endpoint,
            node_id=self.node_id,
            token_file=self.token_file,
            memory_limit_bytes=FUNNEL_MEMORY_BYTES,
            when_full="drop-oldest",
        )

    def close(self, timeout_s: float) -> bool:
        """Wait until the server has all lines; unconfirmed ones stay in spill files."""
        return self._client is None or self._client.close(timeout_s)


def endpoint_of(host: str, port: int) -> str:
    """Return host and port as gRPC reads them."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


_CLOSE_S = 30.0


class GrpcWriterThread(threading.Thread):
    """Sends `(path, whole lines)` pairs of a queue, which should have a limit, to a log server.

    Lines are kept while the server is away.

    Args:
        write_queue: Where the pairs come from; lines are bytes, or text, which becomes UTF-8.
            None ends the thread, too.
        grpc_server_address: `host:port`.
        node_id: What the server calls this node.
        logger: Where problems are said.
    """

    def __init__(
        self,
        write_queue: queue.Queue[tuple[str, bytes | str] | None],
        grpc_server_address: str,
        node_id: str,
        logger: logging.Logger,
    ) -> None:
        super().__init__(name="nvrx-log-sender", daemon=True)
        self._queue = write_queue
        self._sink = FunnelSink(grpc_server_address, str(node_id))
        self._logger = logger
        self._files: dict[str, LogFile] = {}

    def shutdown(self) -> None:
        """Let the thread send all queued lines and end; `join` waits for that.

        Raises:
            queue.Full: The queue has had no room for 30 s.
        """
        self._queue.put(None, timeout=_CLOSE_S)

    def run(self) -> None:
        """Send until None comes, then wait until the server has everything, 30 s at most."""
        while (item := self._queue.get()) is not None:
            path, lines = item
            if isinstance(lines, str):
                lines = lines.encode(errors="surrogateescape")
            try:
                if path not in self._files:
                    self._files[path] = self._sink.open(path)
                self._files[path].write(memoryview(lines))
            except (OSError, NvrxError) as error:
                self._logger.error("lines for %s are lost: %s", path, error)  # noqa: TRY400
        if not self._sink.close(_CLOSE_S):
            self._logger.error("the log server has not confirmed all lines")
