# SPDX-License-Identifier: Apache-2.0
"""One rank's shard file: what it holds, what changes are noticed, and what loading it may run."""

import errno
import json
import os
import pickle
import random
import stat
import tracemalloc
import zipfile
import zlib

import pytest
import torch
from local_ranks import state_of

from nvidia_resiliency_ext.checkpointing.__main__ import main
from nvidia_resiliency_ext.checkpointing._errors import CheckpointWriteError, DamagedCheckpointError
from nvidia_resiliency_ext.checkpointing._shard import layout
from nvidia_resiliency_ext.checkpointing._shard.directory import RankDirectory, ShardName
from nvidia_resiliency_ext.checkpointing._shard.job import SaveJob, run_save_job
from nvidia_resiliency_ext.checkpointing._shard.layout import ShardIdentity, place_records
from nvidia_resiliency_ext.checkpointing._shard.read import (
    FileSource,
    damage_of,
    read_manifest,
)
from nvidia_resiliency_ext.checkpointing._shard.write import ShardContent
from nvidia_resiliency_ext.checkpointing.local._load import load_state
from nvidia_resiliency_ext.checkpointing.local._pickling import (
    UnsafeSkeletonError,
    join_state,
    split_state,
)
from nvidia_resiliency_ext.checkpointing.local.basic_state_dict import BasicTensorAwareStateDict


def written(folder, state, iteration=1):
    parts = split_state(state)
    lengths = [storage.nbytes for storage in parts.storages]
    content = ShardContent(
        ShardIdentity(iteration, 0, "", 1),
        parts.state_class,
        parts.skeleton,
        tuple(zip(lengths, parts.names, strict=True)),
    )
    assert run_save_job(SaveJob(str(folder), "", 0, content), parts.storages) == ""
    return folder / "0" / f"iter_{iteration:07d}_0_local.pt"


def problems_of(path):
    source = FileSource(str(path))
    try:
        return list(damage_of(source, read_manifest(source)))
    except DamagedCheckpointError as error:
        return [error.problem]
    finally:
        source.close()


def test_torch_and_zip_tools_read_a_shard(tmp_path):
    """A shard loads with torch.load, also mapped, and passes the checks of zip tools."""
    path = written(tmp_path, BasicTensorAwareStateDict(state_of(0, 1)))
    for mapped in (False, True):
        state = torch.load(path, weights_only=False, mmap=mapped).state_dict
        assert torch.equal(state["weights"], state_of(0, 1)["weights"])
        assert state["tied"].data_ptr() == state["weights"].data_ptr()
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None


def test_the_same_state_gives_the_same_bytes(tmp_path):
    """Saving a state twice gives identical files."""
    state = BasicTensorAwareStateDict(state_of(0, 1))
    first, second = (written(tmp_path / name, state).read_bytes() for name in ("a", "b"))
    assert first == second


@pytest.mark.no_second_try
def test_every_flipped_bit_is_noticed(tmp_path):
    """No single bit of a shard can change without being noticed, wherever it lies."""
    state = BasicTensorAwareStateDict({"w": torch.arange(3.0), "b": torch.ones(2)})
    path = written(tmp_path, state)
    whole = path.read_bytes()
    assert problems_of(path) == []
    bits = list(range(len(whole) * 8))
    for bit in random.Random(1).sample(bits, 2000):
        data = bytearray(whole)
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
        assert problems_of(path), f"bit {bit} changed unnoticed"


@pytest.mark.no_second_try
def test_every_cut_is_noticed_by_the_end_of_the_file(tmp_path):
    """A shard cut anywhere has no manifest, so it never counts as present."""
    path = written(tmp_path, BasicTensorAwareStateDict(state_of(0, 1)))
    size = path.stat().st_size
    for length in [0, 1, 35, 36, *random.Random(2).sample(range(size), 200), size - 1]:
        os.truncate(path, length)
        source = FileSource(str(path))
        with pytest.raises(DamagedCheckpointError):
            read_manifest(source)
        source.close()


def test_damage_names_the_tensor(tmp_path):
    """A report says which tensor of the state has changed."""
    state = BasicTensorAwareStateDict({"model": {"w": torch.zeros(1000)}})
    path = written(tmp_path, state)
    data = bytearray(path.read_bytes())
    data[1500] ^= 1
    path.write_bytes(data)
    (problem,) = problems_of(path)
    assert "state_dict['model']['w']" in problem


