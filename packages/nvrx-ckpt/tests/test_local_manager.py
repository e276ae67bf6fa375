# SPDX-License-Identifier: Apache-2.0
"""Saving, finding and loading local checkpoints on one rank and on two."""

import contextlib
import itertools
import logging
import mmap
import os
import pickle
import random
import shutil
import subprocess
import sys
import threading
import time

import no_threads
import numpy as np
import pytest
import torch
import torch.distributed as dist
from local_ranks import assert_state, damage, find_and_load, is_state, save_all, started, state_of
from results import no_second_try

from nvidia_resiliency_ext.checkpointing._shard import directory as directory_module
from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncCallsQueue
from nvidia_resiliency_ext.checkpointing.local._pickling import split_state
from nvidia_resiliency_ext.checkpointing.local.base_state_dict import TensorAwareStateDict
from nvidia_resiliency_ext.checkpointing.local.basic_state_dict import BasicTensorAwareStateDict
from nvidia_resiliency_ext.checkpointing.local.ckpt_managers import local_manager
from nvidia_resiliency_ext.checkpointing.local.ckpt_managers._agreement import (
    Held,
    latest_iteration,
)
from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.base_manager import (
    CheckpointingException,
)
from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager import (
    LocalCheckpointManager,
)

# The first test of this module waits for the ranks, which import torch.
pytestmark = pytest.mark.timeout(150)


@pytest.fixture(scope="module")
def two_ranks(fork_server):
    """Two rank processes that serve all tests of this module."""
    with started(fork_server, 2) as ranks:
        yield ranks


def saved(folder, *iterations, **options):
    manager = LocalCheckpointManager(folder, **options)
    save_more(manager, *iterations)
    return manager


def save_more(manager, *iterations):
    for iteration in iterations:
        manager.save(BasicTensorAwareStateDict(state_of(0, iteration)), iteration)


def files(folder, rank=0):
    """Return the names of all files in a rank's directory."""
    return sorted(os.listdir(folder / str(rank)))


def test_a_saved_state_is_found_and_loaded(tmp_path):
    """What was saved is loaded bit for bit by a new manager, and tied tensors are still tied."""
    saved(tmp_path / "not" / "yet", 1, 2)
    manager = LocalCheckpointManager(tmp_path / "not" / "yet")
    with no_second_try():
        assert manager.find_latest() == 2
        state, ckpt_id = manager.load()
        assert ckpt_id == (2, 0, "")
        assert_state(state, 0, 2)
        found = state.state_dict
        assert found["tied"].data_ptr() == found["weights"].data_ptr()
        assert found["view"].data_ptr() == found["weights"][10:].data_ptr()
    assert files(tmp_path / "not" / "yet") == ["iter_0000002_0_local.pt"]


def test_nothing_is_found_where_nothing_was_saved(tmp_path):
    """An empty directory gives -1, and loading without a checkpoint is an error."""
    manager = LocalCheckpointManager(tmp_path)
    assert manager.find_latest() == -1
    with pytest.raises(CheckpointingException, match="find_latest"):
        manager.load()


def test_names_of_files(tmp_path):
    """File names and ids are translated both ways; numbers of more than 7 digits work."""
    manager = LocalCheckpointManager(tmp_path, session_id="s")
    assert manager._filename_from_template(5, 3) == "iter_0000005_3_local.pt"
    assert manager._filename_from_template("*", "*", ".dirty") == "iter_*_*_local.dirty.pt"
    assert manager._filename_to_id("iter_123456789_3_local.pt") == (123456789, 3, "s")
    path = manager._local_ckpt_path_from_id((5, 3, "s"), is_dirty=True)
    assert path == tmp_path / "s" / "0" / "iter_0000005_3_local.dirty.pt"
    with pytest.raises(CheckpointingException, match="negative"):
        manager._ckpt_id(-1)
    manager.save(BasicTensorAwareStateDict(state_of(0, 1)), 123456789)
    assert LocalCheckpointManager(tmp_path, session_id="s").find_latest() == 123456789


def test_iterations_must_grow(tmp_path):
    """An iteration that is not after the last one is refused."""
    manager = saved(tmp_path, 5)
    with pytest.raises(AssertionError, match="iteration 5"):
        manager.save(BasicTensorAwareStateDict({}), 5)


