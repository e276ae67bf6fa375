# SPDX-License-Identifier: Apache-2.0
"""Shards on their way between ranks: over TCP, straight between files and memory; without torch.

A rank listens in its trainer. Whoever writes a shard, trainer or worker process, connects to the
ranks that keep copies of it and sends the bytes as it writes them; the answer comes when the copy
is durable. A rank that has lost its shard connects to the holders and reads from all of them.

Both ends prove that they know the job's token, which ranks give each other over their process
group. The content is not encrypted. A peer names no path; everything it sends is checked.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import logging
import os
import secrets
import select
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from nvidia_resiliency_ext.checkpointing._checksum import combine, crc32
from nvidia_resiliency_ext.checkpointing._errors import DamagedCheckpointError
from nvidia_resiliency_ext.checkpointing._shard.directory import (
    RankDirectory,
    ShardInProgress,
    ShardName,
)
from nvidia_resiliency_ext.checkpointing._shard.layout import Manifest
from nvidia_resiliency_ext.checkpointing._shard.read import FileSource, read_manifest
from nvidia_resiliency_ext.checkpointing._shard.write import file_sink
from nvidia_resiliency_ext.shared_utils.clock import Deadline
from nvidia_resiliency_ext.shared_utils.errors import NvrxError

__all__ = ["Peer", "PeerError", "PeerServer", "PeerSource", "PeerTarget"]

logger = logging.getLogger(__name__)

_NONCE_BYTES = 16
_PROOF_BYTES = 32
_LIMIT_BYTES = 64 << 10
_BUFFER_BYTES = 1 << 20
_DISCARD_BYTES = 64 << 10
_LENGTH = struct.Struct("<I")
_RANGE = struct.Struct("<QQ")
_END = _RANGE.pack(0, 0)
_PATIENCE = 10  # times that, for a peer that is there and does not get on
_SIGNS_OF_LIFE = 4  # in the time after which a peer that gives none is lost
_BACKLOG = 64
_ACCEPT_AGAIN_S = 0.2


class PeerError(NvrxError, OSError):
    """A rank that keeps copies could not be reached or could not do what was asked.

    Args:
        peer: The rank, and where it was looked for.
        reason: What happened.
    """

    def __init__(self, peer: Peer, reason: object) -> None:
        super().__init__(f"rank {peer.rank} at {peer.host}:{peer.port}: {reason}")
        self.peer = peer


@dataclass(frozen=True)
class Peer:
    """A rank that keeps copies of shards.

    Attributes:
        rank: Its global rank.
        host: Address that it listens at.
        port: Port that it listens at.
        token: What proves that one belongs to the job.
        timeout_s: Seconds after which a peer that does not answer is lost.
    """

    rank: int
    host: str
    port: int
    token: bytes
    timeout_s: float

    def __repr__(self) -> str:
        """Show everything but the token."""
        return f"Peer(rank={self.rank}, host={self.host!r}, port={self.port})"


class PeerTarget:
    """A copy of a shard that is being sent to a peer.

    Args:
        peer: Who shall keep the copy.
        name: Which shard it is.

    Raises:
        PeerError: The peer is not there or refuses.
    """

    def __init__(self, peer: Peer, name: ShardName) -> None:
        self._peer = peer
        self._sock, _ = _connect(peer, "store", name)
        # Not select: it refuses descriptors above 1023.
        self._heard = select.poll()
        self._heard.register(self._sock, select.POLLIN)

    def __call__(self, position: int, data: memoryview) -> None:
        """Send bytes for a position of the file."""
        if not data:
            return
        try:
            # A keeper that cannot go on says so at once.
            if self._heard.poll(0):
                _require_success(_receive_json(self._sock))
            _send_all(self._sock, [_RANGE.pack(position, data.nbytes), data])
        except (OSError, ValueError) as error:
            raise PeerError(self._peer, error) from error

    def finish(self) -> None:
        """Wait until the copy is durable, as long as the peer gives signs of life.

        The whole wait ends after ten times the peer's timeout.

        Raises:
            PeerError: It is not there.
        """
        try:
            self._sock.sendall(_END)
            deadline = Deadline.after(self._peer.timeout_s * _PATIENCE)
            answer = _receive_json(self._sock)
            while answer.get("is_working") and not deadline.expired():
                answer = _receive_json(self._sock)
        except TimeoutError as error:
            reason = f"no sign of life for {self._peer.timeout_s:g} s (peer_timeout_s)"
            raise PeerError(self._peer, reason) from error
        except (OSError, ValueError) as error:
            raise PeerError(self._peer, error) from error
        if answer.get("is_working"):
            limit_s = self._peer.timeout_s * _PATIENCE
            reason = f"its disk has not made the copy durable for {limit_s:g} s"
            raise PeerError(self._peer, f"{reason} ({_PATIENCE} times peer_timeout_s)")
        if answer["error"]:
            raise PeerError(self._peer, answer["error"])

    def close(self) -> None:
        """End the connection; a copy that is not finished is dropped by the peer."""
        self._sock.close()


class PeerSource:
    """A shard that a peer keeps.

    Args:
        peer: Who keeps it.
        name: Which shard it is.

    Raises:
        PeerError: The peer is not there or does not have it.
    """

    def __init__(self, peer: Peer, name: ShardName) -> None:
        self._peer = peer
        self._lock = threading.Lock()
        self._sock, answer = _connect(peer, "read", name)
        self.name = f"{name} of rank {peer.rank}"
        self.nbytes = int(answer["nbytes"])

    def read_into(self, position: int, target: memoryview) -> None:
        """Fill the target with the bytes at a position."""
        if not target:
            return
        with self._lock:
            try:
                self._sock.sendall(_RANGE.pack(position, target.nbytes))
                _receive_into(self._sock, target)
            except OSError as error:
                raise PeerError(self._peer, error) from error

    def close(self) -> None:
        """End the connection."""
        self._sock.close()


class PeerServer:
    """Keeps copies for other ranks and gives them back; runs in threads of its own until `close`.

    Args:
        directory: Where the copies are kept.
        host: Address to listen at.
        token: What a peer must know.
        may_keep: Tells why a shard with that manifest may not be kept here; empty if it may.
        timeout_s: Seconds after which a peer that does not go on is lost.
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
        self._connections: dict[socket.socket, threading.Thread] = {}
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=_BACKLOG)
        self.port: int = self._listener.getsockname()[1]
        self._closed = False
        self._thread = threading.Thread(target=self._accept, name="nvrx-peers", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening, end the connections and wait for the threads."""
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
        self._thread.join()
        for thread in connections.values():
            thread.join()
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
            thread = threading.Thread(
                target=self._serve, args=(connection,), name="nvrx-peer", daemon=True
            )
            with self._lock:
                if self._closed:
                    connection.close()
                    return
                self._connections[connection] = thread
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            _set_options(connection, self._timeout_s)
            request = self._handshake(connection)
            name = ShardName(int(request["iteration"]), int(request["owner"]))
            if request["op"] == "store":
                connection.settimeout(self._timeout_s * _PATIENCE)
                with self._counted():
                    self._store(connection, name)
            elif request["op"] == "read":
                # It may be busy for long; TCP's probes notice when its host is lost.
                connection.settimeout(None)
                self._read(connection, name)
        except (OSError, ValueError, KeyError, TypeError) as error:
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
        nonce = secrets.token_bytes(_NONCE_BYTES)
        connection.sendall(nonce)
        proof = _receive(connection, _PROOF_BYTES)
        text = _receive_text(connection)
        _require_proof(proof, self._token, nonce + text)
        request: dict[str, Any] = json.loads(text)
        connection.sendall(_proof(self._token, bytes.fromhex(request["nonce"])))
        return request

    def _store(self, connection: socket.socket, name: ShardName) -> None:
        try:
            shard = self._directory.create(name.iteration, name.owner)
        except OSError as error:
            _send_json(connection, {"error": str(error)})
            return
        try:
            _send_json(connection, {"error": ""})
            problem = self._receive_shard(connection, shard, name)
            if not problem:
                with _signs_of_life(connection, self._timeout_s / _SIGNS_OF_LIFE):
                    shard.publish()
        except (OSError, RuntimeError) as error:
            # Ours (no space, read-only, no threads) is worth telling; of the connection's the peer
            # knows.
            problem = str(error)
        finally:
            shard.discard()
        with contextlib.suppress(OSError):
            _send_json(connection, {"error": problem})
            if problem:
                _discard_rest(connection)

    def _receive_shard(
        self, connection: socket.socket, shard: ShardInProgress, name: ShardName
    ) -> str:
        """Write what arrives; return what is wrong with it."""
        intake = _Intake(connection, shard.descriptor)
        pieces = intake.run()
        if intake.received != shard.written_bytes():
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
            _send_json(connection, {"error": str(error)})
            return
        try:
            _send_json(connection, {"error": "", "nbytes": source.nbytes})
            self._send_ranges(connection, source)
        finally:
            source.close()

    def _send_ranges(self, connection: socket.socket, source: FileSource) -> None:
        while True:
            request = _receive(connection, _RANGE.size, may_end=True)
            if not request:
                return
            position, left = _RANGE.unpack(request)
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
        descriptor: The file.

    Attributes:
        received: Bytes that arrived.
    """

    def __init__(self, connection: socket.socket, descriptor: int) -> None:
        self.received = 0
        self._connection = connection
        self._write = file_sink(descriptor)
        self._turn = threading.Lock()
        self._position = self._left = 0
        self._over = False
        # Where and how long each piece is, in the order of arrival, and its checksum.
        self._pieces: list[tuple[int, int]] = []
        self._crcs: dict[int, int] = {}

    def run(self) -> dict[int, tuple[int, int]]:
        """Receive all; return length and checksum of what lies together, by where it begins.

        Raises:
            OSError: The connection ended, or a piece could not be written.
        """
        with ThreadPoolExecutor(1, thread_name_prefix="nvrx-peer-write") as pool:
            other = pool.submit(self._work)
            self._work()
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
                self._position, self._left = _RANGE.unpack(_receive(self._connection, _RANGE.size))
                self._over = not self._left
            if self._over:
                return None
            position, data = self._position, buffer[: self._left]
            _receive_into(self._connection, data)
            self._position, self._left = position + data.nbytes, self._left - data.nbytes
            self.received += data.nbytes
            self._pieces.append((position, data.nbytes))
            return len(self._pieces) - 1, position, data


def _connect(peer: Peer, operation: str, name: ShardName) -> tuple[socket.socket, dict[str, Any]]:
    try:
        sock = socket.create_connection((peer.host, peer.port), timeout=peer.timeout_s)
    except OSError as error:
        raise PeerError(peer, error) from error
    try:
        _set_options(sock, peer.timeout_s)
        nonce = _receive(sock, _NONCE_BYTES)
        mine = secrets.token_bytes(_NONCE_BYTES)
        request = {
            "op": operation,
            "iteration": name.iteration,
            "owner": name.owner,
            "nonce": mine.hex(),
        }
        text = json.dumps(request).encode()
        head = _proof(peer.token, nonce + text) + _LENGTH.pack(len(text))
        sock.sendall(head + text)
        _require_proof(_receive(sock, _PROOF_BYTES), peer.token, mine)
        answer = _receive_json(sock)
        _require_success(answer)
    except (OSError, ValueError) as error:
        sock.close()
        raise PeerError(peer, error) from error
    return sock, answer


def _set_options(sock: socket.socket, timeout_s: float) -> None:
    """Notice a lost host: by data that is not acknowledged, and by probes while nothing is sent."""
    sock.settimeout(timeout_s)
    interval_s = max(1, int(timeout_s / 4))
    for option, value in (
        (socket.TCP_NODELAY, 1),
        (socket.TCP_USER_TIMEOUT, int(timeout_s * 1000)),
        (socket.TCP_KEEPIDLE, interval_s),
        (socket.TCP_KEEPINTVL, interval_s),
        (socket.TCP_KEEPCNT, 3),
    ):
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def _require_proof(proof: bytes, token: bytes, message: bytes) -> None:
    if not hmac.compare_digest(proof, _proof(token, message)):
        raise ValueError("the other end does not know the job's token")


def _require_success(answer: dict[str, Any]) -> None:
    if answer["error"]:
        raise ValueError(answer["error"])


def _proof(token: bytes, message: bytes) -> bytes:
    return hmac.digest(token, message, "sha256")


def _send_all(sock: socket.socket, parts: list[Any]) -> None:
    views = [memoryview(part) for part in parts]
    while views:
        sent = sock.sendmsg(views)
        while views and sent >= views[0].nbytes:
            sent -= views.pop(0).nbytes
        if views and sent:
            views[0] = views[0][sent:]


@contextlib.contextmanager
def _signs_of_life(sock: socket.socket, interval_s: float) -> Iterator[None]:
    """Tell the other end again and again that its copy is being made durable.

    The socket's timeout bounds the wait for the end of what is being told.
    """
    is_over = threading.Event()

    def tell() -> None:
        with contextlib.suppress(OSError):
            while not is_over.wait(interval_s):
                _send_json(sock, {"error": "", "is_working": True})

    thread = threading.Thread(target=tell, name="nvrx-peer-alive", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def _discard_rest(sock: socket.socket) -> None:
    """Read until the other end closes: closing before that could destroy our last message."""
    sock.shutdown(socket.SHUT_WR)
    buffer = bytearray(_DISCARD_BYTES)
    while sock.recv_into(buffer):
        pass


def _send_json(sock: socket.socket, value: dict[str, Any]) -> None:
    text = json.dumps(value).encode()
    sock.sendall(_LENGTH.pack(len(text)) + text)


def _receive_json(sock: socket.socket) -> dict[str, Any]:
    found = json.loads(_receive_text(sock))
    if not isinstance(found, dict) or not isinstance(found.get("error"), str):
        raise ValueError("it did not answer in our protocol")  # noqa: TRY004 - of what a peer says
    return found


def _receive_text(sock: socket.socket) -> bytes:
    (length,) = _LENGTH.unpack(_receive(sock, _LENGTH.size))
    if length > _LIMIT_BYTES:
        raise ValueError(f"it announces {length} bytes; {_LIMIT_BYTES} are allowed")
    return _receive(sock, length)


def _receive(sock: socket.socket, nbytes: int, *, may_end: bool = False) -> bytes:
    data = bytearray(nbytes)
    got = sock.recv_into(data)
    if got == 0 and may_end:
        return b""
    if got == 0 and nbytes:
        raise ConnectionError("the connection ended")
    _receive_into(sock, memoryview(data)[got:])
    return bytes(data)


def _receive_into(sock: socket.socket, target: memoryview) -> None:
    while target:
        count = sock.recv_into(target)
        if count == 0:
            raise ConnectionError("the connection ended in the middle")
        target = target[count:]


def _shut_down(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
