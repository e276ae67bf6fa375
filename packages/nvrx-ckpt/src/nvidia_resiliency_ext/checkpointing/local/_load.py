# SPDX-License-Identifier: Apache-2.0
"""Load the state of a shard from one file, or from several copies at once."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
from collections.abc import Sequence
from typing import Any

import torch

from nvidia_resiliency_ext.checkpointing._progress import ProgressBar
from nvidia_resiliency_ext.checkpointing._shard.layout import Manifest, Record
from nvidia_resiliency_ext.checkpointing._shard.read import ShardSource, read_record
from nvidia_resiliency_ext.checkpointing._shard.write import bytes_of
from nvidia_resiliency_ext.checkpointing._staging import PAGE_BYTES, round_up
from nvidia_resiliency_ext.checkpointing.local._pickling import join_state, runs_no_code
from nvidia_resiliency_ext.shared_utils.abandonable import AbandonableCall

_LEAST_THREADS = 2
_LARGE_PAGE_BYTES = 2 << 20
_MADV_HUGEPAGE = 14


def load_state(
    manifest: Manifest, sources: Sequence[ShardSource], *, strict: bool, verify: bool = True
) -> Any:
    """Return the state of a shard; each byte is read once, into the memory of its tensor.

    Args:
        manifest: What the shard says about itself; the same for all sources.
        sources: Who has the shard. Records are read from all of them at the same time; one that
            fails is not asked again.
        strict: Refuse states of classes that are not ours, as loading them can run any code.
        verify: Compare checksums.

    Raises:
        DamagedCheckpointError: No source has the bytes that were written.
        pickle.UnpicklingError: The state may not be loaded; nothing of it was run.
        OSError: No source can be read.
    """
    named = {record.name: record for record in manifest.records}
    skeleton_record = named["data.pkl"]
    count = sum(name.startswith("data/") for name in named)
    storages = [named[f"data/{number}"] for number in range(count)]
    skeleton = bytearray(skeleton_record.nbytes)
    tensors = [_fresh_memory(record.nbytes) for record in storages]
    work = [(skeleton_record, memoryview(skeleton))]
    work += [(r, bytes_of(t)) for r, t in zip(storages, tensors, strict=True)]
    with ProgressBar.of_load(sum(view.nbytes for _, view in work)) as bar:
        _Reading(work, sources, bar, verify=verify).run()
    any_name = not strict and not runs_no_code(manifest.state_class)
    return join_state(skeleton, tensors, any_name=any_name)


def _fresh_memory(nbytes: int) -> torch.Tensor:
    """Return memory for a tensor, in large pages where it has room for one.

    Small pages that are touched for the first time cost more than the bytes that are read.
    """
    tensor = torch.empty(nbytes, dtype=torch.uint8)
    if nbytes >= _LARGE_PAGE_BYTES:
        begin = tensor.data_ptr() // PAGE_BYTES * PAGE_BYTES
        end = round_up(tensor.data_ptr() + nbytes)
        # Advice only: where the kernel does not take it, the pages are small.
        _libc().madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _MADV_HUGEPAGE)
    return tensor


@functools.lru_cache(maxsize=1)
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


class _Reading:
    """Records that are read by several threads."""

    def __init__(
        self,
        work: list[tuple[Record, memoryview]],
        sources: Sequence[ShardSource],
        bar: ProgressBar,
        *,
        verify: bool,
    ) -> None:
        self._bar = bar
        self._verify = verify
        # The largest last: they are taken from the end.
        self._waiting = sorted(work, key=lambda item: item[0].nbytes)
        self._lock = threading.Lock()
        self._sources = sources
        self._failed: dict[int, Exception] = {}

    def run(self) -> None:
        """Read all records; raise the last source's error when no source is left."""
        threads_per_source = -(-_LEAST_THREADS // len(self._sources))
        reading = []
        with contextlib.suppress(RuntimeError):  # the system gives no thread: this one reads
            for source in list(self._sources) * threads_per_source:
                call = functools.partial(self._read_from, source)
                reading.append(AbandonableCall("load", call))
        for one in reading:
            one.ended.wait()
        # A record that was given back when the other threads had ended already.
        for source in self._sources:
            self._read_from(source)
        if self._waiting:
            raise next(reversed(self._failed.values()))

    def _read_from(self, source: ShardSource) -> None:
        while True:
            with self._lock:
                if not self._waiting or id(source) in self._failed:
                    return
                record, target = self._waiting.pop()
            try:
                read_record(source, record, target, verify=self._verify, on_progress=self._bar.add)
            # Whatever it is: a record that nobody has read must not be left out.
            except Exception as error:  # noqa: BLE001
                with self._lock:
                    self._waiting.append((record, target))
                    self._failed[id(source)] = error
                return
