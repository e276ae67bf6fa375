# SPDX-License-Identifier: Apache-2.0
"""Node-local staging: training and later saves go on while the durable directory hangs."""

import contextlib
import os
import shutil
import signal
import subprocess
import time

import pytest
from dcp_saves import assert_same, assert_whole, load_like, request_for, state_of

from nvidia_resiliency_ext.checkpointing import _locks
from nvidia_resiliency_ext.checkpointing._flush import _remove_leftovers
from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncCallsQueue, AsyncSaveError
from nvidia_resiliency_ext.checkpointing.async_ckpt.filesystem_async import FileSystemWriterAsync

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def schedule(queue, folder, value, local):
    """Schedule a save that is staged in a local directory."""
    writer = FileSystemWriterAsync(folder, thread_count=1, staging_dir=local)
    queue.schedule_async_request(request_for(state_of(value), None, writer=writer))


@pytest.fixture
def frozen_mount(tmp_path):
    """Mount a small ext4 that can be frozen: every write to it then hangs."""
    image, folder = tmp_path / "image", tmp_path / "durable"
    folder.mkdir()
    with image.open("wb") as file:
        file.truncate(64 << 20)
    commands = (["mkfs.ext4", "-q", str(image)], ["mount", "-o", "loop", str(image), str(folder)])
    for command in commands:
        try:
            done = subprocess.run(command, capture_output=True, check=False)
        except FileNotFoundError:
            pytest.skip(f"there is no {command[0]}")
        if done.returncode:
            pytest.skip(f"{command[0]} is not permitted here")
    (folder / "x").mkdir()
    yield folder / "x"
    subprocess.run(["fsfreeze", "-u", str(folder)], capture_output=True, check=False)
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_hanging_directory_does_not_hold_up_saves(frozen_mount, tmp_path):
    """While the durable directory hangs, saves are staged; they are durable when it is back."""
    queue = AsyncCallsQueue()
    folders = [frozen_mount / str(step) for step in range(3)]
    subprocess.run(["fsfreeze", "-f", str(frozen_mount.parent)], check=True)
    try:
        for step, folder in enumerate(folders):
            schedule(queue, folder, step, tmp_path / "local")
            assert queue.maybe_finalize_async_calls() == []
        staged = tmp_path / "local"
        assert len(os.listdir(staged)) >= 2
        assert queue.get_num_unfinalized_calls() == 3
    finally:
        subprocess.run(["fsfreeze", "-u", str(frozen_mount.parent)], check=True)
    assert queue.maybe_finalize_async_calls(blocking=True) == [0, 1, 2]
    for step, folder in enumerate(folders):
        assert_same(state_of(step), load_like(state_of(0), folder))
        assert_whole(folder)
    assert os.listdir(tmp_path / "local") == []
    assert queue.stats().durable_lag_s > 0
    queue.close()


def test_directory_that_comes_back_is_tried_again(tmp_path):
    """If the durable directory fails for a while, copying is tried again until it succeeds."""
    queue = AsyncCallsQueue(retry_delay=0.05)
    folder = tmp_path / "durable"
    writer = FileSystemWriterAsync(folder, thread_count=1, staging_dir=tmp_path / "local")
    folder.write_text("this is no directory")
    queue.schedule_async_request(request_for(state_of(4), None, writer=writer))
    time.sleep(0.2)
    folder.unlink()
    assert queue.maybe_finalize_async_calls(blocking=True) == [0]
    assert_same(state_of(4), load_like(state_of(0), folder))
    assert queue.stats().finalized == 1
    queue.close()


def test_full_local_directory_fails_the_save(tmp_path):
    """If the local directory cannot be written, the error names it."""
    (tmp_path / "local").write_text("a file")
    queue = AsyncCallsQueue()
    schedule(queue, tmp_path / "durable", 1, tmp_path / "local")
    with pytest.raises(AsyncSaveError, match="local/nvrx-ckpt"):
        queue.maybe_finalize_async_calls(blocking=True)
    queue.close()


def test_rest_of_a_killed_worker_is_removed_by_the_next(tmp_path):
    """Local files of a worker that was killed go with the next save; those of a living one stay."""
    local, durable = tmp_path / "local", tmp_path / "durable"
    durable.write_text("this is no directory")
    killed, living = AsyncCallsQueue(retry_delay=60), AsyncCallsQueue(retry_delay=60)
    for queue in (killed, living):
        schedule(queue, durable, 1, local)
    deadline = time.monotonic() + 60
    while sum(len(files) for _, _, files in os.walk(local)) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.kill(killed.persistent_caller.process.pid, signal.SIGKILL)
    with pytest.raises(AsyncSaveError, match="SIGKILL"):
        killed.maybe_finalize_async_calls(blocking=True)
    assert len(os.listdir(local)) == 2
    schedule(killed, tmp_path / "next", 2, local)
    assert killed.maybe_finalize_async_calls(blocking=True) == [1]
    assert len(os.listdir(local)) == 1
    killed.close()
    living.close(abort=True)
    assert os.listdir(local) == []


def test_what_is_left_over_is_known_by_its_lock_and_not_by_the_clock(tmp_path, monkeypatch):
    """Whatever the clock says, an unlocked directory goes; who wanted to lock it makes it anew."""
    young = tmp_path / "nvrx-ckpt-young"
    young.mkdir()
    os.utime(young, (1 << 33, 1 << 33))  # as after a clock that was set back by centuries
    _remove_leftovers(str(tmp_path))
    assert not young.exists()
    lost = []

    def remove_and_lock(descriptor, timeout_s):
        if not lost:
            lost.append(1)
            shutil.rmtree(young)
        with contextlib.suppress(FileNotFoundError):
            lock_file(descriptor, timeout_s)

    def make():
        young.mkdir(exist_ok=True)
        return os.open(young, os.O_RDONLY)

    lock_file = _locks.lock_file
    monkeypatch.setattr(_locks, "lock_file", remove_and_lock)
    descriptor = _locks.open_locked(make, str(young))
    assert lost
    assert os.path.samestat(os.fstat(descriptor), young.stat())
    os.close(descriptor)
