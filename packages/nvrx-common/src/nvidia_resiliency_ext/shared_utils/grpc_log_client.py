# SPDX-License-Identifier: Apache-2.0
"""Client of the log funnel: open a target, write lines to it, wait until the server has them."""

from __future__ import annotations

import atexit
import logging
import math
import os
import socket
import tempfile
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Literal, final

from ._funnel.client.limits import MemoryBudget, Notices
from ._funnel.client.link import FunnelTls, Link, access_of
from ._funnel.client.send_buffer import SendBuffer
from ._funnel.client.spill import Identity, Spill, adopt, left_behind
from ._funnel.client.stream import Stream
from ._funnel.shared import MAX_NAME_BYTES, MAX_PATH_BYTES
from .clock import Deadline
from .errors import ConfigError, LogFunnelClosedError, NvrxError
from .log_manager import LogConfig

__all__ = ["FunnelStats", "FunnelTls", "LogFunnelClient", "LogTarget"]

DEFAULT_MEMORY_LIMIT_BYTES = 64 * 1024 * 1024
DEFAULT_SPILL_LIMIT_BYTES = 1024 * 1024 * 1024
_SMALLEST_MEMORY_BYTES = 512 * 1024
_STREAM_ID_BYTES = 16
_AT_EXIT_S = 5.0

_clients: weakref.WeakSet[LogFunnelClient] = weakref.WeakSet()


@dataclass(frozen=True, slots=True)
class FunnelStats:
    """Counters of a target, or of all targets of a client.

    Attributes:
        lines_taken: Lines cut into chunks so far; the newest 64 KiB may not be counted yet.
        bytes_taken: Their bytes.
        lines_confirmed: Lines in the file, also of earlier processes, and notices of drops.
        bytes_confirmed: Their bytes.
        lines_dropped: Dropped lines.
        bytes_dropped: Their bytes.
        lines_broken: Lines of more than 1 MiB, which are continued in a new line.
        chunks_resent: Chunks sent again after a broken connection.
        reconnects: Calls to the server that failed or ended early.
        nonsense_answers: Confirmations of lines that were never sent.
        bytes_in_memory: Held in memory now.
        bytes_in_spill: Held in files now, of all targets of the client.
    """

    lines_taken: int = 0
    bytes_taken: int = 0
    lines_confirmed: int = 0
    bytes_confirmed: int = 0
    lines_dropped: int = 0
    bytes_dropped: int = 0
    lines_broken: int = 0
    chunks_resent: int = 0
    reconnects: int = 0
    nonsense_answers: int = 0
    bytes_in_memory: int = 0
    bytes_in_spill: int = 0

    def __add__(self, other: FunnelStats) -> FunnelStats:
        """Return the sum of both."""
        names = [field.name for field in fields(self)]
        return FunnelStats(**{name: getattr(self, name) + getattr(other, name) for name in names})


