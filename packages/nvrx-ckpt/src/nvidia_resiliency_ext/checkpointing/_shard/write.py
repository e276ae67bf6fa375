# SPDX-License-Identifier: Apache-2.0
"""Write a shard file from memory, without another copy of the tensors; it needs no torch."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import Any

from nvidia_resiliency_ext.checkpointing._checksum import combine, crc32
from nvidia_resiliency_ext.checkpointing._shard.layout import (
    Manifest,
    Record,
    ShardIdentity,
    frame_after,
    frame_before,
    manifest_record,
    place_records,
)

_PIECE_BYTES = 1 << 20

# Takes bytes for a position of the file; positions may come in any order.
Sink = Callable[[int, memoryview], None]


@dataclass(frozen=True)
class ShardContent:
    """Content of one shard, without the bytes of the tensors.

    Attributes:
        identity: Which part of which checkpoint it is.
        state_class: Module and name of the class of the state.
        skeleton: The pickled state, in which tensors refer to storages by number.
        storages: For each storage its length in bytes and what it is in the state.
    """

    identity: ShardIdentity
    state_class: str
    skeleton: bytes
    storages: tuple[tuple[int, str], ...]

    def records(self) -> tuple[Record, ...]:
        """Return where everything but the manifest lies; checksums are not known yet."""
        sizes = [("data.pkl", len(self.skeleton), ""), ("byteorder", len(_BYTE_ORDER), "")]
        sizes += [(f"data/{k}", nbytes, tensor) for k, (nbytes, tensor) in enumerate(self.storages)]
        return place_records([*sizes, ("version", len(_VERSION), "")])


_BYTE_ORDER = b"little"
_VERSION = b"3\n"


def bytes_of(buffer: Any) -> memoryview:
    """Return the bytes of a contiguous CPU tensor or of any buffer, without copying them."""
    if not hasattr(buffer, "data_ptr"):
        return memoryview(buffer).cast("B")
    if buffer.nbytes == 0:
        return memoryview(b"")
    memory = (ctypes.c_char * buffer.nbytes).from_address(buffer.data_ptr())
    # The view keeps this object, and thereby the tensor, alive.
    memory._tensor = buffer  # noqa: SLF001
    return memoryview(memory).cast("B")


def write_content(
    content: ShardContent, storages: Sequence[Any], file: Sink, copies: Sequence[Sink] = ()
) -> Manifest:
    """Hand all bytes of a shard to each sink; the same content always gives the same bytes.

    Two threads take turns to compute the checksum of a piece and to write it while it is in the
    cache; each copy has a thread of its own. The frames between the records hold the checksums, so
    they come last.

    Args:
        content: What the shard holds.
        storages: The bytes of the storages: uint8 tensors or other buffers.
        file: Takes the bytes, from two threads at once.
        copies: Take the bytes as well. The first error of any sink stops the others.

    Raises:
        ValueError: A storage has another length than the content says.
        Exception: What the first sink that failed raised.
    """
    lengths = [nbytes for nbytes, _ in content.storages]
    views = [bytes_of(storage) for storage in storages]
    if lengths != [view.nbytes for view in views]:
        raise ValueError("the storages are not as long as the content says")
    data = [memoryview(content.skeleton), memoryview(_BYTE_ORDER), *views, memoryview(_VERSION)]
    feed = _Feed(content, data)
    with (
        ThreadPoolExecutor(1 + len(copies), thread_name_prefix="nvrx-shard") as pool,
        feed.failing(),
    ):
        other = pool.submit(feed.write, file)
        running = [pool.submit(feed.fill, copy) for copy in copies]
        feed.write(file)
        wait([other])
        feed.finish(file)
        wait(running)
    if feed.error is not None:
        raise feed.error
    return feed.manifest.result()


class _Feed:
    """One shard on its way to several sinks."""

    def __init__(self, content: ShardContent, data: list[memoryview]) -> None:
        self.error: BaseException | None = None
        self.manifest: Future[Manifest] = Future()
        self._content = content
        self._records = content.records()
        self._pieces = [
            (number, record.offset + start, view[start : start + _PIECE_BYTES])
            for number, (record, view) in enumerate(zip(self._records, data, strict=True))
            for start in range(0, record.nbytes, _PIECE_BYTES)
        ]
        self._crcs = [0] * len(self._pieces)
        self._next = itertools.count()

    @contextlib.contextmanager
    def failing(self) -> Iterator[None]:
        """Keep an error raised in the block, for `write_content`, and stop all writing threads."""
        try:
            yield
        # Also KeyboardInterrupt: it is raised when the other threads have ended.
        except BaseException as error:  # noqa: BLE001
            if self.error is None:
                self.error = error
            if not self.manifest.done():
                self.manifest.set_exception(error)

    def write(self, file: Sink) -> None:
        """Check and write one piece after the other; several threads share the pieces."""
        with self.failing():
            # The counter hands out each number once, to one thread.
            while (number := next(self._next)) < len(self._pieces) and self.error is None:
                _, position, data = self._pieces[number]
                self._crcs[number] = crc32(data)
                file(position, data)

    def finish(self, file: Sink) -> None:
        """Write the bytes between the records, now that all pieces are written."""
        with self.failing():
            if self.error is not None:
                return
            values = [0] * len(self._records)
            for (number, _, data), value in zip(self._pieces, self._crcs, strict=True):
                values[number] = combine(values[number], value, data.nbytes)
            records = (replace(r, crc32=v) for r, v in zip(self._records, values, strict=True))
            content = self._content
            self.manifest.set_result(
                Manifest(content.identity, content.state_class, tuple(records))
            )
            self._write_frames(file)

    def fill(self, copy: Sink) -> None:
        """Hand all bytes to a sink."""
        with self.failing():
            for _, position, data in self._pieces:
                if self.error is not None:
                    return
                copy(position, data)
            self._write_frames(copy)

    def _write_frames(self, sink: Sink) -> None:
        for position, piece in frames(self.manifest.result()):
            if self.error is None:
                sink(position, memoryview(piece))


def frames(manifest: Manifest) -> Iterator[tuple[int, bytes]]:
    """Yield position and bytes of all that lies between and behind the records."""
    encoded = manifest.encode()
    last = manifest_record(manifest, encoded)
    records = (*manifest.records, last)
    begin = 0
    for record in records:
        yield begin, frame_before(record, begin)
        begin = record.offset + record.nbytes
    yield last.offset, encoded
    yield begin, frame_after(records)
