# SPDX-License-Identifier: Apache-2.0
"""Queues on one rank: functions, failures, aborts, and what is left behind."""

import contextlib
import fcntl
import gc
import logging
import os
import pickle
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import failing_files
import no_threads
import pytest
import torch
import torch.distributed as dist

from nvidia_resiliency_ext.checkpointing import _image
from nvidia_resiliency_ext.checkpointing._staging import StagingBuffer
from nvidia_resiliency_ext.checkpointing.async_ckpt import (
    _callers,
    _payload,
    _priority,
    _worker,
    _worker_main,
    core,
)
from nvidia_resiliency_ext.checkpointing.async_ckpt._agreement import control_group
from nvidia_resiliency_ext.checkpointing.async_ckpt._messages import (
    MESSAGES,
    Finished,
    Job,
    Released,
    Run,
    Settings,
)
from nvidia_resiliency_ext.checkpointing.async_ckpt._worker import Worker, WorkerLostError
from nvidia_resiliency_ext.checkpointing.async_ckpt.core import (
    AsyncCallsQueue,
    AsyncRequest,
    AsyncSaveError,
    PersistentAsyncCaller,
    QueueFullError,
)
from nvidia_resiliency_ext.shared_utils.abort_hooks import run_abort_hooks
from nvidia_resiliency_ext.shared_utils.procfs import is_running
from nvidia_resiliency_ext.shared_utils.wire import receive_message, send_with_fds

pytestmark = pytest.mark.slow

PROGRAMS = Path(__file__).parent / "programs"
DEADLINE_S = 150


class OldRequest(NamedTuple):
    """A request as it was once."""

    async_fn: Any
    async_fn_args: Any
    finalize_fns: Any


@pytest.fixture
def queue():
    made = AsyncCallsQueue(sigterm_timeout=5)
    yield made
    made.close(abort=True)


