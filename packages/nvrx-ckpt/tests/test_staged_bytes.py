# SPDX-License-Identifier: Apache-2.0
"""Staged bytes: checksums, frames of tensors, and files that equal what torch.save writes."""

import errno
import gc
import io
import os
import random
import subprocess
import sys
import threading
import zlib

import no_threads
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nvidia_resiliency_ext.checkpointing import _checksum, _image
from nvidia_resiliency_ext.checkpointing._copying import Copier
from nvidia_resiliency_ext.checkpointing._durable import FileSaver, write_small_file
from nvidia_resiliency_ext.checkpointing._errors import CheckpointWriteError
from nvidia_resiliency_ext.checkpointing._staging import StagingBuffer, StagingPool, round_up
from nvidia_resiliency_ext.checkpointing._write_plan import (
    PLAIN_BYTES,
    FilePlan,
    ItemPlan,
    WritePlan,
)


def saved(value):
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def write_image(folder, parts, **options):
    """Write `[(length, fill, shape)]` as one file through a staging buffer; return its bytes."""
    total = sum(length for length, _, _ in parts)
    buffer = StagingBuffer(round_up(total))
    items, shapes, position = [], [], 0
    for index, (length, fill, shape_of) in enumerate(parts):
        shape = fill(buffer.view[position : position + length]) or shape_of
        number = PLAIN_BYTES if shape is None else len(shapes)
        shapes += [] if shape is None else [shape]
        items.append(ItemPlan(f"item{index}", position, length, number))
        position += length
    path = str(folder / "file")
    plan = WritePlan([FilePlan(path, 0, total, items)], shapes, **options)
    [result] = FileSaver(WritePlan.from_json(plan.to_json()), buffer.view).run()
    buffer.close()
    with open(path, "rb") as file:
        data = file.read()
    assert result.crc == zlib.crc32(data)
    for item, crc in zip(items, result.item_crcs, strict=True):
        assert crc == zlib.crc32(data[item.start : item.start + item.length])
    assert os.listdir(folder) == ["file"]
    return data


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 3 << 20), st.integers(0, 2**32 - 1), st.integers(0, 100))
def test_checksum_is_that_of_zlib(count, value, percent):
    """Large and small buffers, continued and joined, have the checksum that zlib gives them."""
    data = random.Random(count).randbytes(count)
    cut = count * percent // 100
    assert _checksum.crc32(data, value) == zlib.crc32(data, value)
    joined = _checksum.combine(zlib.crc32(data[:cut]), zlib.crc32(data[cut:]), count - cut)
    assert joined == zlib.crc32(data)


@pytest.mark.parametrize("way", ["numpy", "isal"])
def test_each_way_to_compute_checksums_agrees_with_zlib(way):
    """numpy and the extra `fast` give zlib's checksum, whichever of them is the fastest here."""
    if way == "isal":
        function = pytest.importorskip("isal.isal_zlib").crc32
    else:
        function = _checksum._make_fold()
    for count in (1 << 20, (1 << 20) + 1, 5_000_003):
        data = random.Random(count).randbytes(count)
        assert function(data, 7) == zlib.crc32(data, 7)


def test_isal_is_considered_where_it_is_installed():
    """With isal installed, it is one of the ways of which the fastest is taken."""
    isal_zlib = pytest.importorskip("isal.isal_zlib")
    assert isal_zlib.crc32 in _checksum._candidates()