def test_iterations_may_be_numbers_of_numpy_and_torch(tmp_path):
    """An element of an array or a tensor names the file as a plain number does; 3.5 is refused."""
    manager = LocalCheckpointManager(tmp_path)
    for number in (np.int64(1), torch.tensor(2)):
        manager.save(BasicTensorAwareStateDict(state_of(0, int(number))), number)
        assert files(tmp_path) == [f"iter_000000{int(number)}_0_local.pt"]
    with pytest.raises(TypeError):
        manager.save(BasicTensorAwareStateDict({}), 3.5)
    with no_second_try():
        assert find_and_load(0, 1, tmp_path) == (2, 2, True)


def test_a_shard_is_written_over_the_file_of_one_that_nobody_needs(tmp_path):
    """The third save needs no new file, and whatever its length what it wrote is loaded."""
    manager = LocalCheckpointManager(tmp_path)
    inodes = []
    for iteration, elements in enumerate((5_000, 400_000, 5_000, 300), start=1):
        state = BasicTensorAwareStateDict(state_of(0, iteration, elements))
        manager.save(state, iteration)
        path = tmp_path / "0" / f"iter_{iteration:07d}_0_local.pt"
        inodes.append(path.stat().st_ino)
        assert files(tmp_path) == [path.name]
        latest = LocalCheckpointManager(tmp_path)
        assert latest.find_latest() == iteration
        assert_state(latest.load()[0], 0, iteration, elements)
    assert inodes[2:] == inodes[:2]
    assert inodes[0] != inodes[1]


@pytest.mark.parametrize("how", ["opened", "mapped", "linked"])
def test_a_file_that_somebody_uses_is_not_written_over(tmp_path, how):
    """Who has an old shard open or mapped while others are saved, or has linked it, keeps it."""
    manager = saved(tmp_path / "c", 1, 2)
    path = tmp_path / "c" / "0" / "iter_0000002_0_local.pt"
    before = path.read_bytes()
    with contextlib.ExitStack() as stack:
        if how == "linked":
            (tmp_path / "linked").hardlink_to(path)
            file = stack.enter_context((tmp_path / "linked").open("rb"))
            file.close()
        else:
            file = stack.enter_context(path.open("rb"))
        if how == "mapped":
            mapped = stack.enter_context(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))
            file.close()
        save_more(manager, 3, 4, 5)
        if how == "opened":
            after = file.read()
        else:
            after = mapped[:] if how == "mapped" else (tmp_path / "linked").read_bytes()
    assert after == before
    assert find_and_load(0, 1, tmp_path / "c")[0] == 5


def test_a_shard_does_not_inherit_what_others_may_do_with_an_old_one(tmp_path):
    """A file that was opened to other users is not used again for a shard of ours."""
    manager = saved(tmp_path, 1)
    (tmp_path / "0" / "iter_0000001_0_local.pt").chmod(0o644)
    save_more(manager, 2, 3)
    found = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert [path.stat().st_mode & 0o777 for path in found] == [0o600, 0o600]


def test_a_save_that_fails_gives_the_spare_files_up(tmp_path):
    """What space they took is there for the next attempt."""
    manager = saved(tmp_path, 1, 2)
    (tmp_path / ".spare_0_7").write_bytes(b"of a rank whose copies went elsewhere since")
    (tmp_path / ".spare_00_7").write_bytes(b"of another rank")
    with pytest.raises(CheckpointingException):
        manager.save(BasicTensorAwareStateDict({"bad": threading.Lock()}), 3)
    assert files(tmp_path) == ["iter_0000002_0_local.pt"]
    assert sorted(os.listdir(tmp_path)) == [".spare_00_7", "0"]
    manager.close()


def test_where_no_spare_file_can_be_kept_old_shards_go(tmp_path, caplog):
    """What cannot be moved beside the rank's directory is removed, and each save is right."""
    (tmp_path / ".spare_0_0").mkdir()
    saved(tmp_path, 1, 2, 3)
    assert files(tmp_path) == ["iter_0000003_0_local.pt"]
    assert sorted(os.listdir(tmp_path)) == [".spare_0_0", "0"]
    with no_second_try():
        assert find_and_load(0, 1, tmp_path) == (3, 3, True)
    assert "cannot be removed" not in caplog.text


