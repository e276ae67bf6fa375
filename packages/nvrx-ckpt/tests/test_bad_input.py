# SPDX-License-Identifier: Apache-2.0
"""Paths, names and states that cannot be saved: an error that names them, and nothing else."""

import contextlib
import os
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from dcp_saves import assert_same, assert_whole, load_like, request_for, state_of
from torch.distributed.checkpoint.api import CheckpointException

from nvidia_resiliency_ext.checkpointing import (
    AsyncSaveError,
    publish_latest,
    read_latest,
    verify_checkpoint,
)
from nvidia_resiliency_ext.checkpointing.__main__ import main
from nvidia_resiliency_ext.checkpointing.async_ckpt import TorchAsyncCheckpoint
from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncCallsQueue
from nvidia_resiliency_ext.checkpointing.async_ckpt.filesystem_async import FileSystemWriterAsync
from nvidia_resiliency_ext.checkpointing.async_ckpt.state_dict_saver import _ResultsExchange
from nvidia_resiliency_ext.checkpointing.local.basic_state_dict import BasicTensorAwareStateDict
from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager import (
    LocalCheckpointManager,
)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
DEADLINE_S = 150
ODD_NAMES = ("new\nline", "ü", "-lead", "sur\udcffrogate", "sp ace", "bell\a\x1b[31m")


@pytest.fixture
def queue():
    made = AsyncCallsQueue(sigterm_timeout=5)
    yield made
    made.close(abort=True)


def dcp_save(state, folder):
    """Save a DCP checkpoint."""
    queue = AsyncCallsQueue(sigterm_timeout=5)
    try:
        queue.schedule_async_request(request_for(state, folder))
        queue.maybe_finalize_async_calls(blocking=True)
    finally:
        queue.close(abort=True)


def torch_save(state, path):
    """Save a file of `torch.save`."""
    checkpoint = TorchAsyncCheckpoint()
    try:
        checkpoint.async_save(state, path)
        checkpoint.finalize_async_save(blocking=True)
    finally:
        checkpoint.close(abort=True)


@pytest.mark.parametrize("save", [dcp_save, torch_save])
def test_value_that_cannot_be_pickled_is_named(save, tmp_path):
    """The error has the path and the place in the state; what was saved there before is whole."""
    target = tmp_path / "saved"
    save(state_of(1), target)
    state = {"model": {"w": torch.ones(2), "lock": threading.Lock()}}
    with pytest.raises(AsyncSaveError, match=r"model.*lock.* cannot be saved to ") as caught:
        save(state, target)
    assert str(target) in str(caught.value)
    if save is dcp_save:
        assert_same(state_of(1), load_like(state_of(0), target))
        assert_whole(target)
    else:
        assert torch.load(target)["step"] == 1


def test_state_that_holds_itself_is_named(tmp_path):
    """A state with a cycle is refused with path and place, and makes no checkpoint."""
    state = {"a": {"b": [torch.ones(2)]}}
    state["a"]["b"].append(state["a"])
    with pytest.raises(CheckpointException, match=r"\['a'\]\['b'\]\[1\] of the state for .*saved"):
        dcp_save(state, tmp_path / "saved")
    assert not (tmp_path / "saved" / ".metadata").exists()


@pytest.mark.parametrize("below", ["", "/inside"])
def test_path_that_is_a_file_fails_the_save_only(below, tmp_path):
    """A file in place of the directory is named by the save, not by planning, and stays."""
    file = tmp_path / "file"
    file.write_text("precious")
    queue = AsyncCallsQueue(on_error="warn", retries=0)
    queue.schedule_async_request(request_for(state_of(1), f"{file}{below}"))
    assert queue.maybe_finalize_async_calls(blocking=True) == []
    assert queue.stats().failed == 1
    queue.schedule_async_request(request_for(state_of(2), tmp_path / "next"))
    assert queue.maybe_finalize_async_calls(blocking=True) == [1]
    queue.close()
    assert file.read_text() == "precious"
    with pytest.raises(AsyncSaveError, match=f"cannot create '{file}"):
        dcp_save(state_of(1), f"{file}{below}")


def test_quota_that_lets_no_directory_be_made_fails_the_save_only(queue, mounted):
    """Without room for a directory a save fails, the one before loads, and the next succeeds."""
    small = mounted("-t", "tmpfs", "-o", "size=8m,nr_inodes=16", "tmpfs", name="small")
    queue.schedule_async_request(request_for(state_of(1), small / "1"))
    queue.maybe_finalize_async_calls(blocking=True)
    fillers = [small / f"filler{number}" for number in range(16)]
    with contextlib.suppress(OSError):
        for filler in fillers:
            filler.touch()
    queue.schedule_async_request(request_for(state_of(2), small / "2"))
    with pytest.raises(AsyncSaveError, match=f"cannot create '{small}/2'.*No space"):
        queue.maybe_finalize_async_calls(blocking=True)
    for filler in fillers:
        filler.unlink(missing_ok=True)
    queue.schedule_async_request(request_for(state_of(3), small / "3"))
    queue.maybe_finalize_async_calls(blocking=True)
    for step in (1, 3):
        assert_same(state_of(step), load_like(state_of(0), small / str(step)))


