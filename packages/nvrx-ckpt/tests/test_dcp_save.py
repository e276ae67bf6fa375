# SPDX-License-Identifier: Apache-2.0
"""One rank: DCP checkpoints saved asynchronously are those of DCP, whatever the trainer does."""

import functools
import hashlib
import json
import os
import random
import threading
import time
import weakref

import failing_files
import no_threads
import pytest
import torch
import torch.distributed.checkpoint as dcp
from dcp_saves import assert_same, assert_whole, load_like, request_for, state_of

from nvidia_resiliency_ext.checkpointing import _image
from nvidia_resiliency_ext.checkpointing._verify import verify_checkpoint
from nvidia_resiliency_ext.checkpointing.async_ckpt import _record
from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncCallsQueue
from nvidia_resiliency_ext.checkpointing.async_ckpt.filesystem_async import FileSystemWriterAsync
from nvidia_resiliency_ext.checkpointing.async_ckpt.state_dict_saver import CheckpointMetadataCache

pytestmark = [pytest.mark.filterwarnings("ignore:torch.distributed is disabled"), pytest.mark.slow]


@pytest.fixture
def queue():
    made = AsyncCallsQueue()
    yield made
    made.close(abort=True)


@pytest.mark.parametrize("persistent", [True, False])
def test_changes_after_scheduling_never_reach_the_file(persistent, tmp_path):
    """What the trainer writes into its tensors after scheduling is not in the checkpoint."""
    queue = AsyncCallsQueue(persistent=persistent)
    for step in range(3):
        state = state_of(step)
        queue.schedule_async_request(request_for(state, tmp_path / str(step)))
        for value in state.values():
            if torch.is_tensor(value):
                value.fill_(99)
    assert queue.maybe_finalize_async_calls(blocking=True) == [0, 1, 2]
    queue.close()
    for step in range(3):
        assert_same(state_of(step), load_like(state_of(0), tmp_path / str(step)))
        assert_whole(tmp_path / str(step))


def test_files_are_those_of_stock_dcp(queue, tmp_path):
    """With one file, data and names are byte for byte what DCP's own writer makes."""
    state = state_of(3)
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path / "stock", thread_count=1))
    queue.schedule_async_request(request_for(state, tmp_path / "ours"))
    queue.maybe_finalize_async_calls(blocking=True)
    for name in ("__0_0.distcp",):
        assert (tmp_path / "ours" / name).read_bytes() == (tmp_path / "stock" / name).read_bytes()
    names = {".metadata", ".nvrx_manifest.json", ".nvrx_manifest.0.json", "__0_0.distcp"}
    assert set(os.listdir(tmp_path / "ours")) == names


def test_copies_of_tensors_are_made_one_at_a_time(queue, tmp_path, monkeypatch):
    """Tensors that must be copied before they are staged need memory for one of them only."""
    alive, most = weakref.WeakSet(), [0]
    storage_bytes = _image.storage_bytes

    def counted(tensor):
        data = storage_bytes(tensor)
        if data.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr():
            alive.add(data)
            most[0] = max(most[0], len(alive))
        return data

    monkeypatch.setattr(_image, "storage_bytes", counted)
    state = {str(number): torch.randn(30, 40)[:, ::2] for number in range(5)}
    queue.schedule_async_request(request_for(state, tmp_path / "c"))
    queue.maybe_finalize_async_calls(blocking=True)
    assert_same(state, load_like(state, tmp_path / "c"))
    assert most == [1]


def test_several_files_and_a_hint(queue, tmp_path):
    """With threads and a separation hint, hinted items have files of their own, and all load."""
    state = {**state_of(1), **state_of(2, count=8, prefix="opt.")}
    writer = FileSystemWriterAsync(tmp_path / "c", thread_count=4, separation_hint="opt.")
    queue.schedule_async_request(request_for(state, None, writer=writer))
    queue.maybe_finalize_async_calls(blocking=True)
    data = sorted(name for name in os.listdir(tmp_path / "c") if name.endswith(".distcp"))
    assert data == ["__0_0.distcp", "__0_1.distcp", "opt.__0_2.distcp", "opt.__0_3.distcp"]
    assert_same(state, load_like(state, tmp_path / "c"))
    assert_whole(tmp_path / "c")


