# SPDX-License-Identifier: Apache-2.0
"""Send shards to other ranks, and read them from there, straight between files and memory.

The process that writes a shard, trainer or worker, connects to the `PeerServer` of each rank that
gets a copy and sends the bytes as it writes them; the answer comes when the copy is durable. A rank
that has lost its shard reads it from all ranks that have a copy. No torch is needed.

Both ends prove that they have the job's token, which ranks exchange over their process group. The
content is not encrypted. A peer sends no paths, and all that it sends is checked.
"""

from __future__ import annotations

import json
import secrets
import select
import socket
import threading
from dataclasses import dataclass, replace
from typing import Any

from nvidia_resiliency_ext.checkpointing._shard import protocol
from nvidia_resiliency_ext.checkpointing._shard.directory import ShardName
from nvidia_resiliency_ext.shared_utils.clock import Deadline
from nvidia_resiliency_ext.shared_utils.errors import NvrxError

_END = protocol.RANGE.pack(0, 0)


class PeerError(NvrxError, OSError):
    """A rank that keeps copies could not be reached or could not do what was asked.

    Args:
        peer: The rank, and where it was looked for.
        reason: What happened.
    """

    def __init__(self, peer: Peer, reason: object) -> None:
        super().__init__(f"rank {peer.rank} at {peer.host}:{peer.port}: {reason}")
        self.peer = peer
        self._reason = str(reason)

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle the error with both fields, but without the secret of the job.

        The base class would lose the peer, and not come back.
        """
        return type(self), (replace(self.peer, token=b""), self._reason)


@dataclass(frozen=True)
class Peer:
    """A rank that keeps copies of shards.

    Attributes:
        rank: Its global rank.
        host: Address that it listens at.
        port: Port that it listens at.
        token: The secret of the job.
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
        peer: The rank that gets the copy.
        name: Which shard it is.

    Raises:
        PeerError: The peer is not there or refuses.
    """

    def __init__(self, peer: Peer, name: ShardName) -> None:
        self._peer = peer
        self._sock, _ = _connect(peer, "store", name)
        # Not select: it refuses descriptors above 1023.
        self._incoming = select.poll()
        self._incoming.register(self._sock, select.POLLIN)

    def __call__(self, position: int, data: memoryview) -> None:
        """Send bytes for a position of the file."""
        if not data:
            return
        try:
            # A peer that cannot go on says so at once.
            if self._incoming.poll(0):
                _require_success(protocol.receive_json(self._sock))
            _send_all(self._sock, [protocol.RANGE.pack(position, data.nbytes), data])
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
            deadline = Deadline.after(self._peer.timeout_s * protocol.PATIENCE)
            answer = protocol.receive_json(self._sock)
            while answer.get("is_working") and not deadline.expired():
                answer = protocol.receive_json(self._sock)
        except TimeoutError as error:
            reason = f"no sign of life for {self._peer.timeout_s:g} s (peer_timeout_s)"
            raise PeerError(self._peer, reason) from error
        except (OSError, ValueError) as error:
            raise PeerError(self._peer, error) from error
        if answer.get("is_working"):
            limit_s = self._peer.timeout_s * protocol.PATIENCE
            reason = f"its disk has not made the copy durable for {limit_s:g} s"
            raise PeerError(self._peer, f"{reason} ({protocol.PATIENCE} times peer_timeout_s)")
        if answer["error"]:
            raise PeerError(self._peer, answer["error"])

    def close(self) -> None:
        """End the connection; a copy that is not finished is dropped by the peer."""
        self._sock.close()


class PeerSource:
    """A shard that a peer keeps.

    Args:
        peer: The rank that has it.
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
                self._sock.sendall(protocol.RANGE.pack(position, target.nbytes))
                protocol.receive_into(self._sock, target)
            except OSError as error:
                raise PeerError(self._peer, error) from error

    def close(self) -> None:
        """End the connection."""
        self._sock.close()


def _connect(peer: Peer, operation: str, name: ShardName) -> tuple[socket.socket, dict[str, Any]]:
    try:
        sock = socket.create_connection((peer.host, peer.port), timeout=peer.timeout_s)
    except OSError as error:
        raise PeerError(peer, error) from error
    try:
        protocol.set_options(sock, peer.timeout_s)
        nonce = protocol.receive(sock, protocol.NONCE_BYTES)
        mine = secrets.token_bytes(protocol.NONCE_BYTES)
        request = {
            "op": operation,
            "iteration": name.iteration,
            "owner": name.owner,
            "nonce": mine.hex(),
        }
        text = json.dumps(request).encode()
        head = protocol.proof_of(peer.token, nonce + text) + protocol.LENGTH.pack(len(text))
        sock.sendall(head + text)
        protocol.require_proof(protocol.receive(sock, protocol.PROOF_BYTES), peer.token, mine)
        answer = protocol.receive_json(sock)
        _require_success(answer)
    except (OSError, ValueError) as error:
        sock.close()
        raise PeerError(peer, error) from error
    return sock, answer


def _require_success(answer: dict[str, Any]) -> None:
    if answer["error"]:
        raise ValueError(answer["error"])


def _send_all(sock: socket.socket, parts: list[Any]) -> None:
    views = [memoryview(part) for part in parts]
    while views:
        sent = sock.sendmsg(views)
        while views and sent >= views[0].nbytes:
            sent -= views.pop(0).nbytes
        if views and sent:
            views[0] = views[0][sent:]