def wait_until(condition):
    """Wait for a condition of another process."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_function_gets_what_was_there_when_it_was_scheduled(queue, tmp_path):
    """A function in the worker sees tensors as they were, also those that `preload_fn` returns."""
    tensor = torch.full((7, 5), 2.0)
    args = (str(tmp_path / "a"), tensor.t())
    queue.schedule_async_request(AsyncRequest(failing_files.write_text, args, []))
    loaded = (str(tmp_path / "b"), None)
    request = AsyncRequest(failing_files.write_text, loaded, [], None, lambda: tensor[2:4])
    queue.schedule_async_request(request)
    tensor.fill_(100)
    assert queue.maybe_finalize_async_calls(blocking=True) == [0, 1]
    assert (tmp_path / "a").read_text() == "70.0"
    assert (tmp_path / "b").read_text() == "20.0"


def test_arguments_are_copied_one_at_a_time(queue, tmp_path, monkeypatch):
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
    tensors = [torch.full((30, 40), float(number))[:, ::2] for number in range(5)]
    args = (str(tmp_path / "sum"), [*tensors, torch.ones(3)])
    queue.schedule_async_request(AsyncRequest(failing_files.write_sum, args, []))
    assert queue.maybe_finalize_async_calls(blocking=True) == [0]
    assert (tmp_path / "sum").read_text() == str(float(sum(range(5)) * 600 + 3))
    assert most == [1]


@pytest.mark.parametrize(
    "how", ["raises", "killed", "segfaults", "cannot be pickled", "preload raises"]
)
def test_failure_is_reported_once_and_the_queue_goes_on(queue, how, tmp_path):
    """A save that fails in any way is an error with rank and cause; the next one succeeds."""
    finalized = []
    functions = [lambda: finalized.append(1)]
    requests = {
        "raises": AsyncRequest(failing_files.raise_error, (), functions),
        "killed": AsyncRequest(failing_files.kill_myself, (), functions),
        "segfaults": AsyncRequest(failing_files.segfault, (), functions),
        "cannot be pickled": AsyncRequest(print, (threading.Lock(),), functions),
        "preload raises": AsyncRequest(print, (1, 2), functions, None, lambda: 1 // 0),
    }
    causes = {
        "raises": "this save function fails",
        "killed": "SIGKILL",
        "segfaults": "SIGSEGV",
        "cannot be pickled": "cannot pickle",
        "preload raises": "ZeroDivisionError",
    }
    assert queue.schedule_async_request(requests[how]) == 0
    args = (str(tmp_path / "next"), 5)
    assert queue.schedule_async_request(AsyncRequest(failing_files.write_text, args, [])) == 1
    with pytest.raises(AsyncSaveError, match=causes[how]) as caught:
        queue.maybe_finalize_async_calls(blocking=True)
    assert (caught.value.call_idx, caught.value.rank) == (0, 0)
    assert queue.maybe_finalize_async_calls(blocking=True) == [1]
    assert (tmp_path / "next").read_text() == "5"
    assert not finalized
    assert queue.stats().failed == 1


def test_worker_that_dies_between_saves_is_replaced(queue, tmp_path):
    """If the idle worker is killed, the next save starts another one by itself."""
    queue.schedule_async_request(AsyncRequest(print, (1,), []))
    queue.maybe_finalize_async_calls(blocking=True)
    worker = queue.persistent_caller.process
    os.kill(worker.pid, signal.SIGKILL)
    wait_until(lambda: not worker.is_alive())
    restarted = []
    queue.persistent_caller.register_worker_restart_callback(lambda: restarted.append(1))
    args = (str(tmp_path / "a"), 5)
    queue.schedule_async_request(AsyncRequest(failing_files.write_text, args, []))
    assert queue.maybe_finalize_async_calls(blocking=True) == [1]
    assert restarted == [1]
    assert queue.persistent_caller.process is not worker


def test_abort_of_another_thread_ends_a_wait(queue, tmp_path, monkeypatch):
    """An abort from the abort hooks ends a blocking finalise, and the queue begins anew."""
    ran = []
    args = (str(tmp_path / "never"),)
    queue.schedule_async_request(
        AsyncRequest(failing_files.wait_for_file, args, [lambda: ran.append(1)])
    )
    ended = []
    caller, waits = queue.persistent_caller, threading.Event()
    wait = caller.wait
    monkeypatch.setattr(caller, "wait", lambda *args: (waits.set(), wait(*args))[1])

    def finalize():
        try:
            queue.maybe_finalize_async_calls(blocking=True)
        except AsyncSaveError as error:
            ended.append(str(error))

    waiting = threading.Thread(target=finalize)
    waiting.start()
    assert waits.wait(DEADLINE_S)
    run_abort_hooks()
    waiting.join(DEADLINE_S)
    assert not waiting.is_alive()
    assert "aborted" in ended[0]
    assert queue.get_num_unfinalized_calls() == 0
    assert queue.schedule_async_request(AsyncRequest(print, ("again",), [])) == 0
    assert queue.maybe_finalize_async_calls(blocking=True) == [0]
    assert not ran


def test_save_aborted_while_it_is_staged_is_never_written(tmp_path):
    """An abort during `schedule` stops that save too: no file of it appears, no worker is left."""
    callers = []
    for persistent in (True, False):
        queue = AsyncCallsQueue(persistent=persistent, sigterm_timeout=5)
        callers.append(queue._get_async_caller())

        def preload(queue=queue):
            aborting = threading.Thread(target=queue.close, args=(True,))
            aborting.start()
            aborting.join(DEADLINE_S)
            return 5

        args = (str(tmp_path / "old"), None)
        request = AsyncRequest(failing_files.write_text, args, [], None, preload)
        queue.schedule_async_request(request)
        assert callers[-1].process is None
        assert queue.get_num_unfinalized_calls() == 0
        args = (str(tmp_path / "new"), 6)
        queue.schedule_async_request(AsyncRequest(failing_files.write_text, args, []))
        assert queue.maybe_finalize_async_calls(blocking=True) == [0]
        queue.close()
    assert os.listdir(tmp_path) == ["new"]


def test_request_without_function_and_foreign_requests(queue):
    """Nothing to do is done at once; other request types are understood."""
    ran = []
    queue.schedule_async_request(AsyncRequest(None, (), [lambda: ran.append(1)]))
    queue.schedule_async_request(OldRequest(print, ("old",), [lambda: ran.append(2)]))
    assert queue.maybe_finalize_async_calls(blocking=True) == [0, 1]
    assert ran == [1, 2]
    with pytest.raises(TypeError, match="no request"):
        queue.schedule_async_request(object())


def test_frozen_request_takes_no_more_functions():
    """A frozen request refuses finalize functions."""
    request = AsyncRequest(None, (), [])
    request.add_finalize_fn(print)
    with pytest.raises(RuntimeError, match="frozen"):
        request.freeze().add_finalize_fn(print)


def test_temporal_queue_runs_what_cannot_be_pickled(tmp_path):
    """Without a persistent worker a closure is run, with tensors as they were."""
    queue = AsyncCallsQueue(persistent=False)
    tensor, seen, go = torch.ones(3), [], threading.Event()

    def save(value):
        go.wait(DEADLINE_S)
        seen.append(float(value.sum()))

    queue.schedule_async_request(AsyncRequest(save, (tensor,), [lambda: seen.append("done")]))
    tensor.fill_(9)
    assert queue.maybe_finalize_async_calls() == []
    go.set()
    assert queue.maybe_finalize_async_calls(blocking=True) == [0]
    assert seen == [3.0, "done"]
    queue.close()


def test_save_for_which_there_is_no_thread_is_never_taken_for_written(tmp_path, monkeypatch):
    """It fails, also when a later save has waited for an earlier one in between."""
    queue = AsyncCallsQueue(persistent=False)
    (tmp_path / "go").touch()
    args = (str(tmp_path / "go"),)
    queue.schedule_async_request(AsyncRequest(failing_files.wait_for_file, args, []))
    ran = []
    with monkeypatch.context() as patch:
        no_threads.refuse(patch, "nvrx-save")
        request = AsyncRequest(lambda: None, (), [lambda: ran.append(1)])
        queue.schedule_async_request(request)
    queue.schedule_async_request(AsyncRequest(print, ("third",), []))
    with pytest.raises(AsyncSaveError, match="can't start new thread") as caught:
        queue.maybe_finalize_async_calls(blocking=True)
    assert caught.value.call_idx == 1
    assert queue.maybe_finalize_async_calls(blocking=True) == [2]
    assert not ran
    queue.close()


def test_temporal_worker_ends_with_its_calls(tmp_path):
    """A queue that is not persistent has no process when nothing is under way."""
    queue = AsyncCallsQueue(persistent=False)
    assert queue._get_async_caller().process is None
    queue.schedule_async_request(AsyncRequest(print, (1,), []))
    assert queue._get_async_caller()._debug_is_async_process_running()
    queue.maybe_finalize_async_calls(blocking=True)
    assert queue._get_async_caller().process is None
    queue.close()


def test_warn_goes_on_and_raises_after_so_many_failures(caplog):
    """With `on_error="warn"` a failed save is logged and counted; the third in a row is raised."""
    queue = AsyncCallsQueue(on_error="warn", max_failures=3)
    for number in range(3):
        queue.schedule_async_request(AsyncRequest(failing_files.raise_error, (), []))
        if number < 2:
            assert queue.maybe_finalize_async_calls(blocking=True) == []
        else:
            with pytest.raises(AsyncSaveError):
                queue.maybe_finalize_async_calls(blocking=True)
    assert queue.stats().failed_in_a_row == 3
    assert "training goes on without save 1" in caplog.text
    queue.schedule_async_request(AsyncRequest(print, (1,), []))
    assert queue.maybe_finalize_async_calls(blocking=True) == [3]
    assert queue.stats().failed_in_a_row == 0
    queue.close()


def test_full_queue_waits_skips_or_raises(tmp_path):
    """What a save does while another one is pending is the user's choice."""
    for on_full, expected in (("skip", core.SKIPPED), ("error", None)):
        queue = AsyncCallsQueue(on_full=on_full)
        go = tmp_path / on_full
        queue.schedule_async_request(AsyncRequest(failing_files.wait_for_file, (str(go),), []))
        if on_full == "skip":
            assert queue.schedule_async_request(AsyncRequest(print, (), [])) == expected
        else:
            with pytest.raises(QueueFullError):
                queue.schedule_async_request(AsyncRequest(print, (), []))
        go.touch()
        assert queue.maybe_finalize_async_calls(blocking=True) == [0]
        queue.close()


