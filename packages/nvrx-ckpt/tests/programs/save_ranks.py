# SPDX-License-Identifier: Apache-2.0
"""Scenarios with several ranks over gloo; arguments: a folder, and the names of the scenarios."""

import contextlib
import functools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))
sys.path.insert(0, str(Path(__file__).parents[4] / "tests-support"))

from dcp_saves import assert_same, load_like, request_for, state_of
from failing_files import (
    kill_myself,
    no_quota,
    open_late,
    refuse_to_open,
    slow_open,
    wait_for_file,
)
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.api import CheckpointException

from nvidia_resiliency_ext.checkpointing import verify_checkpoint
from nvidia_resiliency_ext.checkpointing.async_ckpt import TorchAsyncCheckpoint
from nvidia_resiliency_ext.checkpointing.async_ckpt.core import (
    AsyncCallsQueue,
    AsyncRequest,
    AsyncSaveError,
    abort_nvrx_checkpoint,
)
from nvidia_resiliency_ext.checkpointing.async_ckpt.filesystem_async import FileSystemWriterAsync
from nvidia_resiliency_ext.checkpointing.async_ckpt.state_dict_saver import CheckpointMetadataCache

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()


def own_state(value, **more):
    """Return a state with tensors of this rank and replicated ones."""
    return {**state_of(value), f"rank{rank}": torch.full((3000,), value + rank / 10), **more}


def poll(queue):
    """Finalise by polling, as training loops do."""
    done = []
    while queue.get_num_unfinalized_calls():
        done += queue.maybe_finalize_async_calls(blocking=False, no_dist=False)
    return done


def saves():
    """Three saves, with and without cache, by polling and blocking."""
    queue, cache = AsyncCallsQueue(), CheckpointMetadataCache()
    seen = []
    for step in range(4):
        state = own_state(step)
        request = request_for(
            state, folder / str(step), enable_cache=step > 0, metadata_cache=cache
        )
        queue.schedule_async_request(request)
        for value in state.values():
            if torch.is_tensor(value):
                value.add_(50)
        seen += poll(queue) if step % 2 else queue.maybe_finalize_async_calls(blocking=True)
        dist.barrier()
        assert_same(own_state(step), load_like(own_state(0), folder / str(step)))
    queue.close()
    return seen


def one_rank_changes():
    """With a warm cache one rank's structure changes: all ranks plan anew, nobody hangs."""
    queue, cache = AsyncCallsQueue(), CheckpointMetadataCache()
    for step in range(5):
        state = own_state(step)
        if step == 4 and rank == 1:
            state["new"] = torch.ones(7)
        queue.schedule_async_request(
            request_for(state, folder / str(step), enable_cache=True, metadata_cache=cache)
        )
        queue.maybe_finalize_async_calls(blocking=True)
    queue.close()
    both = {**own_state(4), "new": torch.ones(7)}
    assert_same(both, load_like(both, folder / "4"))
    return "ok"


def worker_killed():
    """The worker of one rank is killed while the other one still writes."""
    queue = AsyncCallsQueue()
    function = kill_myself if rank == 1 else wait_for_file
    ran = []
    queue.schedule_async_request(
        AsyncRequest(function, (str(folder / "go"),), [lambda: ran.append(1)])
    )
    begin = time.monotonic()
    try:
        if rank == 0:
            queue.maybe_finalize_async_calls(blocking=True)
        else:
            poll(queue)
    except AsyncSaveError as error:
        result = [error.rank, error.call_idx, "SIGKILL" in str(error), time.monotonic() - begin]
    (folder / "go").touch()
    queue.schedule_async_request(request_for(own_state(1), folder / "next"))
    assert queue.maybe_finalize_async_calls(blocking=True) == [1]
    queue.close()
    assert_same(own_state(1), load_like(own_state(0), folder / "next"))
    assert not ran
    return result


def failure_of(queue, *, blocking):
    """Return rank, text and time of the error that a save ends with."""
    try:
        queue.maybe_finalize_async_calls(blocking=True) if blocking else poll(queue)
    except CheckpointException as error:
        return getattr(error, "rank", None), str(error), time.monotonic()
    raise AssertionError("the save has not failed")


def wait_until(condition):
    """Wait until something is so."""
    limit = time.monotonic() + 100
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.005)