def test_tensors_that_move_between_saves_are_never_stale(queue, tmp_path):
    """Over 50 saves with tensors re-allocated, swapped and resized, each is bit for bit right."""
    chance = random.Random(4)
    cache = CheckpointMetadataCache()
    state = state_of(0, 3)
    for step in range(50):
        for key in [key for key, value in state.items() if torch.is_tensor(value)]:
            kind = chance.randrange(4)
            shape = state[key].shape
            fresh = torch.rand(shape, dtype=torch.float32).to(state[key].dtype)
            if kind == 0:
                state[key].copy_(fresh)
            elif kind == 1:
                del state[key]
                state[key] = fresh
            elif kind == 2:
                state[key].data = fresh
            elif step % 10 == 0:
                state[key] = torch.rand(shape[0] + 1)
        expected = {k: v.clone() if torch.is_tensor(v) else v for k, v in state.items()}
        folder = tmp_path / str(step)
        request = request_for(state, folder, enable_cache=True, metadata_cache=cache)
        queue.schedule_async_request(request)
        queue.maybe_finalize_async_calls(blocking=True)
        assert_same(expected, load_like(expected, folder))


def test_overwriting_never_mixes_old_and_new(queue, tmp_path):
    """A second save to the same directory replaces the first, and is whole."""
    for value in (1, 2):
        queue.schedule_async_request(request_for(state_of(value), tmp_path))
        queue.maybe_finalize_async_calls(blocking=True)
    assert_same(state_of(2), load_like(state_of(2), tmp_path))
    assert_whole(tmp_path)


def test_old_metadata_goes_before_new_data_comes(queue, tmp_path, monkeypatch):
    """A save over an older one that ends before it is published leaves no metadata for its data."""
    queue.schedule_async_request(request_for(state_of(1), tmp_path))
    queue.maybe_finalize_async_calls(blocking=True)
    monkeypatch.setattr(FileSystemWriterAsync, "finish", failing_files.raise_error)
    queue.schedule_async_request(request_for(state_of(2), tmp_path))
    with pytest.raises(dcp.api.CheckpointException, match="this save function fails"):
        queue.maybe_finalize_async_calls(blocking=True)
    assert sorted(os.listdir(tmp_path)) == [".nvrx_manifest.0.json", "__0_0.distcp"]
    assert not verify_checkpoint(tmp_path).whole


