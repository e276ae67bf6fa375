# SPDX-License-Identifier: Apache-2.0
"""Write a shard file from memory, without another copy of the tensors; it needs no torch."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import Any

from nvidia_resiliency_ext.checkpointing._checksum import crc32
from nvidia_resiliency_ext.checkpointing._shard.layout import (
    Manifest,
    Record,
    ShardIdentity,
    frame_after,
    frame_before,
    manifest_record,
    place_records,
)

__all__ = ["ShardContent", "Sink", "bytes_of", "file_sink", "frames", "write_content"]

_CHUNK_BYTES = 8 << 20

# Takes bytes for a position of the file; positions may come in any order.
Sink = Callable[[int, memoryview], None]


@dataclass(frozen=True)
class ShardContent:
    """What one shard will hold, without the bytes of the tensors.

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
    content: ShardContent, storages: Sequence[Any], sinks: Sequence[Sink]
) -> Manifest:
    """Hand all bytes of a shard to each sink; the same content always gives the same bytes.

    Each sink runs in a thread of its own, and so do the checksums. The frames between the
    records hold the checksums, so they come last.

    Args:
        content: What the shard holds.
        storages: The bytes of the storages: uint8 tensors or other buffers.
        sinks: Who takes the bytes. The first error of one stops the others.

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
    with ThreadPoolExecutor(1 + len(sinks), thread_name_prefix="nvrx-shard") as pool:
        pool.submit(feed.compute_checksums)
        running = [pool.submit(feed.fill, sink) for sink in sinks[1:]]
        feed.fill(sinks[0])
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
        self._data = data
        self._records = content.records()

    def compute_checksums(self) -> None:
        """Compute the manifest; stop early when a sink has failed."""
        try:
            self.manifest.set_result(self._manifest())
        # The sinks wait for the manifest, and `write_content` raises what happened here.
        except BaseException as error:  # noqa: BLE001
            if self.error is None:
                self.error = error
            self.manifest.set_exception(error)

    def _manifest(self) -> Manifest:
        records = []
        for record, view in zip(self._records, self._data, strict=True):
            value = 0
            for start in range(0, record.nbytes, _CHUNK_BYTES):
                if self.error is not None:
                    break
                value = crc32(view[start : start + _CHUNK_BYTES], value)
            records.append(replace(record, crc32=value))
        return Manifest(self._content.identity, self._content.state_class, tuple(records))

    def fill(self, sink: Sink) -> None:
        """Hand all bytes to a sink; keep what it raises, and let the other sinks stop."""
        try:
            self._fill(sink)
        # Also on KeyboardInterrupt: `write_content` raises it when the other threads have ended.
        except BaseException as error:  # noqa: BLE001
            if self.error is None:
                self.error = error

    def _fill(self, sink: Sink) -> None:
        for record, view in zip(self._records, self._data, strict=True):
            for start in range(0, record.nbytes, _CHUNK_BYTES):
                if self.error is not None:
                    return
                sink(record.offset + start, view[start : start + _CHUNK_BYTES])
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


def file_sink(descriptor: int) -> Sink:
    """Return a sink that writes to an open file."""

    def write(position: int, data: memoryview) -> None:
        while data:
            written = os.pwrite(descriptor, data, position)
            position, data = position + written, data[written:]

    return write