def killed_in_the_middle():
    """The worker of rank 1 gets SIGKILL while it writes: how soon each rank hears of it."""
    queue, told = AsyncCallsQueue(), []
    queue.schedule_async_request(request_for(own_state(0), folder / "before"))
    queue.maybe_finalize_async_calls(blocking=True)
    for number in range(4):
        opener = functools.partial(slow_open, str(folder / "never"))
        late = {"open_file": opener} if rank == 1 else {}
        writer = FileSystemWriterAsync(folder / str(number), thread_count=1, **late)
        state = {**own_state(number), "large": torch.zeros(6 << 20)}
        queue.schedule_async_request(request_for(state, None, writer=writer))
        at = folder / f"killed{number}"
        if rank == 1:
            wait_until(lambda writer=writer: list(writer.path.glob(".*.tmp")))
            at.with_suffix(".tmp").write_text(str(time.monotonic()))
            os.kill(queue.persistent_caller.process.pid, signal.SIGKILL)
            at.with_suffix(".tmp").rename(at)
        failed, text, seen = failure_of(queue, blocking=number % 2 == 0)
        wait_until(at.exists)
        told.append([failed, "SIGKILL" in text, seen - float(at.read_text())])
        assert not (folder / str(number) / ".metadata").exists()
    dist.barrier()
    queue.schedule_async_request(request_for(own_state(9), folder / "after"))
    queue.maybe_finalize_async_calls(blocking=True)
    queue.close()
    for name, value in (("before", 0), ("after", 9)):
        assert verify_checkpoint(folder / name).whole
        assert_same(own_state(value), load_like(own_state(0), folder / name))
    return told


def disk_trouble():  # noqa: C901, PLR0915 - one trouble after the other
    """On a small file system everything goes wrong in turn; what each rank hears, and how soon."""
    queue, told = AsyncCallsQueue(), {}
    filler = folder / "filler"

    def fill():
        with contextlib.suppress(OSError), filler.open("wb") as file:
            while True:
                file.write(bytes(1 << 14))
                file.flush()

    def remount(mode):
        # Until the workers have heard that their saves are over, they have files open there.
        command = ["mount", "-o", f"remount,{mode}", str(folder)]
        wait_until(lambda: subprocess.run(command, check=False).returncode == 0)

    def save(name, value, **options):
        writer = FileSystemWriterAsync(folder / name, thread_count=1, **options)
        queue.schedule_async_request(request_for(own_state(value), None, writer=writer))

    def here(action, *arguments):
        dist.barrier()
        if rank == 0:
            action(*arguments)
        dist.barrier()

    def fails(name):
        begin = time.monotonic()
        failed, text, seen = failure_of(queue, blocking=True)
        told[name] = [failed, text, seen - begin]
        dist.barrier()
        assert not (folder / name / ".metadata").exists()

    def succeeds(name, value):
        save(name, value)
        queue.maybe_finalize_async_calls(blocking=True)
        assert verify_checkpoint(folder / name).whole

    succeeds("first", 1)
    here(fill)
    save("full", 2)
    fails("full")
    here(filler.unlink)
    succeeds("after full", 3)
    save("no metadata", 4)
    queue._get_async_caller().wait(queue.async_calls[0], 60)
    here(fill)
    fails("no metadata")
    here(filler.unlink)
    here(remount, "ro")
    save("read-only", 5)
    fails("read-only")
    here(remount, "rw")
    for name, opener in (("quota", no_quota), ("broken", refuse_to_open)):
        save(name, 6, **({"open_file": opener} if rank == 1 else {}))
        fails(name)
    for name, loses in (("removed", shutil.rmtree), ("renamed", lambda p: p.rename(folder / "x"))):
        go = folder / f"go {name}"
        opener = functools.partial(open_late, str(go))
        save(name, 7, **({"open_file": opener} if rank == 1 else {}))
        wait_until((folder / name / f".nvrx_manifest.{rank}.json").exists)
        if rank == 0:
            queue._get_async_caller().wait(queue.async_calls[0], 60)
        here(loses, folder / name)
        here(go.touch)
        fails(name)
    worker = queue.persistent_caller.process.pid
    if rank == 1:
        os.kill(worker, signal.SIGSTOP)
    save("made anew", 7)
    if rank == 0:
        queue._get_async_caller().wait(queue.async_calls[0], 60)
    here(shutil.rmtree, folder / "made anew")
    if rank == 1:
        os.kill(worker, signal.SIGCONT)
    fails("made anew")
    succeeds("removed", 8)
    shutil.rmtree(folder / "x", ignore_errors=True)
    queue.close()
    queue = AsyncCallsQueue(on_error="warn", retries=0)
    save("warned", 9, **({"open_file": no_quota} if rank == 1 else {}))
    assert poll(queue) == []
    assert queue.stats().failed == 1
    succeeds("last", 10)
    queue.close()
    for name, value in (("first", 1), ("after full", 3), ("removed", 8), ("last", 10)):
        assert_same(own_state(value), load_like(own_state(0), folder / name))
    return told