def foreign(folder, records, nbytes=64):
    """Write a file that ends as a shard does, with these records in its manifest."""
    about = {
        "format": "nvrx-local-shard", "version": 1, "state_class": "x", "records": records,
        "identity": {"iteration": 1, "owner": 0, "session_id": "", "world_size": 1},
    }  # fmt: skip
    text = json.dumps(about).encode()
    total = nbytes + len(text) + layout.FOOTER_BYTES
    end = (total, nbytes, len(text), zlib.crc32(text))
    path = folder / "iter_0000001_0_local.pt"
    with path.open("wb") as file:
        file.seek(nbytes)
        file.write(text + layout._FOOTER.pack(layout._FOOTER_MAGIC, *end))
    path.chmod(0o600)  # what others may write to is refused for that
    return path


@pytest.mark.parametrize(
    "record",
    [
        ["\ud800", 0, 8, "0", ""],
        ["x" * 70_000, 0, 8, "0", ""],
        ["data.pkl", 0, 8, "-1", ""],
        ["data.pkl", 0, 8, "fffffffff", ""],
        ["data.pkl", 0, 8, "no number", ""],
        ["data.pkl", 1 << 80, 8, "0", ""],
        ["data.pkl", 0, 8, "0", "\ud800\x1b[31m"],
        ["data.pkl"],
        None,
    ],
    ids=range(9),
)
def test_what_a_foreign_manifest_says_is_a_problem_in_one_line(tmp_path, record, capsys):
    """Whatever stands in a record, the program says that the shard is not whole, and where."""
    path = foreign(tmp_path, [record])
    assert main(["verify", str(tmp_path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert all(path.name in line and line.isprintable() for line in lines[1:])
    assert main(["list", str(tmp_path)]) in {0, 1}
    assert capsys.readouterr().err.count("\n") <= 1


def test_a_check_takes_little_memory(tmp_path):
    """However large a record is, only a piece of it is in memory while it is checked."""
    path = foreign(tmp_path, [["data.pkl", 64, 200 << 20, "0", "w"]], nbytes=201 << 20)
    tracemalloc.start()
    try:
        assert problems_of(path)[0] == "w (data.pkl) has changed: wrong checksum"
        assert tracemalloc.get_traced_memory()[1] < 20 << 20
    finally:
        tracemalloc.stop()


def test_records_beyond_4_gib_have_their_place():
    """Records of more than 4 GiB, and behind them, get the fields that zip needs for them."""
    records = place_records([("data/0", 5 << 30, ""), ("data/1", 8, "")])
    assert [record.offset % 64 for record in records] == [0, 0]
    assert records[1].offset >= records[0].offset + records[0].nbytes


def test_no_foreign_code_runs_for_our_own_class(tmp_path):
    """A skeleton that names a function which is not on the list is refused before it runs."""

    class Payload:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "made"),)

    state = BasicTensorAwareStateDict({})
    state.state_dict["x"] = Payload()
    with pytest.raises(UnsafeSkeletonError, match="mkdir"):
        join_state(pickle.dumps(state, 2), [], any_name=False)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "leaf", [lambda: 0, open, ValueError("x")], ids=["lambda", "builtin", "error"]
)
def test_what_could_not_be_loaded_is_refused_when_saved(leaf):
    """A value whose type could not be loaded again is refused, and the message says where it is."""
    with pytest.raises(TypeError, match=r"state_dict\['a'\]\[1\]"):
        split_state(BasicTensorAwareStateDict({"a": [1, leaf]}))


class Unlisted(BasicTensorAwareStateDict):
    """A state of a class of the user's own."""


def test_strict_loading_refuses_other_classes(tmp_path):
    """A state of the user's own class loads by default, and not with the strict policy."""
    path = written(tmp_path, Unlisted(state_of(0, 1)))
    for strict in (False, True):
        source = FileSource(str(path))
        manifest = read_manifest(source)
        if strict:
            with pytest.raises(UnsafeSkeletonError):
                load_state(manifest, [source], strict=True)
        else:
            assert load_state(manifest, [source], strict=False).state_dict["step"] == 1
        source.close()


class OutOfMemoryOnce(FileSource):
    """A file whose first read of a whole record finds no memory."""

    has_failed = False

    def read_into(self, position, target):
        if not self.has_failed and target.nbytes > 1000:
            self.has_failed = True
            raise MemoryError
        super().read_into(position, target)


