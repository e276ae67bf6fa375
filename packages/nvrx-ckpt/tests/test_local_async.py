# SPDX-License-Identifier: Apache-2.0
"""Local checkpoints written by the worker process of a queue, on two ranks."""

import os
import signal
import subprocess
from unittest import mock

import pytest
from local_ranks import find_and_load, manager, started, state_of

from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncCallsQueue, AsyncSaveError
from nvidia_resiliency_ext.checkpointing.local.basic_state_dict import BasicTensorAwareStateDict
from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.base_manager import (
    CheckpointingException,
)
from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager import (
    LocalCheckpointManager,
)

# The first test of this module waits for the ranks, which import torch.
pytestmark = [pytest.mark.timeout(150), pytest.mark.slow]


@pytest.fixture(scope="module")
def two_ranks(fork_server):
    """Two rank processes that serve all tests of this module."""
    with started(fork_server, 2) as ranks:
        yield ranks


def schedule(queue, m, rank, iteration, elements=1000):
    """Schedule a save, and change all tensors as soon as that is allowed."""
    state = state_of(rank, iteration, elements)
    request = m.save(BasicTensorAwareStateDict(state), iteration, is_async=True)
    assert request.preload_fn is None
    assert len(request.finalize_fns) == 1
    queue.schedule_async_request(request)
    state["weights"].fill_(-1)
    state["layers"][0]["b"].fill_(-1)


def save_three(rank, world, root, persistent, repl):
    queue = AsyncCallsQueue(persistent=persistent)
    m = manager(root, repl)
    for iteration in (1, 2, 3):
        schedule(queue, m, rank, iteration)
        queue.maybe_finalize_async_calls(blocking=True)
    m.wait_for_cleanup()
    queue.close()
    return sorted(path.name for path in m.local_ckpt_dir.glob("iter_*"))


@pytest.mark.no_second_try
@pytest.mark.parametrize("repl", [False, True], ids=["alone", "replicas"])
@pytest.mark.parametrize("persistent", [False, True], ids=["temporal", "persistent"])
def test_asynchronous_saves_hold_the_state_as_it_was_scheduled(
    two_ranks, tmp_path, persistent, repl
):
    """What changes after scheduling is not in the file; only the last iteration stays."""
    found = two_ranks.run(save_three, tmp_path, persistent, repl)
    owners = [[0, 1], [0, 1]] if repl else [[0], [1]]
    assert found == [[f"iter_0000003_{r}_local.pt" for r in mine] for mine in owners]
    assert two_ranks.run(find_and_load, tmp_path, repl) == [(3, 3, True)] * 2


def replaced_save(rank, world, root, how, repl):
    original = LocalCheckpointManager._save

    def replacement(self, state_dict, ckpt_id):
        if rank != 1 or how == "original":
            original(self, state_dict, ckpt_id)
        elif how == "raises":
            raise RuntimeError("on purpose")

    queue = AsyncCallsQueue(persistent=False)
    m = manager(root, repl)
    text = "no error"
    with mock.patch.object(LocalCheckpointManager, "_save", replacement):
        schedule(queue, m, rank, 1)
        try:
            queue.maybe_finalize_async_calls(blocking=True)
        except CheckpointingException as error:
            text = str(error)
    queue.close()
    return text, sorted(path.name for path in m.local_ckpt_dir.glob("iter_*"))


@pytest.mark.no_second_try
@pytest.mark.parametrize("repl", [False, True], ids=["alone", "replicas"])
@pytest.mark.parametrize("how", ["silent", "raises", "original"])
def test_a_replaced_save_is_called_and_its_failure_is_everybodys(two_ranks, tmp_path, how, repl):
    """A `_save` of the user's own decides; where it fails on one rank nothing stays on any."""
    found = two_ranks.run(replaced_save, tmp_path, how, repl)
    for text, listing in found:
        if how == "original":
            assert text == "no error"
            assert len(listing) == 1 + repl
        else:
            assert "rank 1: " in text
            assert listing == []


def fill_up(rank, world, root, small, repl):
    m = manager(root if rank == 0 else small, repl, peer_timeout_s=5.0)
    queue = AsyncCallsQueue()
    texts = []
    for iteration, elements in ((1, 1000), (2, 300_000), (3, 1000)):
        schedule(queue, m, rank, iteration, elements)
        try:
            queue.maybe_finalize_async_calls(blocking=True)
        except CheckpointingException as error:
            texts.append(str(error))
    queue.close()
    m.wait_for_cleanup()
    return texts, sorted(path.name for path in m.local_ckpt_dir.glob("iter_*"))


@pytest.mark.no_second_try
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small tmpfs needs root")
@pytest.mark.parametrize("repl", [False, True], ids=["alone", "replicas"])
def test_a_full_disk_fails_one_save_and_not_the_next(two_ranks, tmp_path, repl):
    """ENOSPC in the worker is one error on all ranks that says so, and the next save succeeds."""
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", small], check=True)
    try:
        found = two_ranks.run(fill_up, tmp_path / "root", small, repl)
        for rank, (texts, listing) in enumerate(found):
            (text,) = texts
            assert "No space left" in text
            assert "iteration 2" in text
            owners = [0, 1] if repl else [rank]
            assert listing == [f"iter_0000003_{r}_local.pt" for r in owners]
    finally:
        subprocess.run(["umount", "-l", small], check=True)


def kill_worker(rank, world, root):
    m = manager(root, keep_last=2)
    queue = AsyncCallsQueue()
    schedule(queue, m, rank, 1)
    queue.maybe_finalize_async_calls(blocking=True)
    pid = queue._get_async_caller().process.pid
    if rank == 1:
        os.kill(pid, signal.SIGSTOP)
    schedule(queue, m, rank, 2)
    if rank == 1:
        os.kill(pid, signal.SIGKILL)
    failed = False
    try:
        queue.maybe_finalize_async_calls(blocking=True)
    except AsyncSaveError:
        failed = True
    found = manager(root).find_latest()
    schedule(queue, m, rank, 3)
    queue.maybe_finalize_async_calls(blocking=True)
    m.wait_for_cleanup()
    queue.close()
    return failed, found, sorted(path.name for path in m.local_ckpt_dir.glob("iter_*"))


@pytest.mark.no_second_try
def test_a_killed_worker_fails_its_save_only(two_ranks, tmp_path):
    """After SIGKILL of one rank's worker all ranks hear of it, and the next save is whole."""
    for rank, (failed, found, listing) in enumerate(two_ranks.run(kill_worker, tmp_path)):
        assert failed
        assert found == 1
        assert listing == [f"iter_000000{n}_{rank}_local.pt" for n in (1, 3)]
    assert two_ranks.run(find_and_load, tmp_path) == [(3, 3, True)] * 2


def own_save_in_another_process(rank, world, root):
    queue = AsyncCallsQueue(persistent=True)
    m = manager(root)
    with mock.patch.object(LocalCheckpointManager, "_save", return_value=None):
        schedule(queue, m, rank, 1)
        try:
            queue.maybe_finalize_async_calls(blocking=True)
        except AsyncSaveError as error:
            text = str(error)
        else:
            text = "no error"
    queue.close()
    return text


def test_a_replaced_save_cannot_go_to_another_process(two_ranks, tmp_path):
    """With a persistent worker a `_save` of the user's own is refused, and what to do is said."""
    for text in two_ranks.run(own_save_in_another_process, tmp_path):
        assert "persistent=False" in text