def test_older_iterations_are_kept_on_request(tmp_path):
    """`keep_last` complete iterations stay; a damaged newest one falls back to the one before."""
    saved(tmp_path, 1, 2, 3, keep_last=2)
    assert files(tmp_path) == ["iter_0000002_0_local.pt", "iter_0000003_0_local.pt"]
    damage(tmp_path / "0" / "iter_0000003_0_local.pt", "bit flip")
    manager = LocalCheckpointManager(tmp_path)
    assert manager.find_latest() == 3
    state, ckpt_id = manager.load()
    assert ckpt_id[0] == 2
    assert_state(state, 0, 2)


def test_as_many_iterations_are_kept_as_were_asked_for(tmp_path):
    """With `keep_last=5` the five newest of eight iterations stay, and all of the first few."""
    for last, kept in ((3, [1, 2, 3]), (8, [4, 5, 6, 7, 8])):
        folder = tmp_path / str(last)
        saved(folder, *range(1, last + 1), keep_last=5)
        assert files(folder) == [f"iter_{number:07}_0_local.pt" for number in kept]


def test_a_damaged_only_shard_is_an_error_and_then_missing(tmp_path):
    """When nothing can be loaded that is said, and the damaged file is not offered again."""
    saved(tmp_path, 1)
    damage(tmp_path / "0" / "iter_0000001_0_local.pt", "bit flip")
    manager = LocalCheckpointManager(tmp_path)
    assert manager.find_latest() == 1
    with pytest.raises(CheckpointingException, match="iteration 1 is damaged"):
        manager.load()
    assert LocalCheckpointManager(tmp_path).find_latest() == -1


@pytest.mark.parametrize("name", ["iter_0000009_0_local.pt", "iter_0000009_0_local.bak.pt", "x"])
def test_files_of_others_are_ignored(tmp_path, name):
    """Empty files, and files with other names, are not taken for shards."""
    manager = saved(tmp_path, 1)
    (manager.local_ckpt_dir / name).touch(mode=0o600)
    assert LocalCheckpointManager(tmp_path).find_latest() == 1


def test_directories_with_the_names_of_shards_hold_up_one_save_each(tmp_path):
    """A directory in the place of a shard, or of one in progress, fails the save of that name."""
    manager = saved(tmp_path, 1)
    for name in ("iter_0000002_0_local.pt", "iter_0000003_0_local.dirty.pt"):
        (tmp_path / "0" / name).mkdir()
    for iteration in (2, 3):
        path = f"{tmp_path}/0/iter_000000{iteration}_0_local.pt"
        with pytest.raises(CheckpointingException, match=f"'{path}': .*Is a directory"):
            manager.save(BasicTensorAwareStateDict(state_of(0, iteration)), iteration)
        with no_second_try():
            assert find_and_load(0, 1, tmp_path) == (1, 1, True)
    save_more(manager, 4, 5)
    with no_second_try():
        assert find_and_load(0, 1, tmp_path) == (5, 5, True)
    manager.close()


@pytest.mark.parametrize("change", ["session", "name", "rank"])
def test_shards_of_another_place_are_not_taken(tmp_path, change, caplog):
    """A shard of another session, iteration or owner is not used under the name of ours."""
    saved(tmp_path, 1, session_id="old")
    source = tmp_path / "old" / "0" / "iter_0000001_0_local.pt"
    session = "new" if change == "session" else "old"
    target = {
        "session": "iter_0000001_0_local.pt",
        "name": "iter_0000002_0_local.pt",
        "rank": "iter_0000001_1_local.pt",
    }[change]
    folder = tmp_path / session / "0"
    folder.parent.mkdir(mode=0o700, exist_ok=True)  # where others may write nothing is taken
    folder.mkdir(mode=0o700, exist_ok=True)
    os.rename(source, folder / target)
    assert LocalCheckpointManager(tmp_path, session_id=session).find_latest() == -1
    assert "saved with" in caplog.text


def test_a_killed_writers_rest_does_not_hinder(tmp_path):
    """A file in progress that a killed run left is replaced, and gone when the save is done."""
    saved(tmp_path, 4)
    (tmp_path / "0" / "iter_0000005_0_local.dirty.pt").write_bytes(b"half")
    saved(tmp_path, 5)
    assert files(tmp_path) == ["iter_0000005_0_local.pt"]