def test_no_record_is_left_out(tmp_path):
    """Whatever ends a read, the state is whole or an error: never memory that nobody filled."""
    path = written(tmp_path, BasicTensorAwareStateDict(state_of(0, 1)))
    source = OutOfMemoryOnce(str(path))
    with pytest.raises(MemoryError):
        load_state(read_manifest(source), [source], strict=True)
    other = FileSource(str(path))
    source.has_failed = False
    state = load_state(read_manifest(source), [source, other], strict=True)
    assert torch.equal(state.state_dict["weights"], state_of(0, 1)["weights"])
    source.close()
    other.close()


def test_files_of_others_and_links_are_not_read(tmp_path):
    """A shard that others could write to, or that is a symbolic link, is not read."""
    path = written(tmp_path, BasicTensorAwareStateDict(state_of(0, 1)))
    link = path.with_name("iter_0000002_0_local.pt")
    link.symlink_to(path)
    with pytest.raises(OSError, match=r"Too many levels|symbolic"):
        FileSource(str(link))
    path.chmod(0o666)
    with pytest.raises(PermissionError, match="others may write"):
        FileSource(str(path))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to somebody else")
def test_files_and_directories_of_another_user_are_not_used(tmp_path):
    """What belongs to somebody else is neither read nor written to nor removed."""
    path = written(tmp_path, BasicTensorAwareStateDict(state_of(0, 1)))
    os.chown(path, 65534, 65534)
    with pytest.raises(PermissionError, match="belongs to uid 65534"):
        FileSource(str(path))
    directory = RankDirectory(tmp_path / "other", "", 0)
    directory.ensure()
    (tmp_path / "other" / "0" / "iter_0000001_0_local.pt").write_bytes(b"theirs")
    os.chown(directory.path, 65534, 65534)
    name = ShardName(1, 0)
    for use in (
        directory.names,
        lambda: directory.create(2, 0),
        lambda: directory.remove([name]),
        lambda: directory.source(name),
        directory.remove_leftovers,
    ):
        with pytest.raises(OSError, match="belongs to uid 65534"):
            use()
    assert os.listdir(directory.path) == [str(name)]


def test_a_directory_that_others_can_write_to_is_not_used(tmp_path):
    """Neither reading nor writing trusts a directory with open permissions."""
    directory = RankDirectory(tmp_path, "", 0)
    directory.ensure()
    os.chmod(directory.path, 0o777)
    with pytest.raises(OSError, match="others may write"):
        directory.names()
    with pytest.raises(OSError, match="others may write"):
        directory.create(1, 0)


def test_a_living_writer_keeps_its_file_and_a_dead_one_does_not(tmp_path):
    """A file in progress is removed once its writer is gone, and not before."""
    directory = RankDirectory(tmp_path, "", 0)
    living = directory.create(7, 0)
    assert directory.remove_leftovers() == []
    with pytest.raises(OSError, match="living process"):
        directory.create(7, 0)
    assert [str(name) for name in directory.names()] == ["iter_0000007_0_local.dirty.pt"]
    living.discard()
    (tmp_path / "0" / "iter_0000007_0_local.dirty.pt").write_bytes(b"half")
    directory.create(7, 0).publish()
    assert [str(name) for name in directory.names()] == ["iter_0000007_0_local.pt"]


def test_a_session_cannot_lead_out_of_the_root(tmp_path):
    """A session id with .. is refused."""
    with pytest.raises(OSError, match="leads out"):
        RankDirectory(tmp_path, "../other", 0)


def test_a_name_that_is_not_durable_is_taken_back(tmp_path, monkeypatch):
    """When the directory cannot be synced after the rename, what is left only says why."""
    directory = RankDirectory(tmp_path, "", 0)
    shard = directory.create(1, 0)
    shard.write(0, memoryview(b"content"))
    real = os.fsync

    def fail_for_directories(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EIO, "the disk is gone")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fail_for_directories)
    with pytest.raises(CheckpointWriteError, match="the disk is gone"):
        shard.publish()
    assert os.listdir(tmp_path / "0") == ["iter_0000001_0_local.dirty.pt"]
    shard.discard(note="so that the trainer can say why")
    assert directory.remove_leftovers() == ["so that the trainer can say why"]
    assert os.listdir(tmp_path / "0") == []