def test_save_that_takes_too_long_fails(tmp_path):
    """After `save_timeout` a save has failed; the queue goes on when the worker is free again."""
    queue = AsyncCallsQueue(save_timeout=0.3)
    go = tmp_path / "go"
    queue.schedule_async_request(AsyncRequest(failing_files.wait_for_file, (str(go),), []))
    with pytest.raises(AsyncSaveError, match=r"within 0\.3 s"):
        queue.maybe_finalize_async_calls(blocking=True)
    go.touch()
    queue.close(abort=True)


def test_bad_options_name_the_variable(monkeypatch):
    """A value that is not allowed is refused with the name of its variable."""
    for name, value in (("MAX_PENDING", "0"), ("SAVE_TIMEOUT", "-1"), ("ON_ERROR", "maybe")):
        with monkeypatch.context() as context:
            context.setenv(f"NVRX_CKPT_{name}", value)
            with pytest.raises(ValueError, match=f"NVRX_CKPT_{name}"):
                AsyncCallsQueue()
    with pytest.raises(ValueError, match="cpu_priority"):
        AsyncCallsQueue(cpu_priority=20)
    arguments = {"max_pending": 0, "save_timeout": 0, "retries": -1, "retry_delay": -0.5}
    for name, value in {**arguments, "max_failures": 0}.items():
        with pytest.raises(ValueError, match=f"{name}.* is {value}"):
            AsyncCallsQueue(**{name: value})