@pytest.mark.no_second_try
def test_the_previous_checkpoint_survives_a_failed_save(tmp_path, monkeypatch, caplog):
    """A `_save` that raises or does nothing fails the save and leaves what was there before."""
    manager = saved(tmp_path, 1)
    original = LocalCheckpointManager._save

    def raises(self, state_dict, ckpt_id):
        raise RuntimeError("on purpose")

    def does_nothing(self, state_dict, ckpt_id):
        pass

    for replacement in (raises, does_nothing):
        monkeypatch.setattr(LocalCheckpointManager, "_save", replacement)
        with pytest.raises(CheckpointingException, match=r"iteration 2 .*(purpose|not there)"):
            manager.save(BasicTensorAwareStateDict(state_of(0, 2)), 2)
        assert files(tmp_path) == ["iter_0000001_0_local.pt"]
    calls = []

    def counts(self, state_dict, ckpt_id):
        calls.append(ckpt_id)
        original(self, state_dict, ckpt_id)

    monkeypatch.setattr(LocalCheckpointManager, "_save", counts)
    with caplog.at_level(logging.INFO):
        manager.save(BasicTensorAwareStateDict(state_of(0, 2)), 2)
    assert calls == [(2, 0, "")]
    assert "iter_0000002_0_local.pt" in caplog.text
    manager.close()  # what was logged keeps it alive, and with it the lock of its directory


def test_an_unpicklable_state_is_an_error_that_names_it(tmp_path):
    """A state that cannot be saved is refused with its place, and the directory stays as it was."""
    manager = saved(tmp_path, 1)
    with pytest.raises(CheckpointingException, match=r"state_dict\['f'\]"):
        manager.save(BasicTensorAwareStateDict({"f": lambda: 0}), 2)
    assert files(tmp_path) == ["iter_0000001_0_local.pt"]
    manager.close()


class HalfState(TensorAwareStateDict):
    """A state that can only be moved to the CPU and back."""

    def __init__(self, value):
        self.value = value

    def pop_tensors(self):
        raise NotImplementedError

    tensors = property(pop_tensors)

    def is_hollow(self):
        raise NotImplementedError

    def insert_tensors(self, tensor_data):
        raise NotImplementedError

    def init_tensors(self):
        raise NotImplementedError

    def copy_tensors_to_cpu(self, non_blocking=False):  # noqa: ARG002
        self.where = "cpu"

    def restore_tensor_device(self, non_blocking=True):  # noqa: ARG002
        self.where = "device"


def test_a_class_of_the_users_own_needs_little(tmp_path):
    """Without replication only the moves to the CPU and back are asked of a state."""
    manager = LocalCheckpointManager(tmp_path)
    manager.save(HalfState({"x": torch.arange(3)}), 1)
    manager = LocalCheckpointManager(tmp_path)
    manager.find_latest()
    state, _ = manager.load()
    assert state.where == "device"
    assert torch.equal(state.value["x"], torch.arange(3))


def test_rank_without_process_group_is_zero_with_a_warning(tmp_path):
    """Without torch.distributed the rank is 0, and that is said."""
    manager = LocalCheckpointManager(tmp_path)
    with pytest.warns(UserWarning, match="not initialized"):
        assert manager.rank == 0


def test_latest_iteration_is_what_every_rank_can_be_given():
    """For all small cases the decision is the largest iteration whose shards all ranks can get."""
    shards = [(1, 0), (1, 1), (2, 0), (2, 1)]
    subsets = [frozenset(c) for n in range(5) for c in itertools.combinations(shards, n)]
    for first, second in itertools.product(subsets, subsets):
        for together in (False, True):
            held = [Held(0, first), Held(0 if together else 1, second)]
            expected = -1
            for iteration in (1, 2):
                reach = [first | second] * 2 if together else [first, second]
                if all((iteration, rank) in reach[rank] for rank in range(2)):
                    expected = iteration
            assert latest_iteration(held) == expected


@pytest.mark.no_second_try
@pytest.mark.parametrize("repl", [False, True], ids=["alone", "replicas"])
@pytest.mark.parametrize(
    "kind", ["bit flip", "truncated", "zero length", "missing", "foreign session", "wrong rank"]
)
def test_bad_shards_lead_to_right_data_or_an_agreed_older_iteration(
    two_ranks, tmp_path, kind, repl
):
    """Whatever happens to a rank's newest shard, all ranks load the same iteration, bit for bit."""
    two_ranks.run(save_all, tmp_path, [1, 2], repl, {"keep_last": 2})
    path = tmp_path / "1" / "iter_0000002_1_local.pt"
    if kind == "foreign session":
        two_ranks.run(save_all, tmp_path, [2], False, {"session_id": "other"})
        os.replace(tmp_path / "other" / "1" / path.name, path)
    elif kind == "wrong rank":
        path.write_bytes((tmp_path / "0" / "iter_0000002_0_local.pt").read_bytes())
    else:
        damage(path, kind)
    answers = two_ranks.run(find_and_load, tmp_path, repl, {"keep_last": 2})
    wanted = 2 if repl else 1
    assert [(loaded, right) for _, loaded, right in answers] == [(wanted, True)] * 2