TENSORS = {
    "float": torch.arange(5000, dtype=torch.float32).reshape(5, 1000),
    "small": torch.tensor([1.5]),
    "scalar": torch.tensor(3),
    "bfloat16": torch.full((33, 7), 2, dtype=torch.bfloat16),
    "bool": torch.tensor([True, False]),
    "complex": torch.full((8,), 1 + 2j),
    "transposed": torch.arange(6000.0).reshape(60, 100).t(),
    "row": torch.arange(6000.0).reshape(60, 100)[3],
    "column": torch.arange(6000.0).reshape(60, 100)[:, 3],
    "channels": torch.zeros(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    "expanded": torch.ones(1, 3).expand(4, 3),
    "large": torch.arange(3 << 20, dtype=torch.int64),
}


@pytest.mark.parametrize("name", TENSORS)
def test_framed_tensor_is_what_torch_save_writes(name, tmp_path):
    """A tensor staged with its frame becomes, byte for byte, the file that torch.save makes."""
    tensor = TENSORS[name]
    assert _image.is_plain(tensor)
    frame = _image.frame_of(tensor)
    alone = tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()
    data = _image.storage_bytes(tensor).numpy()

    def fill(image):
        start, end = len(frame.head), len(frame.head) + frame.nbytes
        image[:start], image[start:end], image[end:] = frame.head, data, frame.tail

    assert write_image(tmp_path, [(frame.length, fill, frame.shape)]) == saved(alone)


class MakesTensors:
    """Is pickled as tensors that nobody else keeps."""

    def __reduce__(self):
        return list, ([torch.full((1 << 20,), number) for number in range(4)],)


def test_objects_with_many_tensors_are_what_torch_save_writes(tmp_path):
    """A nested state is staged without checksums, and the file has them, twice in a row."""
    tied = [TENSORS["float"], TENSORS["float"][1]]
    state = {"model": TENSORS, "tied": tied, "made": MakesTensors(), "empty": torch.ones(0)}
    size = _image.saved_size(state)
    part = (size, lambda image: _image.save_into(image, state), None)
    assert write_image(tmp_path, [part, part]) == 2 * saved(state)
    assert torch.serialization.get_crc32_options()


@pytest.mark.parametrize("io_mode", ["buffered", "direct", "auto"])
def test_ways_of_writing_give_the_same_file(io_mode, tmp_path):
    """Page cache and direct I/O write the same bytes, also when the length fits no block."""
    data = random.Random(1).randbytes((17 << 20) + 5)

    def fill(image):
        image[:] = data

    assert write_image(tmp_path, [(len(data), fill, None)], io_mode=io_mode) == data


def test_failed_file_leaves_the_old_one_and_nothing_else(tmp_path):
    """If one of several files cannot be written, no file changes and no temporary one stays."""
    (tmp_path / "a").write_bytes(b"old")
    buffer = StagingBuffer(100)
    files = [
        FilePlan(str(tmp_path / "a"), 0, 50, [ItemPlan("x", 0, 50)]),
        FilePlan(str(tmp_path / "missing" / "b"), 0, 50, [ItemPlan("y", 0, 50)]),
    ]
    with pytest.raises(CheckpointWriteError) as caught:
        FileSaver(WritePlan(files, threads=2), buffer.view).run()
    buffer.close()
    assert caught.value.errno == errno.ENOENT
    assert caught.value.filename.endswith("missing/b")
    assert os.listdir(tmp_path) == ["a"]
    assert (tmp_path / "a").read_bytes() == b"old"


@pytest.mark.parametrize("refused", ["nvrx-write_0", "nvrx-checksum"])
def test_files_are_not_written_where_no_thread_can_start(refused, tmp_path, monkeypatch):
    """The error says so; no file is left, and no descriptor."""
    buffer = StagingBuffer(4096)
    item = ItemPlan("item", 0, 9, PLAIN_BYTES)
    plan = WritePlan([FilePlan(str(tmp_path / "file"), 0, 9, [item])])
    gc.collect()  # what earlier tests left
    before = os.listdir("/proc/self/fd")
    no_threads.refuse(monkeypatch, refused)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        FileSaver(plan, buffer.view).run()
    gc.collect()
    assert os.listdir("/proc/self/fd") == before
    assert os.listdir(tmp_path) == []
    buffer.close()


def test_small_file_is_replaced_whole(tmp_path):
    """A small file is replaced in one step, and a failure names it."""
    path = str(tmp_path / "latest")
    write_small_file(path, b"1")
    write_small_file(path, b"2")
    assert (tmp_path / "latest").read_bytes() == b"2"
    assert os.listdir(tmp_path) == ["latest"]
    with pytest.raises(CheckpointWriteError, match="no/latest"):
        write_small_file(str(tmp_path / "no" / "latest"), b"3")


def test_pool_reuses_buffers_and_is_full_meanwhile():
    """A pool of one buffer lends the same memory again, and is full until it came back."""
    pool = StagingPool(1)
    first = pool.take(1000)
    assert pool.full
    pool.give_back(first)
    assert not pool.full
    assert pool.take(2000) is first
    pool.discard(first)
    assert first.fd == -1
    pool.close()


class ObjectStream(io.RawIOBase):
    """A stream of an object store: the object is there when the stream is closed."""

    def __init__(self, store, name, limit):
        super().__init__()
        self._store, self._name, self._limit, self._parts = store, name, limit, []

    def writable(self):
        return True

    def write(self, data):
        self._parts.append(bytes(data))
        if sum(map(len, self._parts)) > self._limit:
            raise OSError(errno.EIO, "the store is gone")
        return len(data)

    def truncate(self, size=None):
        assert size == 0
        self._parts = []

    def close(self):
        if not self.closed:
            self._store[self._name] = b"".join(self._parts)
        super().close()


@pytest.mark.parametrize("limit", [1 << 20, 1 << 30])
def test_failed_stream_is_never_published(limit):
    """An object store gets a whole object or none, also when its stream fails in the middle."""
    store = {}
    length = 20 << 20
    plan = WritePlan([FilePlan("/name", 0, length, [ItemPlan("x", 0, length)])])
    buffer = StagingBuffer(length)
    saver = FileSaver(
        plan, buffer.view, opener=lambda name, _: ObjectStream(store, name, limit), renames=False
    )
    if limit > length:
        saver.run()
    else:
        with pytest.raises(CheckpointWriteError, match="the store is gone"):
            saver.run()
    buffer.close()
    del saver
    gc.collect()
    assert {name: len(data) for name, data in store.items()} == (
        {"/name": length} if limit > length else {}
    )


@pytest.mark.parametrize("threads", [1, 3])
def test_copies_are_whole_with_any_number_of_threads(threads):
    """Pieces of all sizes reach their targets, also of memory that cannot be written."""
    sizes = [0, 1, 5 << 20, (4 << 20) + 1, 9]
    sources = [os.urandom(size) for size in sizes]
    targets = [bytearray(size) for size in sizes]
    with Copier(threads) as copier:
        copier.copy(list(zip(targets, sources, strict=True)))
        assert targets == sources
        with pytest.raises(ValueError, match="8 bytes do not fit into 9"):
            copier.copy([(targets[-1], sources[-1][:8])])
        with pytest.raises(ValueError, match="read-only"):
            copier.copy([(sources[2], bytes(5 << 20))])


@pytest.mark.parametrize("started", [0, 1])
def test_copies_are_whole_where_no_thread_can_start(started, monkeypatch):
    """Who cannot have all its helpers copies what is left itself, and then keeps none."""
    start, count = threading.Thread.start, [0]

    def limited(thread):
        count[0] += 1
        if count[0] > started:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    source = os.urandom(13 << 20)
    with Copier(4) as copier:
        for _ in range(2):
            target = bytearray(len(source))
            copier.copy([(target, source)])
            assert target == source
            assert copier._pool is None
    assert count == [started + 1]


def test_copies_are_whole_while_the_interpreter_ends():
    """A save in a function of atexit works, though no thread takes work any more."""
    program = """if True:
        import atexit
        from nvidia_resiliency_ext.checkpointing._copying import Copier

        def save():
            target = bytearray(9 << 20)
            with Copier(3) as copier:
                copier.copy([(target, bytes([7]) * len(target))])
            print(target.count(7) == len(target))

        atexit.register(save)
    """
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=True
    )
    assert (result.stdout, result.stderr) == ("True\n", "")


def test_nothing_to_copy_starts_no_thread():
    """Without a piece, or with one, the caller needs no help."""
    with Copier(4) as copier:
        copier.copy([])
        copier.copy([(bytearray(3), b"abc")])
        assert copier._pool is None