@final
class LogTarget:
    """One file on the log server, to append lines to; made by `LogFunnelClient.open`.

    All methods may be called from any thread, but not from a signal handler.

    `send_buffer`, `budget` and `close` are set by `LogFunnelClient.open`, which makes targets.

    Attributes:
        path: The file, as the server names it.
    """

    def __init__(
        self,
        send_buffer: SendBuffer,
        budget: MemoryBudget,
        close: Callable[[SendBuffer, Deadline], bool],
    ) -> None:
        """Use `LogFunnelClient.open`."""
        self.path = send_buffer.path
        self._send_buffer = send_buffer
        self._budget = budget
        self._close = close
        # One call less for each line.
        self.write = send_buffer.write  # type: ignore[method-assign]

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Accept `data`, whole lines or parts of lines; they are sent as whole lines.

        A part without a newline waits for the rest of its line. Data of one call stays together; if
        several threads write, each should write whole lines. If there is no space, see `when_full`.

        Raises:
            DeadlineExceededError: No space in `write_timeout_s`; of up to 64 KiB nothing is taken.
            LogTargetRefusedError: The server refuses this file; with `when_full="drop-oldest"` the
                lines are dropped and counted instead.
            LogFunnelClosedError: It is closed, or was opened before a fork.
        """
        self._send_buffer.write(data)

    def flush(self, deadline_s: float | None = 30.0) -> None:
        """Wait until the server has written or dropped every whole line that was written here.

        Raises:
            DeadlineExceededError: `deadline_s` (s, None: no limit) has passed; the lines are kept.
            LogTargetRefusedError: The server refuses this target.
            LogFunnelClosedError: The target is closed, or was opened before a fork.
        """
        self._send_buffer.flush(Deadline.after(deadline_s))

    def close(self, deadline_s: float | None = 30.0) -> bool:
        """End the last line, wait for all confirmations and end the stream; harmless if repeated.

        Lines that are not confirmed after `deadline_s` (s, None: no limit) are left in files for a
        later client of the same name that opens the same path; one warning names the place.

        Returns:
            Whether everything was confirmed.
        """
        return self._close(self._send_buffer, Deadline.after(deadline_s))

    @property
    def stats(self) -> FunnelStats:
        """Counters as they are now."""
        return FunnelStats(**self._send_buffer.snapshot(), bytes_in_spill=self._budget.spill_bytes)

    def __enter__(self) -> LogTarget:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@final
class LogFunnelClient:
    """Sends log lines to a log server, which appends them to files of its own.

    It connects at once and never loses or duplicates a line: lines are kept until the server has
    confirmed that they are in the file, and sent again after a broken connection. Without a server
    they wait in memory, then in files; after that `when_full` decides. Each open target has a
    thread. A forked child must open its own client.

    Example:
        >>> from nvidia_resiliency_ext.shared_utils.grpc_log_client import LogFunnelClient
        >>> def send(endpoint: str, path: str) -> None:
        ...     with LogFunnelClient(endpoint, node_id="node7") as client:
        ...         client.open(path).write(b"hello" + bytes([10]))

    Args:
        endpoint: `host:port`, `[address]:port` or `unix:/absolute/path`.
        node_id: Name of this node in the server's own log.
        token_file: File with the job's token, mode 0600; it is read again for every connection.
            Default: what `NVRX_LOG_FUNNEL_TOKEN_FILE` names, if anything.
        tls: Certificates; None for an open connection.
        memory_limit_bytes: Limit of all targets in memory, in addition to 128 KiB each.
        spill_limit_bytes: Limit of all targets in files when memory is full; 0 for no files.
        spill_dir: Directory for these files, made with mode 0700 when needed. Default:
            `nvrx-funnel-<uid>` in `NVRX_NODE_LOCAL_TMPDIR` or the system's temporary directory.
        spill_name: A later client of this name and node finds what is left; default: the endpoint.
        when_full: `block` makes `write` wait, `drop-oldest` drops the oldest lines and replaces
            them by a line `[nvrx] dropped N lines (M bytes)`.
        write_timeout_s: Longest wait of `write` with `block`.

    Raises:
        ConfigError: An argument or a file is invalid.
        MissingExtraError: gRPC is not installed: `pip install nvrx-common[grpc]`.
    """

    def __init__(  # noqa: PLR0913 - named settings of one thing
        self,
        endpoint: str,
        *,
        node_id: str | None = None,
        token_file: str | None = None,
        tls: FunnelTls | None = None,
        memory_limit_bytes: int = DEFAULT_MEMORY_LIMIT_BYTES,
        spill_limit_bytes: int = DEFAULT_SPILL_LIMIT_BYTES,
        spill_dir: str | None = None,
        spill_name: str | None = None,
        when_full: Literal["block", "drop-oldest"] = "block",
        write_timeout_s: float = 300.0,
    ) -> None:
        if when_full not in {"block", "drop-oldest"}:
            raise ConfigError(f"when_full={when_full!r} is neither 'block' nor 'drop-oldest'")
        if memory_limit_bytes < _SMALLEST_MEMORY_BYTES:
            message = f"memory_limit_bytes={memory_limit_bytes} is below {_SMALLEST_MEMORY_BYTES}"
            raise ConfigError(message)
        if spill_limit_bytes < 0:
            raise ConfigError(f"spill_limit_bytes={spill_limit_bytes} is negative")
        if math.isnan(write_timeout_s) or write_timeout_s < 0.0:
            raise ConfigError(f"write_timeout_s={write_timeout_s!r} is no time to wait")
        self.endpoint = endpoint
        self.node_id = node_id or socket.gethostname()
        self._drops = when_full == "drop-oldest"
        self._write_timeout_s = write_timeout_s
        self._spill_dir = os.path.abspath(spill_dir or _default_spill_dir())
        self._spill_name = spill_name or endpoint
        self._notices = Notices()
        self._budget = MemoryBudget(memory_limit_bytes, spill_limit_bytes)
        server_name = None if tls is None else tls.server_name
        self._link = Link(endpoint, self.node_id, access_of(token_file, tls), server_name)
        self._lock = threading.Lock()  # guards the two fields below
        self._opened: dict[str, tuple[LogTarget, SendBuffer]] = {}
        self._is_closed = False
        self._owner_pid = os.getpid()
        self._past = FunnelStats()
        _clients.add(self)

    def open(self, path: str) -> LogTarget:
        """Return the target for a file on the server, and connect at once.

        A path that is already open gives the same target. Lines that an ended process of the same
        `spill_name` left for this path are sent first.

        Raises:
            ConfigError: The path is not absolute, too long, or holds control characters.
            LogFunnelClosedError: The client is closed, or was made before a fork.
        """
        _check_path(path)
        with self._lock:
            if self._owner_pid != os.getpid():
                message = "the log funnel client was made before a fork: make one of your own here"
                raise LogFunnelClosedError(message)
            if self._is_closed:
                raise LogFunnelClosedError("the log funnel client is closed")
            opened = self._opened.get(path)
            if opened is None:
                opened = self._opened[path] = self._make_target(path)
        self._notices.emit()
        return opened[0]

    def left_behind(self) -> list[str]:
        """Return the paths for which ended processes of this name left lines on this node.

        Opening one sends what was left.
        """
        return left_behind(self._spill_dir, self._spill_name, self.node_id)

    def flush(self, deadline_s: float | None = 30.0) -> None:
        """Flush all targets as `LogTarget.flush` does; raise the first error at the end.

        All of them together have `deadline_s` (s, None: no limit).
        """
        deadline = Deadline.after(deadline_s)
        errors = []
        for send_buffer in self._send_buffers():
            try:
                send_buffer.flush(deadline)
            except NvrxError as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def try_again(self) -> None:
        """Let waiting targets retry at once, for example after the token has changed."""
        for send_buffer in self._send_buffers():
            send_buffer.hurry()

    def close(self, deadline_s: float | None = 30.0) -> bool:
        """Close all targets and the connection; harmless when repeated.

        Returns:
            Whether all was confirmed in `deadline_s` (s, None: no limit); see `LogTarget.close`.
        """
        if self._owner_pid != os.getpid():
            return True
        deadline = Deadline.after(deadline_s)
        with self._lock:
            self._is_closed = True
        send_buffers = self._send_buffers()
        try:
            for send_buffer in send_buffers:
                send_buffer.finish()
                send_buffer.hurry()
            results = [self._close_target(send_buffer, deadline) for send_buffer in send_buffers]
            return all(results)
        finally:
            self._link.close()
            _clients.discard(self)

    @property
    def stats(self) -> FunnelStats:
        """Counters of all targets, also of closed ones, as they are now."""
        with self._lock:
            send_buffers = [send_buffer for _, send_buffer in self._opened.values()]
            total = self._past
        for send_buffer in send_buffers:
            total += FunnelStats(**send_buffer.snapshot())
        return total + FunnelStats(bytes_in_spill=self._budget.spill_bytes)

    def _send_buffers(self) -> list[SendBuffer]:
        with self._lock:
            return [send_buffer for _, send_buffer in self._opened.values()]

    def _make_target(self, path: str) -> tuple[LogTarget, SendBuffer]:
        spill, first_seq = None, 1
        stream_id = os.urandom(_STREAM_ID_BYTES).hex()
        identity = Identity(self._spill_name, self.node_id, path, stream_id)
        if self._budget.spill_limit_bytes:
            spill = adopt(self._spill_dir, identity, self._budget, self._notices.add)
            if spill is None:
                spill = Spill(self._spill_dir, identity, self._budget, self._notices.add)
            else:
                identity = spill.identity
                first_seq = spill.next_generation()
                left = spill.unread
                line = f"sending {left.lines} lines that an ended process left for {path}"
                self._notices.add(logging.INFO, line)
        stream = Stream(self._budget, spill, drops=self._drops, first_seq=first_seq)
        send_buffer = SendBuffer(
            identity, stream, self._link, self._notices, write_timeout_s=self._write_timeout_s
        )
        return LogTarget(send_buffer, self._budget, self._close_target), send_buffer

    def _close_target(self, send_buffer: SendBuffer, deadline: Deadline) -> bool:
        if self._owner_pid != os.getpid():
            return True
        send_buffer.finish()
        if send_buffer not in self._send_buffers():
            return True  # somebody else has closed it
        send_buffer.close(deadline)
        with self._lock:
            if self._opened.get(send_buffer.path, (None, None))[1] is not send_buffer:
                return True  # somebody else has closed it; the path may be open again
            del self._opened[send_buffer.path]
            is_confirmed = send_buffer.leave()
            self._past += FunnelStats(**send_buffer.snapshot())
        self._notices.emit()
        return is_confirmed

    def _abandon(self) -> None:
        """Make the copy in a forked child harmless; this is called after every fork."""
        self._lock = threading.Lock()
        self._link.abandon()
        for _, send_buffer in self._opened.values():
            send_buffer.abandon()

    def __enter__(self) -> LogFunnelClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _default_spill_dir() -> str:
    place = LogConfig.get_node_local_tmp_dir() or tempfile.gettempdir()
    return os.path.join(place, f"nvrx-funnel-{os.geteuid()}")


def _check_path(path: str) -> None:
    # The server answers too long ones as it does for a file that is full for now.
    problem = ""
    if not os.path.isabs(path):
        problem = "it is not absolute"
    elif not path.isprintable():
        problem = "it holds characters that cannot be printed"
    elif len(path.encode()) > MAX_PATH_BYTES:
        problem = f"it is over {MAX_PATH_BYTES} bytes"
    elif any(len(name.encode()) > MAX_NAME_BYTES for name in path.split("/")):
        problem = f"a name in it is over {MAX_NAME_BYTES} bytes"
    if problem:
        raise ConfigError(f"the log target {path[:200]!r}: {problem}")


def _abandon_all() -> None:
    for client in list(_clients):
        client._abandon()  # noqa: SLF001 - not for users of the class
    _clients.clear()


def _close_all() -> None:
    deadline = Deadline.after(_AT_EXIT_S)
    for client in list(_clients):
        client.close(deadline.remaining())


os.register_at_fork(after_in_child=_abandon_all)
atexit.register(_close_all)