@pytest.mark.no_second_try
def test_each_flipped_bit_is_found(queue, tmp_path):
    """A bit flipped anywhere in any file of a checkpoint is found, and the tensor is named."""
    chance = random.Random(1)
    queue.schedule_async_request(request_for(state_of(1), tmp_path))
    queue.maybe_finalize_async_calls(blocking=True)
    named = 0
    for name in sorted(os.listdir(tmp_path)):
        path = tmp_path / name
        data = path.read_bytes()
        for position in {0, len(data) - 1, *chance.sample(range(len(data)), 20)}:
            broken = bytearray(data)
            broken[position] ^= 1 << chance.randrange(8)
            path.write_bytes(broken)
            report = verify_checkpoint(tmp_path)
            assert not report.whole, (name, position)
            named += any("'layer" in problem for problem in report.problems)
        path.write_bytes(data[: len(data) // 2])
        assert not verify_checkpoint(tmp_path).whole, name
        path.unlink()
        assert not verify_checkpoint(tmp_path).whole or name == ".nvrx_manifest.json"
        path.write_bytes(data)
    assert_whole(tmp_path)
    assert named > 10


def test_cache_skips_planning_until_the_structure_changes(queue, tmp_path):
    """The third save of a structure is not planned, and a new tensor is in the fourth."""
    cache = CheckpointMetadataCache()
    reused = []
    for step in range(5):
        state = state_of(step)
        if step == 4:
            state["extra"] = torch.ones(3)
        before = cache.cached_central_plan
        request = request_for(state, tmp_path / str(step), enable_cache=True, metadata_cache=cache)
        reused.append(cache.cached_central_plan is before)
        queue.schedule_async_request(request)
        queue.maybe_finalize_async_calls(blocking=True)
        assert_same(state, load_like(state, tmp_path / str(step)))
    assert reused == [False, False, True, True, False]


def test_save_without_a_queue(tmp_path):
    """A request can be carried out at once, without a process group."""
    request_for(state_of(5), tmp_path).execute_sync()
    assert_same(state_of(5), load_like(state_of(5), tmp_path))
    assert_whole(tmp_path)


def test_failing_opener_is_dcps_exception(queue, tmp_path):
    """A writer that raises in the worker is a CheckpointException that says so."""
    from failing_files import refuse_to_open

    writer = FileSystemWriterAsync(tmp_path / "a", thread_count=1, open_file=refuse_to_open)
    finalized = []
    queue.schedule_async_request(
        request_for(state_of(1), None, [lambda: finalized.append(1)], writer=writer)
    )
    with pytest.raises(dcp.api.CheckpointException, match="Worker failure") as caught:
        queue.maybe_finalize_async_calls(blocking=True)
    assert "refuse_to_open" in str(caught.value)
    assert not finalized
    assert not (tmp_path / "a" / ".metadata").exists()
    assert queue.get_num_unfinalized_calls() == 0
    queue.schedule_async_request(request_for(state_of(2), tmp_path / "b"))
    assert queue.maybe_finalize_async_calls(blocking=True) == [1]
    assert_same(state_of(2), load_like(state_of(2), tmp_path / "b"))


def test_blocking_finalize_returns_soon_after_the_write(queue, tmp_path):
    """An idle poll is cheap, and waiting is not done by sleeping."""
    begin = time.thread_time()
    for _ in range(1000):
        assert queue.maybe_finalize_async_calls() == []
    assert time.thread_time() - begin < 2
    queue.schedule_async_request(request_for(state_of(1), tmp_path))
    queue.maybe_finalize_async_calls(blocking=True)
    stats = queue.stats()
    assert (stats.scheduled, stats.finalized, stats.failed) == (1, 1, 0)
    assert stats.nbytes > 0


def test_object_store_gets_metadata_last(tmp_path, monkeypatch):
    """Through multi-storage-client the files are objects, and they are what was scheduled."""
    msc = pytest.importorskip("multistorageclient")
    store = {"storage_provider": {"type": "file", "options": {"base_path": str(tmp_path)}}}
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"profiles": {"store": store}}))
    monkeypatch.setenv("MSC_CONFIG", str(config))
    queue = AsyncCallsQueue()
    writer = FileSystemWriterAsync("msc://store/c", thread_count=1, use_msc=True)
    queue.schedule_async_request(request_for(state_of(6), None, writer=writer))
    assert not (tmp_path / "c" / ".metadata").exists()
    assert queue.maybe_finalize_async_calls(blocking=True) == [0]
    assert sorted(os.listdir(tmp_path / "c")) == [".metadata", "__0_0.distcp"]
    assert_same(state_of(6), load_like(state_of(0), tmp_path / "c"))
    assert msc.is_file("msc://store/c/.metadata")
    queue.close()


def test_staging_directory_excludes_openers(tmp_path):
    """Options that exclude each other are refused when the writer is made."""
    with pytest.raises(ValueError, match="NVRX_CKPT_STAGING_DIR"):
        FileSystemWriterAsync(tmp_path, staging_dir=tmp_path / "local", open_file=print)


def test_metadata_is_not_written_by_the_training_thread(queue, tmp_path, monkeypatch):
    """A poll hands the last step to a thread; an abort lets nothing be published after it."""
    threads, finished, go = [], [], threading.Event()
    finish = FileSystemWriterAsync.finish

    def slowly(writer, metadata, results):
        threads.append(threading.current_thread())
        assert go.wait(60)
        finish(writer, metadata, results)
        finished.append(writer)

    monkeypatch.setattr(FileSystemWriterAsync, "finish", slowly)
    for folder in ("aborted", "saved"):
        queue.schedule_async_request(request_for(state_of(1), tmp_path / folder))
        call = queue.async_calls[0]
        assert queue._get_async_caller().wait(call, 60)
        assert queue.maybe_finalize_async_calls() == []
        if folder == "aborted":
            threading.Timer(0.2, go.set).start()
            queue.close(abort=True)
            assert len(finished) == 1
            go.clear()
    assert queue.maybe_finalize_async_calls() == []
    assert not (tmp_path / "saved" / ".metadata").exists()
    go.set()
    assert queue.maybe_finalize_async_calls(blocking=True) == [0]
    assert threading.main_thread() not in threads
    assert_whole(tmp_path / "saved")


def test_metadata_is_written_where_no_thread_can_start(queue, tmp_path, monkeypatch):
    """What all ranks count on is done by the training thread then."""
    queue.schedule_async_request(request_for(state_of(1), tmp_path))
    with monkeypatch.context() as patch:
        no_threads.refuse(patch, "nvrx-save")
        assert queue.maybe_finalize_async_calls(blocking=True) == [0]
    assert_whole(tmp_path)
    assert_same(state_of(1), load_like(state_of(0), tmp_path))