def two_queues(rounds):
    """A queue of all ranks and one of rank 0 alone, at once, aborted at random."""
    chance = random.Random(11)
    queue, path = AsyncCallsQueue(), folder / "alone.pt"
    alone = TorchAsyncCheckpoint() if rank == 0 else None
    last = None
    for step in range(rounds):
        aborts = chance.choice([(), ("all",), ("alone",), ("all", "alone")])
        queue.schedule_async_request(request_for(own_state(step), folder / str(step)))
        if alone is not None:
            alone.async_save(state_of(step), path)
        if "all" in aborts:
            queue.close(abort=True)
        if alone is not None and "alone" in aborts:
            alone.close(abort=True)
        done = poll(queue) if step % 2 else queue.maybe_finalize_async_calls(blocking=True)
        assert bool(done) == ("all" not in aborts), (step, done)
        dist.barrier()
        if done:
            assert verify_checkpoint(folder / str(step)).whole
            assert_same(own_state(step), load_like(own_state(0), folder / str(step)))
        else:
            assert not (folder / str(step) / ".metadata").exists()
        if alone is not None:
            alone.finalize_async_save(blocking=True)
            # A save that was aborted may have been complete by then; it is that, or the last one.
            found = torch.load(path)["step"] if path.exists() else None
            assert found == step or ("alone" in aborts and found == last), (step, found)
            last = found
            assert found is None or assert_same(state_of(found), torch.load(path)) is None
    queue.close()
    if alone is not None:
        alone.close()
    return "ok"


def write_fails():
    """One rank cannot write: DCP's exception on all ranks, with the cause, and no metadata."""
    queue = AsyncCallsQueue()
    bad = {"open_file": refuse_to_open} if rank == 1 else {}
    writer = FileSystemWriterAsync(folder / "bad", thread_count=1, **bad)
    queue.schedule_async_request(request_for(own_state(1), None, writer=writer))
    try:
        queue.maybe_finalize_async_calls(blocking=True)
    except CheckpointException as error:
        result = [sorted(error.failures), "refuse_to_open" in str(error)]
    assert not (folder / "bad" / ".metadata").exists()
    queue.close()
    return result


def publish_fails():
    """The coordinator cannot write the metadata: all ranks hear of it."""
    queue = AsyncCallsQueue()
    queue.schedule_async_request(request_for(own_state(1), folder / "bad"))
    queue._get_async_caller().wait(queue.async_calls[0], 60)
    dist.barrier()
    if rank == 0:
        (folder / "bad" / ".metadata").mkdir()
    try:
        queue.maybe_finalize_async_calls(blocking=True)
    except CheckpointException as error:
        result = sorted(error.failures)
    queue.close()
    return result


def nothing_on_one_rank():
    """A rank without work finishes at once, also right after a save."""
    queue = AsyncCallsQueue()
    queue.schedule_async_request(request_for(own_state(1), folder / "a"))
    function = None if rank else print
    queue.schedule_async_request(AsyncRequest(function, ("done",), [lambda: None]))
    done = queue.maybe_finalize_async_calls(blocking=True)
    queue.close()
    return done


def nothing_to_save_on_one_rank():
    """Rank 1 has nothing in the checkpoint: a thread publishes it all the same."""
    threads = []
    finish = FileSystemWriterAsync.finish

    def noted(writer, metadata, results):
        threads.append(threading.current_thread() is threading.main_thread())
        finish(writer, metadata, results)

    FileSystemWriterAsync.finish = noted
    queue = AsyncCallsQueue()
    try:
        state = {} if rank else state_of(3)
        request = request_for(state, folder / "a")
        assert (request.async_fn is None) == bool(rank)
        queue.schedule_async_request(request)
        done = poll(queue)
        # Arguments of somebody else's: the finalize function publishes.
        request = request_for(state, folder / "b")
        queue.schedule_async_request(request._replace(async_fn_args=[*request.async_fn_args]))
        done += queue.maybe_finalize_async_calls(blocking=True)
    finally:
        FileSystemWriterAsync.finish = finish
        queue.close()
    dist.barrier()
    for name in ("a", "b"):
        assert verify_checkpoint(folder / name).whole
        assert_same(state_of(3), load_like(state_of(0), folder / name))
    return [done, threads]


