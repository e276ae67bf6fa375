# SPDX-License-Identifier: Apache-2.0
"""Both ends of the log funnel for tests: servers as processes, and small clients of our own.

The clients speak the wire protocol and share no code with the library's client.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

import grpc

from nvidia_resiliency_ext.shared_utils.proto import log_aggregation_pb2 as pb
from nvidia_resiliency_ext.shared_utils.proto import log_aggregation_pb2_grpc as service

ROOT = "nvidia_resiliency_ext.shared_utils.grpc_log_server"
LEAF = "nvidia_resiliency_ext.shared_utils.grpc_log_leaf_server"
DEADLINE_S = 60.0

_QUIET = {"GRPC_VERBOSITY": "NONE"}


def until(condition, what: str, timeout_s: float = DEADLINE_S) -> None:
    """Wait for something that gives no event to wait for."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, f"not within {timeout_s} s: {what}"
        threading.Event().wait(0.01)


class Server:
    """A server process; `address` once it listens."""

    def __init__(self, module: str, log: Path, *arguments: str, env=None, prefix=()) -> None:
        self.module = module
        self.log = log
        self.arguments = arguments
        self.env = {**os.environ, **_QUIET, **(env or {})}
        self.prefix = tuple(prefix)
        self.process: subprocess.Popen[bytes] | None = None
        self.address = ""

    def start(self, *, wait: bool = True) -> Server:
        command = [*self.prefix, sys.executable, "-m", self.module, *self.arguments]
        offset = self.log.stat().st_size if self.log.exists() else 0
        with self.log.open("ab") as out:
            self.process = subprocess.Popen(
                command, stdout=out, stderr=out, stdin=subprocess.DEVNULL, cwd="/", env=self.env
            )
        if wait:
            self._wait_listening(offset)
        return self

    def _wait_listening(self, offset: int) -> None:
        def listens() -> bool:
            text = self.log.read_text(errors="replace")[offset:]
            assert self.process is not None
            assert self.process.poll() is None, text
            for line in text.splitlines():
                _, found, rest = line.partition("listening on ")
                if found:
                    self.address = rest.split(",")[0].strip()
            return bool(self.address)

        self.address = ""
        until(listens, f"{self.module} listens")

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def stop(self, timeout_s: float = DEADLINE_S) -> int:
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout_s)

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(signal.SIGCONT)
            self.kill()

    def __enter__(self):
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def rss_mb(self) -> float:
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith("VmHWM"):
                return int(line.split()[1]) / 1024
        raise AssertionError("no VmHWM")


def root(tmp_path: Path, *arguments: str, name: str = "root", **kwargs: Any) -> Server:
    """Return a root that is not started yet, for the directory `logs` below tmp_path."""
    logs = tmp_path / "logs"
    logs.mkdir(exist_ok=True)
    if "--port" not in arguments and "--host" not in arguments:
        arguments = ("--port", "0", *arguments)
    if "--graceful-shutdown-timeout" not in arguments:
        arguments = ("--graceful-shutdown-timeout", "5", *arguments)
    if "--allowed-root" not in arguments:
        arguments = ("--allowed-root", str(logs), *arguments)
    return Server(ROOT, tmp_path / f"{name}.out", *arguments, **kwargs)


def leaf(tmp_path: Path, upstream: str, *arguments: str, name: str = "leaf", **kw: Any) -> Server:
    """Return a leaf that is not started yet."""
    if "--port" not in arguments:
        arguments = ("--port", "0", *arguments)
    if "--allowed-root" not in arguments:
        arguments = ("--allowed-root", str(tmp_path / "logs"), *arguments)
    return Server(
        LEAF, tmp_path / f"{name}.out", "--upstream", upstream,
        "--graceful-shutdown-timeout", "5", *arguments, **kw,
    )  # fmt: skip


def channel(address: str, **options: Any) -> grpc.Channel:
    """Return a connection of its own: gRPC shares those to one address otherwise."""
    fixed = {
        "grpc.use_local_subchannel_pool": 1,
        "grpc.max_send_message_length": 64 << 20,
        "grpc.initial_reconnect_backoff_ms": 100,
        "grpc.max_reconnect_backoff_ms": 500,
    }
    return grpc.insecure_channel(address, options=list({**fixed, **options}.items()))


@contextlib.contextmanager
def stub(address: str, **options: Any):
    """Yield a stub with a connection of its own."""
    with channel(address, **options) as made:
        yield service.LogAggregationServiceStub(made)


