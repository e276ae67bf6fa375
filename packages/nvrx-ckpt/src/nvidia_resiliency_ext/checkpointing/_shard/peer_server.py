# SPDX-License-Identifier: Apache-2.0
"""Receive copies of other ranks' shards, and send them back: the server in each rank's trainer."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import secrets
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

from nvidia_resiliency_ext.checkpointing._checksum import combine, crc32
from nvidia_resiliency_ext.checkpointing._errors import DamagedCheckpointError
from nvidia_resiliency_ext.checkpointing._shard import protocol
from nvidia_resiliency_ext.checkpointing._shard.directory import (
    RankDirectory,
    ShardInProgress,
    ShardName,
)
from nvidia_resiliency_ext.checkpointing._shard.layout import Manifest
from nvidia_resiliency_ext.checkpointing._shard.read import FileSource, read_manifest
from nvidia_resiliency_ext.shared_utils.abandonable import AbandonableCall
from nvidia_resiliency_ext.shared_utils.clock import Deadline

logger = logging.getLogger(__name__)

_BUFFER_BYTES = 1 << 20
_DISCARD_BYTES = 64 << 10
_SIGNS_OF_LIFE = 4  # per `timeout_s`
_BACKLOG = 64
_ACCEPT_AGAIN_S = 0.2
_CLOSE_S = 5.0


class PeerServer:
    """Receives copies of other ranks' shards and sends them back; in threads, until `close`.

    Args:
        directory: Where the copies are kept.
        host: Address to listen at.
        token: The secret that a peer must have.
        may_keep: Returns why a shard with that manifest is refused; empty if it is not.
        timeout_s: Seconds after which a peer that does not go on is lost.

    Raises:
        OSError: The address cannot be listened at.
        RuntimeError: The system gives no thread.
    """

    def __init__(
        self,
        directory: RankDirectory,
        host: str,
        token: bytes,
        may_keep: Callable[[ShardName, Manifest], str],
        timeout_s: float,
    ) -> None:
        self._directory = directory
        self._token = token
        self._may_keep = may_keep
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._stores = 0
        self._no_stores = threading.Condition(self._lock)
        self._connections: dict[socket.socket, AbandonableCall[None]] = {}
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=_BACKLOG)
        self.port: int = self._listener.getsockname()[1]
        self._closed = False
        try:
            self._accepting = AbandonableCall("peers", self._accept)
        except RuntimeError:
            self._listener.close()
            raise

    def close(self) -> None:
        """Stop listening, end the connections and wait for the threads, 5 s at most.

        A copy that the file system does not let go on is left to its thread, which ends with the
        process; that is logged.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._no_stores.notify_all()
            connections = dict(self._connections)
        # Closing alone would not wake up a thread that waits in `accept` or `recv`.
        _shut_down(self._listener)
        for connection in connections:
            _shut_down(connection)
        deadline = Deadline.after(_CLOSE_S)
        calls = [self._accepting, *connections.values()]
        stuck = [call for call in calls if not call.ended.wait(deadline.timeout())]
        if stuck:
            logger.warning(
                "%d connections of replicating ranks are abandoned: for %g s the file system of "
                "%s has not let them end",
                len(stuck),
                _CLOSE_S,
                self._directory.path,
            )
        self._listener.close()

    def wait_for_stores(self, timeout_s: float) -> bool:
        """Wait until no copy is being received; return whether that is so."""
        with self._no_stores:
            return self._no_stores.wait_for(lambda: self._stores == 0, timeout_s)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                # Of a connection that is gone again, or for lack of descriptors or memory: then
                # it waits in the backlog, and another attempt at once would fail as well.
                with self._no_stores:
                    if self._no_stores.wait_for(lambda: self._closed, _ACCEPT_AGAIN_S):
                        return
                logger.warning("cannot accept a rank that replicates to this one: %s", error)
                continue
            serve = functools.partial(self._serve, connection)
            with self._lock:
                if self._closed:
                    connection.close()
                    return
                try:
                    self._connections[connection] = AbandonableCall("peer", serve)
                except RuntimeError as error:
                    # The rank at the other end sees its connection end and reports that.
                    logger.warning("cannot serve a rank that replicates to this one: %s", error)
                    connection.close()

    def _serve(self, connection: socket.socket) -> None:
        try:
            protocol.set_options(connection, self._timeout_s)
            request = self._handshake(connection)
            name = ShardName(int(request["iteration"]), int(request["owner"]))
            if request["op"] == "store":
                connection.settimeout(self._timeout_s * protocol.PATIENCE)
                with self._counted():
                    self._store(connection, name)
            elif request["op"] == "read":
                # It may be busy for long; TCP's probes notice when its host is lost.
                connection.settimeout(None)
                self._read(connection, name)
        # Also of numbers that are too large, and of JSON that is nested too deeply.
        except (OSError, ValueError, KeyError, TypeError, OverflowError, RuntimeError) as error:
            if not self._closed:
                logger.warning("a connection of a replicating rank ended: %s", error)
        finally:
            with self._lock:
                self._connections.pop(connection, None)
            connection.close()

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        with self._lock:
            self._stores += 1
        try:
            yield
        finally:
            with self._no_stores:
                self._stores -= 1
                self._no_stores.notify_all()

    def _handshake(self, connection: socket.socket) -> dict[str, Any]:
        nonce = secrets.token_bytes(protocol.NONCE_BYTES)
        connection.sendall(nonce)
        proof = protocol.receive(connection, protocol.PROOF_BYTES)
        text = protocol.receive_text(connection)
        protocol.require_proof(proof, self._token, nonce + text)
        request: dict[str, Any] = json.loads(text)
        connection.sendall(protocol.proof_of(self._token, bytes.fromhex(request["nonce"])))
        return request

    def _store(self, connection: socket.socket, name: ShardName) -> None:
        try:
            shard = self._directory.create(name.iteration, name.owner)
        except OSError as error:
            protocol.send_json(connection, {"error": str(error)})
            return
        try:
            protocol.send_json(connection, {"error": ""})
            problem = self._receive_shard(connection, shard, name)
            if not problem:
                with _signs_of_life(connection, self._timeout_s / _SIGNS_OF_LIFE):
                    shard.publish()
        except (OSError, OverflowError, RuntimeError) as error:
            # Ours (no space, read-only, no threads) is worth telling; of the connection's the peer
            # knows.
            problem = str(error)
        finally:
            shard.discard()
        with contextlib.suppress(OSError):
            protocol.send_json(connection, {"error": problem})
            if problem:
                _discard_rest(connection)

    def _receive_shard(
        self, connection: socket.socket, shard: ShardInProgress, name: ShardName
    ) -> str:
        """Receive and write a shard; return its problem, or an empty text."""
        intake = _Intake(connection, shard)
        pieces = intake.run()
        if intake.received != shard.written_bytes:
            return "the copy has gaps, or parts that were sent twice"
        source = shard.source()
        try:
            manifest = read_manifest(source)
        except DamagedCheckpointError as error:
            return f"the copy is not whole: {error}"
        finally:
            source.close()
        for record in manifest.records:
            if record.nbytes and pieces.get(record.offset) != (record.nbytes, record.crc32):
                return f"the copy has other bytes than the original: {record.tensor or record.name}"
        return self._may_keep(name, manifest)

    def _read(self, connection: socket.socket, name: ShardName) -> None:
        try:
            source = self._directory.source(name)
        except OSError as error:
            protocol.send_json(connection, {"error": str(error)})
            return
        try:
            protocol.send_json(connection, {"error": "", "nbytes": source.nbytes})
            self._send_ranges(connection, source)
        finally:
            source.close()

    def _send_ranges(self, connection: socket.socket, source: FileSource) -> None:
        while True:
            request = protocol.receive(connection, protocol.RANGE.size, may_end=True)
            if not request:
                return
            position, left = protocol.RANGE.unpack(request)
            while left:
                sent = os.sendfile(connection.fileno(), source.fileno(), position, left)
                if sent == 0:
                    raise ValueError("it asked for bytes behind the end")
                position, left = position + sent, left - sent