def digests(state):
    """Return a digest of the bytes of each tensor."""
    tensors = {name: value for name, value in state.items() if torch.is_tensor(value)}
    return {
        name: hashlib.blake2b(value.contiguous().view(torch.uint8).numpy()).hexdigest()
        for name, value in tensors.items()
    }


def test_thread_that_changes_the_state_never_reaches_the_file(queue, tmp_path):
    """Each tensor in the file has the digest that it had when the save was scheduled."""
    state = {f"layer{i}": torch.rand(1 << 18) for i in range(8)}
    turn, over = threading.Lock(), threading.Event()

    def change():
        while not over.is_set():
            with turn:
                for value in state.values():
                    value.add_(1)

    changing = threading.Thread(target=change)
    changing.start()
    try:
        expected = []
        for step in range(6):
            with turn:
                expected.append(digests(state))
                queue.schedule_async_request(request_for(state, tmp_path / str(step)))
            if step % 2:
                queue.maybe_finalize_async_calls(blocking=True)
    finally:
        over.set()
        changing.join()
    for step, wanted in enumerate(expected):
        assert digests(load_like(state, tmp_path / str(step))) == wanted
    assert len({tuple(wanted.values()) for wanted in expected}) > 1


def test_two_queues_and_aborts_do_not_mix(tmp_path):
    """Two queues at once, one of them aborted at random: what is finalised is whole and right."""
    chance = random.Random(9)
    queues = [AsyncCallsQueue(sigterm_timeout=5), AsyncCallsQueue(sigterm_timeout=5)]
    ran = []
    for step in range(12):
        folders = [tmp_path / f"{number}-{step}" for number in range(2)]
        for number, (queue, folder) in enumerate(zip(queues, folders, strict=True)):
            state = state_of(10 * step + number)
            finalize = [functools.partial(ran.append, folder.name)]
            queue.schedule_async_request(request_for(state, folder, finalize))
        aborted = chance.choice([0, 1, None])
        if aborted is not None:
            queues[aborted].close(abort=True)
        for number, (queue, folder) in enumerate(zip(queues, folders, strict=True)):
            done = queue.maybe_finalize_async_calls(blocking=True)
            assert bool(done) == (folder.name in ran) == (number != aborted)
            assert (folder / ".metadata").exists() == bool(done)
            if done:
                assert_same(state_of(10 * step + number), load_like(state_of(0), folder))
                assert_whole(folder)
    for queue in queues:
        queue.close()


def test_running_save_is_in_the_record_with_its_progress(tmp_path, monkeypatch):
    """While a save is written, the record of events says how many bytes are, and for how long."""
    monkeypatch.setenv("NVRX_EVENT_DIR", str(tmp_path / "events"))
    monkeypatch.setattr(_record, "_PROGRESS_S", 0.05)
    _record._log.cache_clear()
    queue = AsyncCallsQueue()
    go = tmp_path / "go"
    opener = functools.partial(failing_files.slow_open, str(go))
    writer = FileSystemWriterAsync(tmp_path / "c", thread_count=1, open_file=opener)
    state = {f"layer{i}": torch.ones(4 << 20) for i in range(2)}
    queue.schedule_async_request(request_for(state, None, writer=writer))
    deadline = time.monotonic() + 60
    rows = []
    while not any(row.get("result") == "running" and row.get("bytes") for row in rows):
        assert time.monotonic() < deadline
        assert queue.maybe_finalize_async_calls() == []
        rows = saves_in(tmp_path / "events")
        time.sleep(0.02)
    go.touch()
    assert queue.maybe_finalize_async_calls(blocking=True) == [0]
    queue.close()
    running = [row for row in rows if row["result"] == "running"]
    assert all(row["write_s"] > 0 for row in running)
    assert saves_in(tmp_path / "events")[-1]["result"] == "ok"
    assert saves_in(tmp_path / "events")[-1]["bytes"] > running[-1]["bytes"] > 0
    _record._log().close()
    _record._log.cache_clear()


def saves_in(folder):
    """Return the events of saves, oldest first."""
    lines = [line for path in folder.glob("*.jsonl") for line in path.read_text().splitlines()]
    return [row for row in map(json.loads, lines) if row.get("kind") == "ckpt_save"]