def fails_on_one_rank(rank, world, root, how):
    from unittest import mock

    manager = LocalCheckpointManager(root)
    manager.save(BasicTensorAwareStateDict(state_of(rank, 1)), 1)
    original = LocalCheckpointManager._save

    def silent(self, state_dict, ckpt_id):
        if rank != 1:
            original(self, state_dict, ckpt_id)

    def raises(self, state_dict, ckpt_id):
        if rank == 1:
            raise RuntimeError("on purpose")
        original(self, state_dict, ckpt_id)

    state = {"silent": state_of(rank, 2), "raises": state_of(rank, 2), "state": {}}[how]
    if how == "state" and rank == 1:
        state = {"f": lambda: 0}
    replaced = {"silent": silent, "raises": raises, "state": original}[how]
    with mock.patch.object(LocalCheckpointManager, "_save", replaced):
        try:
            manager.save(BasicTensorAwareStateDict(state), 2)
        except CheckpointingException as error:
            text = str(error)
        else:
            text = "no error"
    return text, files(manager.local_ckpt_dir.parent, rank)


@pytest.mark.no_second_try
@pytest.mark.parametrize("how", ["silent", "raises", "state"])
def test_a_save_that_fails_on_one_rank_fails_on_all(two_ranks, tmp_path, how):
    """All ranks raise, the text names the rank, and all still have the iteration before."""
    answers = two_ranks.run(fails_on_one_rank, tmp_path, how)
    for rank, (text, names) in enumerate(answers):
        assert "rank 1: " in text
        assert "rank 0: " not in text
        assert names == [f"iter_0000001_{rank}_local.pt"]


def load_without_device(rank, world, root):
    from unittest import mock

    def restore(self, non_blocking=True):
        if rank == 1:
            raise RuntimeError("out of device memory")

    manager = LocalCheckpointManager(root)
    found = manager.find_latest()
    with mock.patch.object(BasicTensorAwareStateDict, "restore_tensor_device", restore):
        try:
            manager.load()
        except CheckpointingException as error:
            text = str(error)
        else:
            text = "no error"
    state, _ = manager.load()
    return found, text, is_state(state, rank, found)


def test_a_device_that_fails_on_one_rank_is_an_error_on_all(two_ranks, tmp_path):
    """All ranks raise when one cannot put its tensors on its device; the files stay good."""
    two_ranks.run(save_all, tmp_path, [1])
    for found, text, right in two_ranks.run(load_without_device, tmp_path):
        assert (found, right) == (1, True)
        assert "rank 1: RuntimeError: out of device memory" in text
        assert "rank 0" not in text


def save_different(rank, world, root):
    manager = LocalCheckpointManager(root)
    try:
        manager.save(BasicTensorAwareStateDict(state_of(rank, 1)), 1 + rank)
    except CheckpointingException as error:
        return str(error)
    return "no error"


def test_ranks_that_save_different_iterations_are_told(two_ranks, tmp_path):
    """Different iterations on the ranks are an error on all of them."""
    assert all("different iterations" in text for text in two_ranks.run(save_different, tmp_path))


def test_another_world_size_is_noticed(two_ranks, tmp_path, caplog):
    """A checkpoint of two ranks is not taken for one of a world with one rank."""
    two_ranks.run(save_all, tmp_path, [1])
    assert LocalCheckpointManager(tmp_path).find_latest() == -1
    assert "world_size 2" in caplog.text


@pytest.mark.no_second_try
def test_a_stale_shard_of_an_earlier_attempt_is_never_mixed_in(two_ranks, tmp_path):
    """What an interrupted attempt left of an iteration is gone before a new attempt begins."""
    two_ranks.run(save_all, tmp_path, [1])
    stale = tmp_path / "stale"
    two_ranks.run(save_all, stale, [2])
    # Rank 0 has a whole shard of iteration 2 from an earlier attempt, rank 1 has not.
    os.replace(stale / "0" / "iter_0000002_0_local.pt", tmp_path / "0" / "iter_0000002_0_local.pt")
    answers = two_ranks.run(fails_on_one_rank_again, tmp_path)
    assert all("rank 0" in text for text in answers)
    assert [found for found, _, _ in two_ranks.run(find_and_load, tmp_path)] == [1, 1]