def niceness_of(thread):
    """Return the niceness of a thread of any process; None when it has ended."""
    with contextlib.suppress(ProcessLookupError):
        return os.getpriority(os.PRIO_PROCESS, thread)
    return None


def test_worker_is_light_and_polite(caplog):
    """The worker that writes has no torch; all its threads have the priorities that are logged."""
    caplog.set_level(logging.INFO, "nvrx")
    queue = AsyncCallsQueue(io_priority=3, sigterm_timeout=5)
    queue.schedule_async_request(AsyncRequest(print, (1,), []))
    queue.maybe_finalize_async_calls(blocking=True)
    pid = queue.persistent_caller.process.pid
    threads = [int(name) for name in os.listdir(f"/proc/{pid}/task")]
    assert len(threads) > 2
    # One that unlocks what was saved may end meanwhile.
    assert {niceness_of(thread) for thread in threads} - {None} == {10}
    assert {_priority.io_class_of(thread) for thread in threads} <= {3, None}
    assert caplog.text.count(f"worker process {pid} has niceness 10 and disk priority class 3") == 1
    assert "torch" not in Path(f"/proc/{pid}/maps").read_text()
    queue.close()


@pytest.mark.parametrize("options", [{}, {"on_error": "warn", "retry_delay": 0.01}])
def test_warm_worker_is_taken_by_the_first_queue(options, tmp_path):
    """A worker started ahead of time is the first queue's, whatever its options."""
    AsyncCallsQueue.warmup_persistent_caller(0, cpu_priority=5)
    warm = AsyncCallsQueue._warm
    AsyncCallsQueue.warmup_persistent_caller(0)
    assert AsyncCallsQueue._warm is warm
    queue = AsyncCallsQueue(max_pending=2, **options)
    assert queue.persistent_caller is warm
    AsyncCallsQueue.warmup_persistent_caller(0)
    assert AsyncCallsQueue._warm is None
    # Two at a time have a buffer, as this queue was asked for.
    for k in range(2):
        args = (str(tmp_path / f"go{k}"),)
        queue.schedule_async_request(AsyncRequest(failing_files.wait_for_file, args, []))
    for k in range(2):
        (tmp_path / f"go{k}").touch()
    assert queue.maybe_finalize_async_calls(blocking=True) == [0, 1]
    queue.close()