class _Intake:
    """Receives the ranges of a file: two threads take turns to receive, check and write a piece.

    So a piece is checked and written while it is in the cache, and the next one arrives meanwhile.

    Args:
        connection: Where they come from.
        shard: The file.

    Attributes:
        received: Bytes that arrived.
    """

    def __init__(self, connection: socket.socket, shard: ShardInProgress) -> None:
        self.received = 0
        self._connection = connection
        self._write = shard.write
        self._turn = threading.Lock()
        self._position = self._left = 0
        self._over = False
        # Where and how long each piece is, in the order of arrival, and its checksum.
        self._pieces: list[tuple[int, int]] = []
        self._crcs: dict[int, int] = {}

    def run(self) -> dict[int, tuple[int, int]]:
        """Receive all pieces; return length and checksum of each contiguous part, by its offset.

        Raises:
            OSError: The connection ended, or a piece could not be written.
        """
        # Not of a pool: the interpreter waits for its threads at exit, and the disk may hang.
        other = AbandonableCall("peer-write", self._work)
        try:
            self._work()
        finally:
            other.ended.wait()  # it uses the same file
        other.result()
        found: dict[int, tuple[int, int]] = {}
        begin = end = -1
        for number, (position, nbytes) in enumerate(self._pieces):
            if position != end:
                begin, found[position] = position, (0, 0)
            length, value = found[begin]
            found[begin] = (length + nbytes, combine(value, self._crcs[number], nbytes))
            end = position + nbytes
        return found

    def _work(self) -> None:
        buffer = memoryview(bytearray(_BUFFER_BYTES))
        try:
            while piece := self._next(buffer):
                number, position, data = piece
                self._crcs[number] = crc32(data)
                self._write(position, data)
        except BaseException:
            self._over = True
            raise

    def _next(self, buffer: memoryview) -> tuple[int, int, memoryview] | None:
        with self._turn:
            if not self._left and not self._over:
                self._position, self._left = protocol.RANGE.unpack(
                    protocol.receive(self._connection, protocol.RANGE.size)
                )
                self._over = not self._left
            if self._over:
                return None
            position, data = self._position, buffer[: self._left]
            protocol.receive_into(self._connection, data)
            self._position, self._left = position + data.nbytes, self._left - data.nbytes
            self.received += data.nbytes
            self._pieces.append((position, data.nbytes))
            return len(self._pieces) - 1, position, data


@contextlib.contextmanager
def _signs_of_life(sock: socket.socket, interval_s: float) -> Iterator[None]:
    """Send the peer a sign of life at intervals, while its copy is being made durable.

    The socket's timeout bounds the last one.
    """
    is_over = threading.Event()

    def send() -> None:
        with contextlib.suppress(OSError):
            while not is_over.wait(interval_s):
                protocol.send_json(sock, {"error": "", "is_working": True})

    sending = AbandonableCall("peer-alive", send)
    try:
        yield
    finally:
        is_over.set()
        sending.ended.wait()


def _discard_rest(sock: socket.socket) -> None:
    """Read until the other end closes: closing before that could destroy our last message."""
    sock.shutdown(socket.SHUT_WR)
    buffer = bytearray(_DISCARD_BYTES)
    while sock.recv_into(buffer):
        pass


def _shut_down(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
