# SPDX-License-Identifier: Apache-2.0
"""The reader that keeps metadata, and the program that looks at checkpoints."""

import contextlib
import json
import os
import tempfile

import pytest
import torch
import torch.distributed.checkpoint as dcp
from dcp_saves import assert_whole, request_for, state_of
from hypothesis import given, settings
from hypothesis import strategies as st

from nvidia_resiliency_ext.checkpointing import (
    DamagedCheckpointError,
    _progress,
    publish_latest,
    read_latest,
    remove_old,
    verify_checkpoint,
)
from nvidia_resiliency_ext.checkpointing.__main__ import main
from nvidia_resiliency_ext.checkpointing._manifest import write_manifest
from nvidia_resiliency_ext.checkpointing._verify import checkpoint_items
from nvidia_resiliency_ext.checkpointing.async_ckpt.cached_metadata_filesystem_reader import (
    CachedMetadataFileSystemReader,
)
from nvidia_resiliency_ext.checkpointing.local.basic_state_dict import BasicTensorAwareStateDict
from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager import (
    LocalCheckpointManager,
)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def test_metadata_is_kept_until_the_checkpoint_is_another_one(tmp_path):
    """Metadata is read once, again after a new save to the same place, and can be forgotten."""
    request_for(state_of(1), tmp_path).execute_sync()
    first = CachedMetadataFileSystemReader(tmp_path).read_metadata()
    assert CachedMetadataFileSystemReader(tmp_path).read_metadata() is first
    request_for({**state_of(1), "new": torch.ones(2)}, tmp_path).execute_sync()
    second = CachedMetadataFileSystemReader(tmp_path).read_metadata()
    assert "new" in second.state_dict_metadata
    assert CachedMetadataFileSystemReader(tmp_path, False).read_metadata() is not second
    CachedMetadataFileSystemReader.clear_metadata_cache(tmp_path)
    assert CachedMetadataFileSystemReader(tmp_path).read_metadata() is not second
    CachedMetadataFileSystemReader.clear_metadata_cache()


def test_damaged_checkpoint_is_refused_when_asked(tmp_path, monkeypatch):
    """With verification on, a checkpoint with a flipped bit is not loaded."""
    request_for(state_of(1), tmp_path).execute_sync()
    path = tmp_path / "__0_0.distcp"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    state = state_of(0)
    monkeypatch.setenv("NVRX_CKPT_VERIFY_ON_LOAD", "1")
    with pytest.raises(dcp.api.CheckpointException, match="is not what was written"):
        dcp.load(state, storage_reader=CachedMetadataFileSystemReader(tmp_path))
    monkeypatch.setenv("NVRX_CKPT_VERIFY_ON_LOAD", "perhaps")
    with pytest.raises(ValueError, match="NVRX_CKPT_VERIFY_ON_LOAD"):
        CachedMetadataFileSystemReader(tmp_path)


def test_program_verifies_lists_and_compares(tmp_path, capsys):
    """The exit codes tell: whole, not whole, wrong usage, cannot tell; the output names tensors."""
    one, two, stock = tmp_path / "1", tmp_path / "2", tmp_path / "stock"
    request_for(state_of(1), one).execute_sync()
    request_for({**state_of(1), "layer2": torch.zeros(17, 102)}, two).execute_sync()
    dcp.save(state_of(1), storage_writer=dcp.FileSystemWriter(stock))
    assert main(["verify", str(one)]) == 0
    assert "whole (3 files" in capsys.readouterr().out
    assert main(["list", str(one), "--json"]) == 0
    names = {item["name"] for item in json.loads(capsys.readouterr().out)}
    assert names == set(state_of(1))
    assert main(["diff", str(one), str(one)]) == 0
    capsys.readouterr()
    assert main(["diff", str(one), str(two)]) == 1
    assert capsys.readouterr().out == "different: layer2\n"
    (stock / ".nvrx_manifest.0.json").touch()  # of a save that was killed before it replaced it
    assert main(["verify", str(stock)]) == 3
    assert main(["list", str(stock)]) == 3
    assert main(["verify", str(tmp_path / "missing")]) == 2
    data = (one / "__0_0.distcp").read_bytes()
    (one / "__0_0.distcp").write_bytes(data[:-1])
    capsys.readouterr()
    assert main(["verify", str(one)]) == 1
    assert f"{len(data) - 1} bytes instead of {len(data)}" in capsys.readouterr().out


def test_latest_names_only_what_is_complete(tmp_path):
    """The tracker never names a directory without metadata, as a file and as a link."""
    request_for(state_of(1), tmp_path / "10").execute_sync()
    (tmp_path / "20").mkdir()
    for link in (False, True):
        tracker = tmp_path / f"latest{link}"
        assert read_latest(tracker) is None
        publish_latest(tracker, "10", link=link)
        with pytest.raises(DamagedCheckpointError, match="20"):
            publish_latest(tracker, "20", link=link)
        assert read_latest(tracker) == "10"
    assert (tmp_path / "latestTrue" / ".metadata").exists()


def test_retention_keeps_the_newest_complete_one(tmp_path):
    """Old checkpoints go, those that are not complete do not count, and one always stays."""
    folders = [tmp_path / str(step) for step in range(5)]
    for folder in folders:
        folder.mkdir()
    for folder in folders[:3]:
        (folder / ".metadata").touch()
    assert remove_old(folders, keep=1) == [str(folder) for folder in folders[:2]]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "3", "4"]
    assert remove_old(folders[2:], keep=1) == []
    with pytest.raises(ValueError, match="keep"):
        remove_old(folders, keep=0)