def test_caller_can_be_driven_by_itself(tmp_path):
    """A caller carries out one request and tells when it is over."""
    caller = PersistentAsyncCaller()
    args = (str(tmp_path / "a"), 3)
    caller.schedule_async_call(AsyncRequest(failing_files.write_text, args, []))
    assert caller.is_current_async_call_done(blocking=True)
    assert (tmp_path / "a").read_text() == "3"
    caller.close()


@pytest.mark.no_second_try
@pytest.mark.parametrize("how", ["SIGKILL", "exit", "writes"])
def test_nothing_outlives_the_trainer(how, fork_server, tmp_path):
    """Killed, or ended while a save is under way, a trainer leaves no process behind."""
    program = PROGRAMS / "lone_trainer.py"
    with fork_server.running(program, how, tmp_path / "file") as trainer:
        worker = int(trainer.output.readline())
        if how == "SIGKILL":
            trainer.kill()
        trainer.wait(DEADLINE_S)
        wait_until(lambda: not is_running(worker))
        errors = trainer.errors.read()
        assert how == "SIGKILL" or "saves were not finalised: 0" in errors
        assert (tmp_path / "file").exists() == (how == "writes")
        numbers = {str(worker), str(trainer.pid)}
        assert not [n for n in os.listdir("/dev/shm") if numbers & set(re.findall(r"\d+", n))]


def test_forked_child_leaves_the_queue_to_its_parent(fork_server, tmp_path):
    """A child that the trainer forks and that exits takes no result and ends no worker."""
    program = PROGRAMS / "forking_trainer.py"
    with fork_server.running(program, tmp_path / "begun", tmp_path / "go") as trainer:
        trainer.wait(DEADLINE_S)
        errors = trainer.errors.read()
        assert trainer.output.read() == "[0]\n", errors
    assert "not finalised" not in errors


@pytest.mark.parametrize("max_pending", [1, 2])
def test_hung_save_does_not_hold_up_the_next(max_pending, tmp_path):
    """A save that hangs beyond `save_timeout` costs its worker, and later saves are written."""
    queue = AsyncCallsQueue(max_pending=max_pending)
    begun = tmp_path / "begun"
    args = (str(begun), str(tmp_path / "never"))
    queue.schedule_async_request(AsyncRequest(failing_files.touch_and_wait, args, []))
    wait_until(begun.exists)
    # Only now: on a slow machine a timeout could end before the worker has begun to hang.
    queue.async_calls[0].expires = queue.async_calls[0].started + 1
    with pytest.raises(AsyncSaveError, match=r"within 1 s"):
        queue.maybe_finalize_async_calls(blocking=True)
    hung = queue.persistent_caller.process
    args = (str(tmp_path / "next"), torch.ones(5))
    queue.schedule_async_request(AsyncRequest(failing_files.write_text, args, []))
    assert queue.maybe_finalize_async_calls(blocking=True) == [1]
    assert (tmp_path / "next").read_text() == "5.0"
    assert not hung.is_alive()
    queue.close()


def test_ended_worker_is_told_from_one_that_finished(queue, tmp_path):
    """A SIGTERM from outside ends the worker, and the error names the signal."""
    begun = tmp_path / "begun"
    args = (str(begun), str(tmp_path / "never"))
    queue.schedule_async_request(AsyncRequest(failing_files.touch_and_wait, args, []))
    wait_until(begun.exists)
    os.kill(queue.persistent_caller.process.pid, signal.SIGTERM)
    with pytest.raises(AsyncSaveError, match="SIGTERM"):
        queue.maybe_finalize_async_calls(blocking=True)


def test_long_module_path_reaches_the_worker(monkeypatch, tmp_path):
    """A worker starts whatever the length of `sys.path`."""
    monkeypatch.setattr(
        sys, "path", [*sys.path, *(f"/nowhere/{'x' * 200}/{i}" for i in range(500))]
    )
    queue = AsyncCallsQueue()
    args = (str(tmp_path / "a"), 5)
    queue.schedule_async_request(AsyncRequest(failing_files.write_text, args, []))
    assert queue.maybe_finalize_async_calls(blocking=True) == [0]
    queue.close()