def aborted():
    """A save is aborted by another thread's hook; the next one is right."""
    queue = AsyncCallsQueue()
    ran = []
    queue.schedule_async_request(
        AsyncRequest(wait_for_file, (str(folder / "never"),), [lambda: ran.append(1)])
    )
    assert queue.maybe_finalize_async_calls() == []
    abort_nvrx_checkpoint()
    assert queue.get_num_unfinalized_calls() == 0
    queue.schedule_async_request(request_for(own_state(2), folder / "b"))
    assert queue.maybe_finalize_async_calls(blocking=True) == [0]
    queue.close()
    assert_same(own_state(2), load_like(own_state(0), folder / "b"))
    assert not ran
    return "ok"


class OwnPlanner(DefaultSavePlanner):
    """A planner whose ranks plan by themselves, as Megatron's do."""

    can_run_decentralized_global_plan = True

    def create_decentralized_global_plan(self, plan):
        return plan


def subgroup():
    """Rank 1 saves alone, in a group of its own, with a planner that names files by rank."""
    group = dist.new_group([1])
    queue = AsyncCallsQueue()
    request = AsyncRequest(None, (), [])
    if rank == 1:
        state = state_of(7)
        request = request_for(state, folder / "a", planner=OwnPlanner(), group=group)
    queue.schedule_async_request(request)
    done = queue.maybe_finalize_async_calls(blocking=True)
    queue.close()
    if rank == 1:
        report = verify_checkpoint(folder / "a")
        assert report.whole, report.problems
        assert_same(state, load_like(state, folder / "a"))
    return done


class NoPlan(OwnPlanner):
    """A planner that fails on rank 1."""

    def create_local_plan(self):
        if rank == 1:
            raise ValueError("no plan for this")
        return super().create_local_plan()


def plan_fails():
    """Rank 1 cannot plan, or has a value that cannot be pickled: all ranks hear of it."""
    texts = []
    queue = AsyncCallsQueue()
    try:
        queue.schedule_async_request(request_for(own_state(1), folder / "a", planner=NoPlan()))
    except CheckpointException as error:
        texts.append("no plan for this" in str(error))
    for planner in (DefaultSavePlanner, OwnPlanner):
        more = {"bad": threading.Lock()} if rank else {}
        state = own_state(1, **more)
        queue.schedule_async_request(request_for(state, folder / "b", planner=planner()))
        try:
            queue.maybe_finalize_async_calls(blocking=True)
        except AsyncSaveError as error:
            texts.append([error.rank, f"'bad' cannot be saved to {folder}/b" in str(error)])
    queue.schedule_async_request(request_for(own_state(2), folder / "c"))
    queue.maybe_finalize_async_calls(blocking=True)
    queue.close()
    assert_same(own_state(2), load_like(own_state(0), folder / "c"))
    assert not (folder / "b" / ".metadata").exists()
    return texts


def world_shrinks():
    """With a warm cache rank 0 goes on alone: it saves what rank 1 has saved before."""
    cache = CheckpointMetadataCache()
    for step in range(4):
        queue = AsyncCallsQueue()
        if step == 3:
            dist.destroy_process_group()
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            if rank == 1:
                return "left"
        request = request_for(
            state_of(step), folder / str(step), enable_cache=True, metadata_cache=cache
        )
        queue.schedule_async_request(request)
        queue.maybe_finalize_async_calls(blocking=True)
        queue.close()
    assert_same(state_of(3), load_like(state_of(3), folder / "3"))
    return "ok"


for word in sys.argv[2:]:
    name, *numbers = word.split("=")
    folder = Path(sys.argv[1]) / name
    folder.mkdir(exist_ok=True)
    print("RESULT", name, json.dumps(globals()[name](*map(int, numbers))), flush=True)
    dist.barrier()
dist.destroy_process_group()