def chunk(path: object, data: bytes, node: str = "0", stream: str = "", seq: int = 0):
    """Return a LogChunk."""
    return pb.LogChunk(node_id=node, data=data, file_path=str(path), stream_id=stream, seq=seq)


def send(address: str, *chunks: Any, timeout: float = DEADLINE_S, metadata=None):
    """Send chunks over StreamLogs; return the answer, or the code's name and the details."""
    with stub(address) as peer:
        try:
            return peer.StreamLogs(iter(chunks), timeout=timeout, metadata=metadata)
        except grpc.RpcError as error:
            return error.code().name, error.details()


def send_acked(address: str, *chunks: Any, timeout: float = DEADLINE_S, metadata=None):
    """Send chunks over StreamLogsAcked; return the last number of each stream, or the code."""
    with stub(address) as peer:
        found: dict[str, int] = {}
        try:
            for ack in peer.StreamLogsAcked(iter(chunks), timeout=timeout, metadata=metadata):
                found[ack.stream_id] = ack.committed_seq
        except grpc.RpcError as error:
            return error.code().name, error.details()
        return found


class OpenStream:
    """A StreamLogs or StreamLogsAcked that stays open."""

    def __init__(self, peer: Any, *, acked: bool = False) -> None:
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.acks: list[Any] = []
        self.error: grpc.RpcError | None = None
        self.answer: Any = None
        self._ended = threading.Event()
        requests = iter(self._queue.get, None)
        if acked:
            self.call = peer.StreamLogsAcked(requests)
        else:
            self.call = peer.StreamLogs.future(requests)
        self._thread = threading.Thread(target=self._read, args=(acked,))
        self._thread.start()

    def _read(self, acked: bool) -> None:
        try:
            if acked:
                for ack in self.call:
                    self.acks.append(ack)
            else:
                self.answer = self.call.result()
        except grpc.RpcError as error:
            self.error = error
        except grpc.FutureCancelledError:
            pass
        self._ended.set()

    def write(self, item: Any) -> None:
        self._queue.put(item)

    def committed(self, stream: str) -> int:
        return max((a.committed_seq for a in self.acks if a.stream_id == stream), default=0)

    def close(self, timeout: float = DEADLINE_S) -> None:
        self._queue.put(None)
        assert self._ended.wait(timeout), "the stream did not end"
        self._thread.join()

    def cancel(self) -> None:
        self.call.cancel()
        self._queue.put(None)
        self._thread.join()


class Resender:
    """A client that keeps each line until it is acknowledged, and sends it again until then."""

    def __init__(self, address: str, path: object, stream: str, window: int = 4096) -> None:
        self.address, self.path, self.stream = address, str(path), stream
        self._changed = threading.Condition()
        self._kept: deque[tuple[int, bytes]] = deque()
        self._seq = 0
        self._window = window
        self._is_closed = False
        self._is_over = False
        self.committed = 0
        self.connections = 0
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def put(self, data: bytes) -> None:
        with self._changed:
            self._changed.wait_for(lambda: len(self._kept) < self._window)
            self._seq += 1
            self._kept.append((self._seq, data))
            self._changed.notify_all()

    def close(self, timeout: float = DEADLINE_S) -> bool:
        """Wait until all is acknowledged."""
        with self._changed:
            done = self._changed.wait_for(lambda: not self._kept, timeout)
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join()
        return done

    def _requests(self, session: list[bool]):
        sent = 0
        while True:
            with self._changed:
                while not (self._is_closed or session[0] or self._seq > sent):
                    self._changed.wait()
                if self._is_closed or session[0]:
                    return
                ready = [item for item in self._kept if item[0] > sent]
            for seq, data in ready:
                yield chunk(self.path, data, "0", self.stream, seq)
                sent = seq

    def _run(self) -> None:
        with stub(self.address) as peer:
            while not self._is_closed:
                over = [False]
                call = peer.StreamLogsAcked(self._requests(over), wait_for_ready=True)
                self.connections += 1
                try:
                    for ack in call:
                        with self._changed:
                            self.committed = max(self.committed, ack.committed_seq)
                            while self._kept and self._kept[0][0] <= self.committed:
                                self._kept.popleft()
                            self._changed.notify_all()
                except grpc.RpcError:
                    threading.Event().wait(0.05)
                finally:
                    with self._changed:
                        over[0] = True
                        self._changed.notify_all()
