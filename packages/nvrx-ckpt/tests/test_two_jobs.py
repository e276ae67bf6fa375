# SPDX-License-Identifier: Apache-2.0
"""Two jobs that save to one directory: the second is told so, and the first loses nothing."""

import os
import time

import pytest
from dcp_saves import PROGRAMS, assert_same, assert_whole, load_like, request_for, state_of

from nvidia_resiliency_ext.checkpointing import AsyncSaveError, remove_old
from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncCallsQueue
from nvidia_resiliency_ext.checkpointing.local.basic_state_dict import BasicTensorAwareStateDict
from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.base_manager import (
    CheckpointingException,
)
from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager import (
    LocalCheckpointManager,
)
from nvidia_resiliency_ext.shared_utils.procfs import is_running

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is"),
    pytest.mark.timeout(200),
]
DEADLINE_S = 100


def first_job(fork_server, *arguments):
    """Run the other job, with pipes to it."""
    return fork_server.running(PROGRAMS / "first_job.py", *arguments)


def go_on(job):
    """Let the other job go on; return what it says then."""
    job.input.write("\n")
    job.input.flush()
    return job.output.readline().strip()


def save(queue, value, folder):
    """Save a checkpoint of the second job."""
    queue.schedule_async_request(request_for(state_of(value), folder))
    return queue.maybe_finalize_async_calls(blocking=True)


@pytest.fixture
def queue():
    made = AsyncCallsQueue(sigterm_timeout=5)
    yield made
    made.close(abort=True)


def test_a_checkpoint_that_another_job_saves_is_not_touched(queue, fork_server, tmp_path):
    """Until it is finalised nobody else writes or removes it; afterwards it may be replaced."""
    folder, go = tmp_path / "5", tmp_path / "go"
    save(queue, 3, tmp_path / "6")
    with first_job(fork_server, "dcp", folder, go) as job:
        assert job.output.readline().strip().isdigit()
        deadline = time.monotonic() + DEADLINE_S
        while not (tmp_path / "go.begun").exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        for stage in ("writing", "written"):
            before = sorted(os.listdir(folder))
            with pytest.raises(AsyncSaveError, match=r"5': .*another process saves to it.*own"):
                save(queue, 2, folder)
            assert remove_old([folder, tmp_path / "6"], keep=1) == [], stage
            assert sorted(os.listdir(folder)) == before, stage
            go.touch()
            assert go_on(job) == ("written" if stage == "writing" else "finalised")
        assert_whole(folder)
        assert_same(state_of(1), load_like(state_of(0), folder))
        save(queue, 2, folder)
    assert_same(state_of(2), load_like(state_of(0), folder))
    assert_whole(folder)


def test_the_job_after_a_killed_one_saves_to_its_directory(queue, fork_server, tmp_path):
    """The lock of a killed job ends with its worker, and a failed save leaves no file behind."""
    with first_job(fork_server, "dcp", tmp_path / "5", tmp_path / "go") as job:
        worker = job.output.readline().strip()
        job.kill()
    deadline = time.monotonic() + DEADLINE_S
    while is_running(int(worker)):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert save(queue, 1, tmp_path / "5") == [0]
    assert_same(state_of(1), load_like(state_of(0), tmp_path / "5"))


def test_saves_of_one_job_to_one_directory_follow_each_other(queue, tmp_path):
    """Nothing replaces the files of a save before that is published; both are finalised."""
    folder = tmp_path / "5"
    for value in (1, 2):
        queue.schedule_async_request(request_for(state_of(value), folder))
        assert queue.get_num_unfinalized_calls() == 1
        # Written, but not published.
        queue.persistent_caller.wait(queue.async_calls[-1], DEADLINE_S)
    assert queue.maybe_finalize_async_calls(blocking=True) == [0, 1]
    assert queue.maybe_finalize_async_calls(blocking=True) == []
    assert_same(state_of(2), load_like(state_of(0), folder))
    assert_whole(folder)


def job_of(folder):
    """Return who saved what is found."""
    manager = LocalCheckpointManager(folder)
    found = manager.find_latest()
    return found, manager.load()[0].state_dict["job"]


@pytest.mark.parametrize("iteration", [5, 9])
def test_local_shards_of_another_job_are_not_touched(iteration, fork_server, tmp_path):
    """A job that saves where another one does is refused; when that is gone it can save."""
    manager = LocalCheckpointManager(tmp_path)
    state = BasicTensorAwareStateDict({"job": 2})
    with first_job(fork_server, "local", tmp_path) as job:
        assert job.output.readline().strip() == "saved"
        with pytest.raises(CheckpointingException, match=r"another process saves to it.*/0'"):
            manager.save(state, iteration)
        assert job_of(tmp_path) == (5, 1)
        job.kill()
        job.wait()
        # Its forked child is still there.
        manager.save(state, iteration)
        assert job_of(tmp_path) == (iteration, 2)
    # Managers of one process share the directory, as after a restart in the process.
    LocalCheckpointManager(tmp_path).save(state, 10)
    assert job_of(tmp_path) == (10, 2)