def fails_on_one_rank_again(rank, world, root):
    from unittest import mock

    manager = LocalCheckpointManager(root)
    manager.find_latest()
    original = LocalCheckpointManager._save

    def silent(self, state_dict, ckpt_id):
        if rank != 0:
            original(self, state_dict, ckpt_id)

    with mock.patch.object(LocalCheckpointManager, "_save", silent):
        try:
            manager.save(BasicTensorAwareStateDict(state_of(rank, 2)), 2)
        except CheckpointingException as error:
            return str(error)
    return "no error"


# Saves in an endless row, in a process that imports no torch and starts in a moment.
KILLED = """
import pickle, sys
from nvidia_resiliency_ext.checkpointing._shard.job import SaveJob, run_save_job
from nvidia_resiliency_ext.checkpointing._shard.layout import ShardIdentity
from nvidia_resiliency_ext.checkpointing._shard.write import ShardContent
root, first, path = sys.argv[1], int(sys.argv[2]), sys.argv[3]
with open(path, "rb") as file:
    state_class, skeleton, nbytes = pickle.load(file)
for iteration in range(first, first + 100000):
    identity = ShardIdentity(iteration, 0, "", 1)
    content = ShardContent(identity, state_class, skeleton, ((nbytes, ""),))
    assert not run_save_job(SaveJob(root, "", 0, content), [bytes([iteration % 251]) * nbytes])
"""


@pytest.mark.no_second_try
def test_a_writer_killed_at_any_moment_leaves_a_checkpoint_that_loads(tmp_path):
    """After SIGKILL at random moments the newest checkpoint is found and is right, bit for bit."""
    nbytes = 300000
    parts = split_state(BasicTensorAwareStateDict({"w": torch.zeros(nbytes, dtype=torch.uint8)}))
    prepared = tmp_path / "prepared"
    prepared.write_bytes(pickle.dumps((parts.state_class, parts.skeleton, nbytes)))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    choice = random.Random(3)
    last = 0
    for _ in range(12):
        arguments = [str(tmp_path / "root"), str(last + 1), str(prepared)]
        with subprocess.Popen(
            [sys.executable, "-c", KILLED, *arguments], env=environment
        ) as process:
            deadline = time.monotonic() + 40
            while not any(int(name[5:12]) > last for name in names(tmp_path / "root")):
                assert time.monotonic() < deadline
                time.sleep(0.001)
            time.sleep(choice.random() * 0.02)
            process.kill()
        manager = LocalCheckpointManager(tmp_path / "root")
        found = manager.find_latest()
        assert found > last
        last = found
        state, ckpt_id = manager.load()
        assert ckpt_id[0] == last
        assert bool((state.state_dict["w"] == last % 251).all())


def names(folder):
    try:
        return [n for n in os.listdir(folder / "0") if n.endswith("_0_local.pt")]
    except FileNotFoundError:
        return []


def load_and_save_again(rank, world, root):
    m = LocalCheckpointManager(root, keep_last=2)
    m.find_latest()
    _, (loaded, _, _) = m.load()
    m.save(BasicTensorAwareStateDict(state_of(rank, 4)), 4)
    return loaded, files(m.local_ckpt_dir.parent, rank)


def test_a_damaged_iteration_does_not_count_as_kept(two_ranks, tmp_path):
    """What one rank cannot load takes no place among the iterations that are kept."""
    two_ranks.run(save_all, tmp_path, [1, 2, 3], False, {"keep_last": 2})
    damage(tmp_path / "1" / "iter_0000003_1_local.pt", "bit flip")
    for rank, (loaded, listing) in enumerate(two_ranks.run(load_and_save_again, tmp_path)):
        assert loaded == 2
        assert listing == [f"iter_000000{i}_{rank}_local.pt" for i in (2, 4)]


def test_where_no_thread_can_start_states_are_loaded_and_old_ones_go(tmp_path, monkeypatch):
    """Without another thread this one reads the shard, and removes what is no longer needed."""
    manager = saved(tmp_path, 1)
    queue = AsyncCallsQueue(persistent=False)
    state = BasicTensorAwareStateDict(state_of(0, 2))
    queue.schedule_async_request(manager.save(state, 2, is_async=True))
    queue._get_async_caller().wait(queue.async_calls[0], 60)
    with monkeypatch.context() as patch:
        no_threads.refuse(patch)
        assert queue.maybe_finalize_async_calls(blocking=True) == [0]
        assert files(tmp_path) == ["iter_0000002_0_local.pt"]
        assert manager.find_latest() == 2
        assert_state(manager.load()[0], 0, 2)
    queue.close()