@pytest.mark.parametrize("io_mode", ["buffered", "direct"])
def test_disk_that_fails_is_an_error_and_no_checkpoint(io_mode, queue, failing_disk):
    """An error that the device reports only when data is synced fails the save, with the path."""
    queue.schedule_async_request(request_for(state_of(1), failing_disk / "1"))
    queue.maybe_finalize_async_calls(blocking=True)
    os.sync()
    writer = FileSystemWriterAsync(failing_disk / "2", thread_count=1, io_mode=io_mode)
    state = {"large": torch.ones(10 << 20)}
    queue.schedule_async_request(request_for(state, None, writer=writer))
    with pytest.raises(AsyncSaveError, match=r"2/__0_0\.distcp': \[Errno (5|28)\]"):
        queue.maybe_finalize_async_calls(blocking=True)
    assert not (failing_disk / "2" / ".metadata").exists()
    assert_whole(failing_disk / "1")


def test_manifest_is_tried_again_like_the_data(tmp_path):
    """A file system that fails only for the manifest costs an attempt, and not the save."""
    queue = AsyncCallsQueue(retries=1000, retry_delay=0.01)
    obstacle = tmp_path / "c" / ".nvrx_manifest.0.json"
    obstacle.mkdir(parents=True)
    queue.schedule_async_request(request_for(state_of(1), tmp_path / "c"))
    deadline = time.monotonic() + DEADLINE_S
    while not (tmp_path / "c" / "__0_0.distcp").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    obstacle.rmdir()
    assert queue.maybe_finalize_async_calls(blocking=True) == [0]
    assert_whole(tmp_path / "c")
    queue.close()


def test_link_in_place_of_a_file_stays_a_link(tmp_path):
    """As with `torch.save` the file that a link names is written; a directory is not replaced."""
    (tmp_path / "real.pt").write_text("old")
    (tmp_path / "link.pt").symlink_to("real.pt")
    torch_save({"a": 1}, tmp_path / "link.pt")
    assert (tmp_path / "link.pt").is_symlink()
    assert torch.load(tmp_path / "real.pt") == {"a": 1}
    (tmp_path / "folder").mkdir()
    (tmp_path / "to folder").symlink_to("folder")
    with pytest.raises(AsyncSaveError, match=r"folder.*Is a directory"):
        torch_save({"a": 1}, tmp_path / "to folder")
    assert (tmp_path / "to folder").is_symlink()
    assert os.listdir(tmp_path / "folder") == []


@pytest.mark.parametrize("name", ODD_NAMES)
def test_odd_names_are_saved_and_shown_in_one_line(name, queue, tmp_path, capsys):
    """Checkpoints and tensors of any name are saved, loaded, verified, listed and published."""
    state = {f"t{name}": torch.ones(3), "step": 1}
    queue.schedule_async_request(request_for(state, tmp_path / name))
    queue.maybe_finalize_async_calls(blocking=True)
    assert_same(state, load_like(state, tmp_path / name))
    assert main(["verify", str(tmp_path / name)]) == 0
    assert main(["diff", str(tmp_path / name), str(tmp_path / name)]) == 0
    assert main(["list", str(tmp_path / name)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert all(line.isprintable() for line in lines)
    for link in (False, True):
        publish_latest(tmp_path / f"latest{link}", name, link=link)
        assert read_latest(tmp_path / f"latest{link}") == name


@pytest.mark.parametrize("save", [dcp_save, torch_save])
def test_what_is_no_path_is_named(save, tmp_path):
    """A null character is refused at once, by an error that shows the path."""
    with pytest.raises(ValueError, match=r"a\\x00b' is no path"):
        save(state_of(1), f"{tmp_path}/a\0b")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("command", ["verify", "list", "diff"])
@pytest.mark.parametrize("what", ["file", "missing", "nul\0", "x" * 5000, "loop"])
def test_commands_say_in_one_line_what_is_no_directory(command, what, tmp_path, capsys):
    """A path that is no checkpoint's directory is one line on stderr and exit code 2."""
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    arguments = [f"{tmp_path}/{what}"] * (2 if command == "diff" else 1)
    assert main([command, *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert "no directory" in err


def test_results_of_a_broken_exchange_are_sent_again():
    """After an exchange that only one side finished, the next save fails and the one after not."""
    exchange = _ResultsExchange()
    wrapper = SimpleNamespace(is_coordinator=True, get_world_size=lambda: 2)
    exchange.keep(5, ["mine", "old"], [(0, 0, 5), (0, 0, 6)])
    assert exchange.knows(5, wrapper)
    found = exchange.results_of([(0, 1, 5), (0, 1, 7)])  # rank 1 believes that 7 has arrived
    assert found[0] == "mine"
    assert "rank 1" in str(found[1][0])
    assert not exchange.knows(5, wrapper)


def test_the_progress_of_a_check_of_shards_reaches_its_end(tmp_path):
    """The last report of a check says that all bytes have been read, also of a damaged shard."""
    state = BasicTensorAwareStateDict({"w": torch.ones(1000)})
    LocalCheckpointManager(tmp_path).save(state, 1)
    reports = []
    verify_checkpoint(tmp_path, on_progress=lambda *report: reports.append(report))
    assert reports[-1][0] == reports[-1][1] > 4000
    [shard] = [
        path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size > 4000
    ]
    os.truncate(shard, 100)
    reports.clear()
    assert not verify_checkpoint(tmp_path, on_progress=lambda *r: reports.append(r)).whole
    assert reports[-1] == (100, 100)
