# SPDX-License-Identifier: Apache-2.0
"""TorchAsyncCheckpoint: files of torch.save that appear whole or not at all."""

import io
import os
import subprocess

import pytest
import torch
from dcp_saves import state_of

from nvidia_resiliency_ext.checkpointing.async_ckpt import TorchAsyncCheckpoint
from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncSaveError


@pytest.mark.parametrize("persistent", [True, False])
def test_file_is_that_of_torch_save(persistent, tmp_path):
    """The file equals that of torch.save for the state at the time of the call."""
    checkpoint = TorchAsyncCheckpoint(persistent_queue=persistent)
    path = tmp_path / "model.pt"
    state = {"model": state_of(1), "large": torch.ones(3 << 20), "names": ["a", {"b": 2}]}
    expected = io.BytesIO()
    torch.save(state, expected)
    checkpoint.async_save(state, path)
    state["large"].zero_()
    checkpoint.finalize_async_save(blocking=True)
    assert path.read_bytes() == expected.getvalue()
    assert os.listdir(tmp_path) == ["model.pt"]
    checkpoint.close()


def test_a_state_that_holds_itself_is_saved(tmp_path):
    """What torch.save can write, a cycle included, is written."""
    checkpoint = TorchAsyncCheckpoint()
    state = {"weight": torch.arange(1000.0)}
    state["self"] = state
    checkpoint.async_save(state, tmp_path / "model.pt")
    checkpoint.finalize_async_save(blocking=True, terminate=True)
    loaded = torch.load(tmp_path / "model.pt")
    assert loaded["self"] is loaded
    assert torch.equal(loaded["weight"], state["weight"])


def test_what_is_no_path_is_refused(tmp_path):
    """A file object is refused at once."""
    checkpoint = TorchAsyncCheckpoint()
    with pytest.raises(TypeError, match="BytesIO"):
        checkpoint.async_save({}, io.BytesIO())
    checkpoint.close(abort=True)


def test_failure_keeps_the_old_file(tmp_path):
    """If the new file cannot be written, the error names it, and the old one stays."""
    checkpoint = TorchAsyncCheckpoint()
    checkpoint.async_save({}, tmp_path / "missing" / "model.pt")
    with pytest.raises(AsyncSaveError, match="missing/model"):
        checkpoint.finalize_async_save(blocking=True)
    checkpoint.async_save({"a": 1}, tmp_path / "model.pt")
    checkpoint.finalize_async_save(blocking=True, terminate=True)
    assert torch.load(tmp_path / "model.pt") == {"a": 1}


@pytest.fixture
def small_mount(tmp_path):
    """Mount a file system of 8 MiB; skip where that is not permitted."""
    folder = tmp_path / "small"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting is not permitted here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_full_file_system_is_reported_and_survived(small_mount):
    """ENOSPC names file and error, leaves the previous file, and the next save succeeds."""
    checkpoint = TorchAsyncCheckpoint()
    path = small_mount / "model.pt"
    checkpoint.async_save({"a": torch.ones(1 << 18)}, path)
    checkpoint.finalize_async_save(blocking=True)
    checkpoint.async_save({"a": torch.zeros(4 << 20)}, path)
    with pytest.raises(AsyncSaveError, match=r"model\.pt.*Errno 28") as caught:
        checkpoint.finalize_async_save(blocking=True)
    assert "bytes written" in str(caught.value)
    assert os.listdir(small_mount) == ["model.pt"]
    assert torch.load(path)["a"][0] == 1
    checkpoint.async_save({"a": torch.zeros(100)}, path)
    checkpoint.finalize_async_save(blocking=True)
    assert torch.load(path)["a"][0] == 0
    subprocess.run(["mount", "-o", "remount,ro", str(small_mount)], check=True)
    checkpoint.async_save({"a": torch.ones(100)}, path)
    with pytest.raises(AsyncSaveError, match="Errno 30"):
        checkpoint.finalize_async_save(blocking=True)
    assert torch.load(path)["a"][0] == 0
    checkpoint.close()