def test_a_shard_that_could_not_be_loaded_once_can_be_loaded_later(tmp_path, monkeypatch):
    """What lacks memory is an error and no damage: the shard keeps its name."""
    saved(tmp_path, 1)

    def no_memory(*_, **__):
        raise MemoryError("no memory")

    manager = LocalCheckpointManager(tmp_path)
    manager.find_latest()
    with monkeypatch.context() as patch:
        patch.setattr(local_manager, "load_state", no_memory)
        with pytest.raises(CheckpointingException, match="iteration 1"):
            manager.load()
    assert manager.find_latest() == 1
    assert_state(manager.load()[0], 0, 1)


def test_a_directory_that_hangs_does_not_hold_up_the_end(tmp_path, monkeypatch, caplog):
    """`close` waits for the removal of old shards for a limited time, and says that it goes on."""
    over = threading.Event()
    monkeypatch.setattr(local_manager, "_CLOSE_S", 0.2)
    monkeypatch.setattr(LocalCheckpointManager, "_cleanup", lambda *_: over.wait(100))
    manager, queue = LocalCheckpointManager(tmp_path), AsyncCallsQueue(persistent=False)
    request = manager.save(BasicTensorAwareStateDict(state_of(0, 1)), 1, is_async=True)
    queue.schedule_async_request(request)
    queue.maybe_finalize_async_calls(blocking=True)
    queue.close()
    manager.close()
    over.set()
    assert f"{tmp_path}/0: old shards are not removed after " in caplog.text


def count_exchanges(rank, world, root):
    """Return which exchanges a search, and the end of a save, take."""
    manager = LocalCheckpointManager(root)
    manager.save(BasicTensorAwareStateDict(state_of(rank, 1)), 1)
    counted = []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("all_reduce", "all_gather", "all_gather_object", "broadcast", "barrier"):
            original = getattr(dist, name)

            def call(*args, name=name, original=original, **more):
                counted.append((name, args[0][0].numel() if name == "all_gather" else 0))
                return original(*args, **more)

            patch.setattr(dist, name, call)
        manager.latest_iteration = -1
        manager.find_latest()
        search, counted[:] = list(counted), []
        request = manager.save(BasicTensorAwareStateDict(state_of(rank, 2)), 2, is_async=True)
        begin, counted[:] = list(counted), []
        request.async_fn(*request.async_fn_args)
        request.execute_finalize_fns(validate_matching_call_idx=False)
    manager.wait_for_cleanup()
    return search, begin, list(counted)


def test_a_search_is_one_small_gather_and_the_end_of_a_save_one_bit(two_ranks, tmp_path):
    """`find_latest` gathers one tensor of 66 numbers; begin and end of a save reduce one each."""
    for search, begin, end in two_ranks.run(count_exchanges, tmp_path):
        assert search == [("all_gather", 66)]
        assert begin == [("all_reduce", 0)]
        assert end == [("all_reduce", 0)]


def test_checksums_are_compared_unless_switched_off(tmp_path, monkeypatch):
    """A flipped bit is refused; with `NVRX_CKPT_VERIFY_ON_LOAD=0` nobody looks for one."""
    saved(tmp_path, 1)
    damage(tmp_path / "0" / "iter_0000001_0_local.pt", "bit flip")
    monkeypatch.setenv("NVRX_CKPT_VERIFY_ON_LOAD", "0")
    manager = LocalCheckpointManager(tmp_path)
    assert manager.find_latest() == 1
    assert not is_state(manager.load()[0], 0, 1)
    checking = LocalCheckpointManager(tmp_path, verify_on_load=True)
    checking.find_latest()
    with pytest.raises(CheckpointingException, match="damaged"):
        checking.load()
    monkeypatch.setenv("NVRX_CKPT_VERIFY_ON_LOAD", "no")
    with pytest.raises(ValueError, match="NVRX_CKPT_VERIFY_ON_LOAD"):
        LocalCheckpointManager(tmp_path)