def test_forgotten_queue_leaves_no_memory():
    """A queue that is dropped without `close` gives its staging memory and its worker back."""

    def memfds():
        links = (os.path.join("/proc/self/fd", fd) for fd in os.listdir("/proc/self/fd"))
        return sum("nvrx-ckpt" in os.readlink(link) for link in links if os.path.islink(link))

    queue = AsyncCallsQueue()
    queue.schedule_async_request(AsyncRequest(print, (torch.ones(5),), []))
    queue.maybe_finalize_async_calls(blocking=True)
    assert memfds() > 0
    del queue
    gc.collect()
    assert memfds() == 0


def test_forgotten_queue_says_which_saves_are_lost(caplog, tmp_path):
    """A queue that is dropped while saves are under way waits for nothing, and names them."""
    queue = AsyncCallsQueue(max_pending=2)
    args = (str(tmp_path / "never"),)
    for _ in range(2):
        queue.schedule_async_request(AsyncRequest(failing_files.wait_for_file, args, []))
    del queue
    gc.collect()
    assert "saves were not finalised: 0, 1" in caplog.text


def test_control_group_goes_with_its_process_group():
    """Nothing of ours keeps a process group that the program has destroyed."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group = dist.new_group([0])
    assert control_group(group) is control_group(group)
    assert control_group(group).minimum([3]) == [3]
    reference = weakref.ref(group)
    dist.destroy_process_group()
    del group
    gc.collect()
    assert reference() is None


def test_worker_that_the_kernel_does_not_let_end_holds_up_no_abort(queue, tmp_path, monkeypatch):
    """Whoever waits for a worker that even SIGKILL does not end hears that it was given up."""
    begun = tmp_path / "begun"
    args = (str(begun), str(tmp_path / "never"))
    queue.schedule_async_request(AsyncRequest(failing_files.touch_and_wait, args, []))
    wait_until(begun.exists)
    worker, ended = queue.persistent_caller.process, []
    os.kill(worker.pid, signal.SIGSTOP)
    monkeypatch.setattr(worker._child, "stop", lambda *_, **__: None)  # as in a call of the disk

    def wait_for_results():
        try:
            worker.wait(None)
        except WorkerLostError as error:
            ended.append(str(error))

    waiting = threading.Thread(target=wait_for_results)
    waiting.start()
    wait_until(lambda: not worker._lock.acquire(blocking=False) or worker._lock.release())
    aborting = threading.Thread(target=queue.close, args=(True,), daemon=True)
    aborting.start()
    aborting.join(DEADLINE_S)
    assert not aborting.is_alive()
    waiting.join(DEADLINE_S)
    assert f"{worker.pid} does not answer" in ended[0]
    os.kill(worker.pid, signal.SIGKILL)
    wait_until(lambda: worker._child.poll() is not None)


def test_worker_that_breaks_says_why_and_runs_nothing(tmp_path):
    """What is no message ends a worker with a traceback, and no pickle that comes is loaded."""
    ours, theirs = socket.socketpair()
    program = f"from {_worker_main.__name__} import main; main({theirs.fileno()})"
    with ours, theirs:
        worker = subprocess.Popen(
            [sys.executable, "-c", program],
            pass_fds=[theirs.fileno()], stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        ours.sendall(pickle.dumps(Payload(tmp_path / "made")) * 10)
        _, text = worker.communicate(timeout=DEADLINE_S)
    assert worker.returncode == 1
    assert "FrameTooLargeError" in text
    assert not (tmp_path / "made").exists()


def test_worker_that_cannot_give_a_result_ends(tmp_path):
    """Where a result finds no memory, the worker ends and says why: nobody waits for ever."""
    ours, theirs = socket.socketpair()
    program = f"from {_worker_main.__name__} import main; main({theirs.fileno()})"
    memory = os.memfd_create("nvrx-ckpt-job", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(memory, 8)
    fcntl.fcntl(memory, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)
    buffer = StagingBuffer(10)
    with ours, theirs:
        worker = subprocess.Popen(
            [sys.executable, "-c", program],
            pass_fds=[theirs.fileno()], stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        run = Run(Job("q", 0, 0), "write", 0, 0, True, 1, 0, 1.0)
        send_with_fds(ours, MESSAGES.encode(Settings(0, None)), [])
        send_with_fds(ours, MESSAGES.encode(run), [buffer.fd, memory])
        _, text = worker.communicate(timeout=DEADLINE_S)
    os.close(memory)
    buffer.close()
    assert worker.returncode == 1
    assert "PermissionError" in text


class Payload:
    """A pickle that makes a directory when it is loaded."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_a_worker_without_threads_gives_locks_back(monkeypatch):
    """Where no thread can start a lock is given back all the same, and the worker goes on."""
    here, there = socket.socketpair()
    closed = threading.Event()
    with here, there:
        server = _worker_main._Server(here)
        server._locks["path"] = Job("q", 0, 0), SimpleNamespace(close=closed.set)
        no_threads.refuse(monkeypatch)
        server._dispatch(Released(Job("q", 0, 0)))
    assert closed.is_set()