def test_retention_takes_no_link_for_a_checkpoint(tmp_path):
    """A link counts for nothing and stays, and so does the checkpoint that it names."""
    for name in ("100", "200", "300"):
        (tmp_path / name).mkdir()
        (tmp_path / name / ".metadata").touch()
    publish_latest(tmp_path / "best", "100", link=True)
    publish_latest(tmp_path / "latest", "300", link=True)
    given = [str(tmp_path / name) for name in ("100", "200", "300", "best", "latest")]
    assert remove_old(given, keep=1) == [given[1]]
    for name in ("100", "300", "best", "latest"):
        assert (tmp_path / name / ".metadata").exists()


def test_shards_below_do_not_hide_a_damaged_checkpoint(tmp_path):
    """A DCP checkpoint is evaluated by its own manifest, whatever lies in directories below it."""
    request_for(state_of(1), tmp_path).execute_sync()
    LocalCheckpointManager(tmp_path / "local").save(BasicTensorAwareStateDict({}), 1)
    assert verify_checkpoint(tmp_path).files == 3
    assert_whole(tmp_path / "local")
    (tmp_path / "__0_0.distcp").unlink()
    assert "__0_0.distcp" in verify_checkpoint(tmp_path).problems[0]


def test_links_in_place_of_shards_are_problems(tmp_path, capsys):
    """A shard that is a link, also one to nothing, is named, and the others are checked."""
    manager = LocalCheckpointManager(tmp_path)
    manager.save(BasicTensorAwareStateDict({}), 1)
    for number, target in ((2, "nowhere"), (3, "iter_0000001_0_local.pt")):
        (manager.local_ckpt_dir / f"iter_000000{number}_0_local.pt").symlink_to(target)
    assert main(["verify", str(tmp_path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines[1:]] == [
        f"  0/iter_000000{number}_0_local.pt" for number in (2, 3)
    ]
    assert verify_checkpoint(tmp_path).items == 3


def test_shards_of_others_can_be_checked(tmp_path, capsys):
    """An administrator can check what belongs to a user, as nothing of it is loaded."""
    manager = LocalCheckpointManager(tmp_path)
    manager.save(BasicTensorAwareStateDict({"w": torch.ones(3)}), 1)
    shard = manager.local_ckpt_dir / "iter_0000001_0_local.pt"
    shard.chmod(0o666)
    if os.geteuid() == 0:
        os.chown(shard, 65534, 65534)
    assert main(["verify", str(tmp_path)]) == 0
    assert main(["list", str(tmp_path)]) == 0
    assert "state_dict['w']" in capsys.readouterr().out


def test_pipe_in_place_of_a_file_is_a_problem(tmp_path):
    """A file that was replaced by a pipe is named, and nobody waits for a writer."""
    request_for(state_of(1), tmp_path).execute_sync()
    (tmp_path / "__0_0.distcp").unlink()
    os.mkfifo(tmp_path / "__0_0.distcp")
    assert "not a regular file" in verify_checkpoint(tmp_path).problems[0]


@settings(max_examples=60, deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-9, 9) | st.floats() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=5), inner),
    ),
    st.sampled_from(["bytes", "crc32", "items", "files", "ranks", "metadata", "name", "row"]),
)
def test_foreign_manifest_is_damaged_and_nothing_else(value, field):
    """Whatever stands in a field of a manifest, evaluating the checkpoint raises nothing."""
    with tempfile.TemporaryDirectory() as folder:
        about = {"bytes": 1, "crc32": 1, "items": [["x", 0, 1, 1]]}
        rank = {"name": ".nvrx_manifest.0.json", "bytes": 9, "crc32": 9}
        content = {"metadata": {"bytes": 9, "crc32": 9}, "ranks": [rank]}
        files = {"file": about}
        if field in about:
            about[field] = value
        elif field == "name":
            rank["name"] = value
        elif field == "row":
            about["items"] = [value]
        elif field == "files":
            files = value
        else:
            content[field] = value
        write_manifest(f"{folder}/.nvrx_manifest.0.json", {"files": files})
        write_manifest(f"{folder}/.nvrx_manifest.json", content)
        assert not verify_checkpoint(folder).whole
        with contextlib.suppress(DamagedCheckpointError, OSError):
            checkpoint_items(folder)


def shown_by(load):
    """Return what a function writes to stderr, when that is a terminal."""
    ours, theirs = os.openpty()
    with os.fdopen(theirs, "w") as stream:
        with contextlib.redirect_stderr(stream):
            load()
        stream.write("END")
        stream.flush()
        text = ""
        while not text.endswith("END"):
            text += os.read(ours, 1 << 16).decode()
    os.close(ours)
    return text.removesuffix("END")


def test_long_loads_show_how_far_they_are(tmp_path, monkeypatch):
    """In a terminal rank 0 shows bytes, rate and rest of a load of either kind; others do not."""
    request_for(state_of(1), tmp_path / "dcp").execute_sync()
    manager = LocalCheckpointManager(tmp_path / "local")
    manager.save(BasicTensorAwareStateDict(state_of(1)), 1)
    manager.find_latest()
    monkeypatch.setattr(_progress, "LOAD_DELAY_S", 0.0)
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        for load in (
            lambda: dcp.load(
                state_of(0), storage_reader=CachedMetadataFileSystemReader(tmp_path / "dcp")
            ),
            manager.load,
        ):
            text = shown_by(load)
            assert ("s left" in text) == (rank == "0"), text
            assert rank == "1" or text.endswith("\r\x1b[K")
    CachedMetadataFileSystemReader.clear_metadata_cache()