def test_a_read_only_file_system_fails_the_save_and_nothing_else(mounted):
    """EROFS is an error that says so; the previous checkpoint stays, and a later save succeeds."""
    small = mounted("-t", "tmpfs", "-o", "size=8m", "tmpfs", name="small")
    manager = saved(small, 1)
    for mode, iteration in (("ro", 2), ("rw", 3)):
        subprocess.run(["mount", "-o", f"remount,{mode}", str(small)], check=True)
        if mode == "ro":
            with pytest.raises(CheckpointingException, match="Read-only file system"):
                manager.save(BasicTensorAwareStateDict(state_of(0, iteration)), iteration)
            again = LocalCheckpointManager(small)
            assert again.find_latest() == 1
            assert_state(again.load()[0], 0, 1)
        else:
            manager.save(BasicTensorAwareStateDict(state_of(0, iteration)), iteration)
    assert files(small) == ["iter_0000003_0_local.pt"]


def test_a_failing_disk_fails_the_save_and_nothing_else(failing_disk):
    """When the device reports errors only at fsync, no shard is published that was not written."""
    manager = saved(failing_disk, 1)
    os.sync()
    with pytest.raises(CheckpointingException, match=r"Errno 5|Input/output|No space") as caught:
        manager.save(BasicTensorAwareStateDict(state_of(0, 2, 8 << 20)), 2)
    assert "iter_0000002_0_local.pt" in str(caught.value)
    again = LocalCheckpointManager(failing_disk)
    assert again.find_latest() == 1
    assert_state(again.load()[0], 0, 1)


def test_what_was_just_saved_is_loaded(tmp_path):
    """A manager loads what it has saved itself, first of all and after an older one was found."""
    manager = saved(tmp_path, 1, keep_last=3)
    for iteration in (1, 2, 3):
        if iteration > 1:
            manager.save(BasicTensorAwareStateDict(state_of(0, iteration)), iteration)
        assert manager.find_latest() == iteration
        state, ckpt_id = manager.load()
        assert ckpt_id == (iteration, 0, "")
        assert_state(state, 0, iteration)


def test_a_clock_that_jumps_changes_nothing(tmp_path, monkeypatch):
    """What is newest, and what is removed, follows from iterations, not from any time of a file."""
    manager = LocalCheckpointManager(tmp_path, keep_last=2)
    for iteration, now in ((1, 2e9), (2, 1e9), (3, 3e9), (4, 5e8)):
        monkeypatch.setattr(time, "time", lambda now=now: now)
        manager.save(BasicTensorAwareStateDict(state_of(0, iteration)), iteration)
        os.utime(tmp_path / "0" / f"iter_000000{iteration}_0_local.pt", (now, now))
    assert files(tmp_path) == ["iter_0000003_0_local.pt", "iter_0000004_0_local.pt"]
    again = LocalCheckpointManager(tmp_path)
    assert again.find_latest() == 4
    assert_state(again.load()[0], 0, 4)


@pytest.mark.parametrize("how", ["removed", "renamed"])
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_a_directory_that_goes_during_a_save_fails_that_save_only(
    tmp_path, monkeypatch, how, asynchronous
):
    """The error names the directory and what to do; the next save makes it anew."""
    manager = saved(tmp_path, 1)
    folder, queue = tmp_path / "0", AsyncCallsQueue(persistent=False)

    def lose():
        folder.rename(tmp_path / "old") if how == "renamed" else shutil.rmtree(folder)

    def save(iteration):
        state = BasicTensorAwareStateDict(state_of(0, iteration))
        request = manager.save(state, iteration, is_async=asynchronous)
        if request is not None:
            queue.schedule_async_request(request)
            queue._get_async_caller().wait(queue.async_calls[0], 60)
            if iteration == 2:
                lose()
            queue.maybe_finalize_async_calls(blocking=True)

    if not asynchronous:
        real = directory_module.os.fsync

        def fsync(descriptor):
            real(descriptor)
            if folder.exists() and any(name.endswith("dirty.pt") for name in os.listdir(folder)):
                lose()

        monkeypatch.setattr(directory_module.os, "fsync", fsync)
    with pytest.raises(CheckpointingException, match=rf"{folder}.* gone: create or mount it"):
        save(2)
    monkeypatch.undo()
    save(3)
    queue.close()
    manager.wait_for_cleanup()
    assert files(tmp_path) == ["iter_0000003_0_local.pt"]
    again = LocalCheckpointManager(tmp_path)
    assert again.find_latest() == 3
    assert_state(again.load()[0], 0, 3)