def test_a_failed_save_is_reported_while_its_directory_hangs():
    """The trainer hears of the end of a job although its lock cannot be given back."""
    here, there = socket.socketpair()
    over = threading.Event()
    job = Job("q", 0, 0)
    memory = SimpleNamespace(append=lambda _: 0, close=lambda: None)
    with here, there:
        server = _worker_main._Server(here)
        server._locks["path"] = job, SimpleNamespace(close=over.wait)
        finishing = threading.Thread(
            target=server._finish, args=(SimpleNamespace(job=job), memory, 0.0, OSError("disk"))
        )
        finishing.start()
        try:
            found = receive_message(there, MESSAGES, 20)
        finally:
            over.set()
            finishing.join()
    assert isinstance(found, Finished)
    assert not found.ok


HANGS_UP = """\
import socket, sys, time
sock = socket.socket(fileno=int(sys.argv[1]))
sock.recv(65536)
sock.shutdown(socket.SHUT_RDWR)
time.sleep(10)
"""


def test_worker_that_hangs_up_before_it_ends_is_not_waited_for(monkeypatch):
    """A look without waiting returns at once, and a wait rests, while such a worker cleans up."""
    monkeypatch.setattr(_worker, "_BOOT", HANGS_UP)
    worker = Worker(0, None)
    try:
        poller = select.poll()
        poller.register(worker._sock, select.POLLIN)
        assert poller.poll(60_000)
        assert worker.wait(0.0) == []
        begin = time.process_time()
        assert worker.wait(0.5) == []
        assert time.process_time() - begin < 0.25
        assert worker.is_alive()
        os.kill(worker.pid, signal.SIGKILL)
        with pytest.raises(WorkerLostError, match="SIGKILL"):
            worker.wait(60.0)
    finally:
        worker.stop(0.0)


def test_interrupt_while_a_thread_is_collected_is_not_the_saves_failure(monkeypatch):
    """Ctrl-C in the training thread reaches it, and the save is collected afterwards."""
    queue = AsyncCallsQueue(persistent=False)
    try:
        queue.schedule_async_request(AsyncRequest(lambda: None, (), []))
        with monkeypatch.context() as patch:

            def interrupt(_):
                raise KeyboardInterrupt

            patch.setattr(_callers.AbandonableCall, "result", interrupt)
            with pytest.raises(KeyboardInterrupt):
                queue.maybe_finalize_async_calls(blocking=True)
        assert len(queue.maybe_finalize_async_calls(blocking=True)) == 1
    finally:
        queue.close()


def test_interrupt_while_a_save_is_staged_fails_that_save_only(queue, monkeypatch):
    """Ctrl-C in the middle of `schedule` reaches the trainer, and leaves no buffer in use."""
    with monkeypatch.context() as patch:

        def interrupt(_):
            raise KeyboardInterrupt

        patch.setattr(_payload, "stage_copies", interrupt)
        with pytest.raises(KeyboardInterrupt):
            queue.schedule_async_request(AsyncRequest(print, (torch.ones(5),), []))
    queue.schedule_async_request(AsyncRequest(print, (torch.ones(5),), []))
    with pytest.raises(AsyncSaveError, match="KeyboardInterrupt"):
        queue.maybe_finalize_async_calls(blocking=True)
    assert queue.maybe_finalize_async_calls(blocking=True) == [1]
