# SPDX-License-Identifier: Apache-2.0
"""Owns what the server knows of a sender: which chunks it sent and which of them are in a file.

Bookkeeping only; whoever calls holds the funnel's lock.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from nvidia_resiliency_ext.shared_utils._funnel.refusal import Refusal
    from nvidia_resiliency_ext.shared_utils._funnel.target import Target

__all__ = ["Connection", "Pending", "Source"]


class Connection(Protocol):
    """One RPC, as its edge implements it."""

    def progress(self, source: Source) -> None:
        """Take note that a source of this connection moved: committed, admitted or refused.

        It is called from any thread, with no lock held, and must not block.
        """
        ...


class Pending:
    """A chunk that is not in its file yet; one without data ends its source's unfinished line.

    Attributes:
        data: What is to be written; bytes of its own where several small chunks became one.
        growing: The same, as long as further small chunks of its source may be added.
    """

    __slots__ = ("arrived_at", "data", "growing", "is_done", "is_end", "seq", "size", "source")

    def __init__(
        self, source: Source, seq: int, data: memoryview | bytearray, size: int, arrived_at: float
    ) -> None:
        self.source = source
        self.seq = seq
        self.data = data
        self.size = size
        self.arrived_at = arrived_at
        self.is_done = False
        self.is_end = False
        self.growing: bytearray | None = None


class Source:
    """One stream of chunks on one connection.

    A leaf's connection carries many. A stream that reconnects is a new source with the same
    `stream_id`.

    Attributes:
        identity: Tells whose line a file ends with; the `stream_id`, or something unique.
        is_patient: It waits for room in a file that hangs. A connection that carries the streams
            of many would hold up the others, so it is refused for now instead.
        node_id: As the first chunk named it.
        targets: The files that it named, with when it last went over to each in `used_at`.
        current: The file that its last chunk was for.
        waiting: The target for whose room this source waits, with its chunk.
        refusal: Why nothing more is taken from it.
    """

    __slots__ = (
        "behind_bytes",
        "committed_seq",
        "connection",
        "current",
        "identity", "is_patient",
        "node_id",
        "outstanding",
        "received_bytes",
        "received_seq",
        "refusal",
        "refused_seq",
        "stream_id",
        "targets",
        "unfinished",
        "used_at",
        "waiting",
        "written_bytes",
    )  # fmt: skip

    def __init__(
        self, connection: Connection, stream_id: str, node_id: str, *, is_patient: bool = True
    ) -> None:
        self.connection = connection
        self.stream_id = stream_id
        self.is_patient = is_patient
        self.identity = stream_id or f"\n{id(self)}"
        self.node_id = node_id
        self.outstanding: deque[Pending] = deque()
        self.received_seq = 0
        self.committed_seq = 0
        self.received_bytes = 0
        self.written_bytes = 0
        self.behind_bytes = 0
        self.targets: dict[str, Target] = {}
        self.used_at: dict[str, float] = {}
        self.current: Target | None = None
        self.unfinished: set[Target] = set()
        self.waiting: tuple[Target, Pending] | None = None
        self.refusal: Refusal | None = None
        self.refused_seq = 0

    @property
    def is_settled(self) -> bool:
        """Nothing of it waits for room or for its file."""
        return not self.outstanding and self.waiting is None

    def admit(self, pending: Pending) -> None:
        """Count a chunk in, in the order in which the sender sent it."""
        self.outstanding.append(pending)
        self.behind_bytes += len(pending.data)

    def settle(self, pending: Pending) -> None:
        """Note that a chunk is in its file, and advance past all that are."""
        pending.is_done = True
        self.written_bytes += len(pending.data)
        self.behind_bytes -= len(pending.data)
        outstanding = self.outstanding
        while outstanding and outstanding[0].is_done:
            # A number that comes again must not take an acknowledgement back.
            self.committed_seq = max(self.committed_seq, outstanding.popleft().seq)

    def refuse(self, refusal: Refusal, seq: int) -> None:
        """Take nothing more; the first reason stays."""
        if self.refusal is None:
            self.refusal, self.refused_seq = refusal, seq

    def abandon(self, pending: Pending) -> None:
        """Forget a chunk that will never be in its file; the source has been refused."""
        self.behind_bytes -= len(pending.data)
        # It stays at its place, so that no acknowledgement passes it.
        pending.data = memoryview(b"")
