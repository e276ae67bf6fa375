# SPDX-License-Identifier: Apache-2.0
"""Copies on other ranks: bit for bit, through lost shards, full disks and lost peers."""

import contextlib
import errno
import json
import logging
import os
import pickle
import resource
import socket
import subprocess
import sys
import threading
import time

import no_threads
import pytest
import torch
import torch.distributed as dist
from local_ranks import (
    assert_state,
    damage,
    find_and_load,
    manager,
    save_all,
    started,
    state_of,
)

from nvidia_resiliency_ext.checkpointing._shard import job as job_module
from nvidia_resiliency_ext.checkpointing._shard import peer_server, protocol
from nvidia_resiliency_ext.checkpointing._shard.directory import (
    RankDirectory,
    ShardInProgress,
    ShardName,
)
from nvidia_resiliency_ext.checkpointing._shard.job import SaveJob, run_save_job
from nvidia_resiliency_ext.checkpointing._shard.layout import ShardIdentity
from nvidia_resiliency_ext.checkpointing._shard.peer import (
    Peer,
    PeerError,
    PeerSource,
    PeerTarget,
)
from nvidia_resiliency_ext.checkpointing._shard.peer_server import PeerServer
from nvidia_resiliency_ext.checkpointing._shard.read import read_manifest
from nvidia_resiliency_ext.checkpointing._shard.write import ShardContent, write_content
from nvidia_resiliency_ext.checkpointing.local._load import load_state
from nvidia_resiliency_ext.checkpointing.local._pickling import split_state
from nvidia_resiliency_ext.checkpointing.local.basic_state_dict import BasicTensorAwareStateDict
from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.base_manager import (
    CheckpointingException,
    SameMachineReplicationException,
)
from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager import (
    LocalCheckpointManager,
)
from nvidia_resiliency_ext.checkpointing.local.replication import group_utils, strategies
from nvidia_resiliency_ext.checkpointing.local.replication.group_utils import (
    ExchangePlan,
    GroupWrapper,
    batched,
    parse_group_sequence,
)
from nvidia_resiliency_ext.checkpointing.local.replication.strategies import (
    CliqueReplicationStrategy,
    LazyCliqueReplicationStrategy,
    NoReplicasAvailableError,
)
from nvidia_resiliency_ext.checkpointing.local.replication.utils import zip_strict

TOKEN = b"t" * 32

# The first test of this module waits for the ranks, which import torch.
pytestmark = [pytest.mark.timeout(150), pytest.mark.slow]


@pytest.fixture(scope="module")
def four_ranks(fork_server):
    """Four rank processes that serve all tests of this module."""
    with started(fork_server, 4) as ranks:
        yield ranks


def test_groups_of_ranks():
    """Groups are those of the formula; worlds that do not divide are refused, or all are served."""
    assert parse_group_sequence(8, 2, 32)[:2] == [(0, 8), (1, 9)]
    assert parse_group_sequence(8, 2, 32)[-1] == (23, 31)
    for jump, factor, world in ((0, 2, 4), (1, 0, 4), (2, 2, 6), (-1, 2, 4)):
        with pytest.raises(AssertionError):
            parse_group_sequence(jump, factor, world)
    for world in range(2, 40):
        for jump in range(1, 9):
            for factor in (2, 3):
                groups = parse_group_sequence(jump, factor, world, strict=False)
                assert sorted(rank for group in groups for rank in group) == list(range(world))
                assert all(len(group) > 1 for group in groups), (jump, factor, world, groups)


def test_small_helpers():
    """`batched` and `zip_strict` check what they are given."""
    assert list(batched(range(5), 2)) == [(0, 1), (2, 3), (4,)]
    with pytest.raises(ValueError, match="n is 0"):
        list(batched([1], 0))
    assert list(zip_strict([1, 2], "ab")) == [(1, "a"), (2, "b")]
    with pytest.raises(AssertionError, match="1, 2, 3"):
        zip_strict([1], [1, 2], [1, 2, 3])


def odd_tensors(rank):
    """Return tensors of all kinds whose bits are easily lost: NaN payloads, views, odd dtypes."""
    nan = torch.tensor([0x7FC00001 + rank, 0x7F800001], dtype=torch.int32).view(torch.float32)
    with contextlib.suppress(Exception):
        import warnings

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            quantised = torch.quantize_per_tensor(torch.rand(5), 0.1, 3, torch.qint8)
    found = [
        nan,
        torch.arange(12).reshape(3, 4).t(),
        torch.tensor(rank),
        torch.empty(0, 2),
        torch.ones(1).expand(5, 5),
        torch.arange(10)[2:7],
        torch.rand(3).to(torch.float8_e4m3fn),
        torch.rand(4).to(torch.bfloat16),
        torch.rand(2, dtype=torch.complex64),
        quantised,
    ]
    return found[: len(found) - rank]


def bits(tensor):
    if tensor.is_quantized:
        tensor = tensor.int_repr()
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


def gather_batches(rank, world):
    group = GroupWrapper()
    torch.manual_seed(rank)
    mine = odd_tensors(rank) if rank else []
    found = group.all_gather_batch(mine, target_device="cpu")
    assert [len(batch) for batch in found] == [0, 9, 8, 7]
    assert [bits(t) for t in found[rank]] == [bits(t) for t in mine]
    return [[(bits(t), t.dtype, t.shape) for t in batch] for batch in found]


@pytest.mark.no_second_try
@pytest.mark.filterwarnings("ignore")
def test_gathered_tensors_are_equal_on_all_ranks(four_ranks):
    """Different numbers and kinds of tensors arrive on all ranks with the same bits."""
    first, *others = four_ranks.run(gather_batches)
    assert all(other == first for other in others)


def uneven_groups(rank, world):
    groups = [dist.new_group(ranks) for ranks in ([0, 2, 1], [3])]
    group = GroupWrapper.from_list_of_groups(groups)
    assert group.ranks == ([3] if rank == 3 else [0, 1, 2])
    assert group.my_global_rank == rank
    assert group.world_size == len(group.ranks)
    assert group.get_group_rank() == group.ranks.index(rank)
    assert group.get_device("cuda").type == "cpu"
    strategy = CliqueReplicationStrategy(group)
    mine = BasicTensorAwareStateDict(state_of(rank, 7))
    states, ids = strategy.replicate(mine, f"id{rank}")
    assert mine.is_hollow
    assert ids == [f"id{member}" for member in group.ranks]
    for r, state in zip(group.ranks, states, strict=True):
        assert_state(state, r, 7)
    # Rank 1 has lost its own; rank 3 never had another.
    available = {r: ids if r != 1 else ["id0"] for r in group.ranks}
    wanted = [f"id{rank}"]
    plan = strategy.retrieve_plan(available, wanted)
    mapped = dict(zip(ids, states, strict=True))
    supplied = {id_: mapped[id_] for id_ in plan.required_ids()}
    received = strategy.retrieve_execute(plan, supplied)
    assert_state(received[f"id{rank}"], rank, 7)
    try:
        strategy.retrieve_plan({}, wanted)
    except NoReplicasAvailableError:
        pass
    else:
        raise AssertionError("a state that nobody has was planned for")
    return [(entry.sender, entry.receiver) for entry in plan.entries]


@pytest.mark.no_second_try
def test_replication_in_groups_of_different_sizes(four_ranks):
    """Each member gets each state, and the plan to get a lost one back is the same everywhere."""
    plans = four_ranks.run(uneven_groups)
    assert plans[0] == plans[1] == plans[2]
    assert {receiver: sender for sender, receiver in plans[0]}[1] in {0, 2}
    assert plans[3] == [(3, 3)]


def large_skeleton(rank, world):
    """Return what a rank is told that sends a state whose rest without tensors is too large."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(group_utils, "SKELETON_LIMIT_BYTES", 50)
        try:
            GroupWrapper().isend_state_dict(BasicTensorAwareStateDict({"x": "y" * 60}), rank ^ 1)
        except ValueError as error:
            return str(error)
    return ""


def test_only_skeletons_of_limited_size_are_pickled_for_ranks(four_ranks):
    """A state whose pickled rest is larger than allowed is refused before anything is sent."""
    assert all("50 are allowed" in text for text in four_ranks.run(large_skeleton))


def absent_state(rank, world):
    plan = ExchangePlan(GroupWrapper())
    plan.plan(sender=rank, receiver=rank, id_="x")
    try:
        GroupWrapper().execute_plan(plan, {})
    except AssertionError as error:
        return str(error)
    return ""


def test_a_plan_needs_what_it_sends(four_ranks):
    """A rank that does not have what a plan asks of it says which state is missing."""
    assert all("'x'" in text for text in four_ranks.run(absent_state))


def replicate_and_compare(rank, world, root):
    m = LocalCheckpointManager(root, repl_strategy=LazyCliqueReplicationStrategy(2, 2))
    m.save(BasicTensorAwareStateDict(state_of(rank, 1)), 1)
    return sorted(path.name for path in m.local_ckpt_dir.glob("iter_*"))


@pytest.mark.no_second_try
def test_replicas_are_the_same_files(four_ranks, tmp_path):
    """A copy is byte for byte the file of its owner, and lies in the directory of its peer."""
    found = four_ranks.run(replicate_and_compare, tmp_path)
    for rank, listing in enumerate(found):
        assert listing == [f"iter_0000001_{r}_local.pt" for r in sorted((rank, (rank + 2) % 4))]
        name = f"iter_0000001_{rank}_local.pt"
        own = (tmp_path / str(rank) / name).read_bytes()
        assert (tmp_path / str((rank + 2) % 4) / name).read_bytes() == own


@pytest.mark.no_second_try
def test_a_lost_directory_comes_back_from_a_peer(four_ranks, tmp_path):
    """A rank whose files are all gone loads its state from the rank that keeps its copy."""
    four_ranks.run(save_all, tmp_path, [1, 2], True)
    for name in os.listdir(tmp_path / "1"):
        (tmp_path / "1" / name).unlink()
    assert four_ranks.run(find_and_load, tmp_path, True) == [(2, 2, True)] * 4


@pytest.mark.no_second_try
def test_copies_outside_of_the_clique_are_not_promised(four_ranks, tmp_path):
    """What no rank of the clique has is not offered, although another rank may have it."""
    four_ranks.run(save_all, tmp_path, [1], True)
    for rank in (0, 1):
        (tmp_path / str(rank) / "iter_0000001_1_local.pt").unlink()
    (tmp_path / "3" / "iter_0000001_1_local.pt").write_bytes(b"")
    assert [found for found, _, _ in four_ranks.run(find_and_load, tmp_path, True)] == [-1] * 4


@pytest.mark.no_second_try
def test_all_copies_damaged_falls_back_on_all_ranks(four_ranks, tmp_path):
    """When own shard and copy are damaged all ranks go back to the same older iteration."""
    options = {"keep_last": 2}
    four_ranks.run(save_all, tmp_path, [1, 2], True, options)
    for rank in (0, 1):
        damage(tmp_path / str(rank) / "iter_0000002_1_local.pt", "bit flip")
    assert four_ranks.run(find_and_load, tmp_path, True, options) == [(2, 1, True)] * 4


def full_replica(rank, world, root, place):
    """Rank 1's directory lies on a tiny file system, if `place` says so."""
    m = manager(root if rank != 1 else place, True, peer_timeout_s=5.0)
    m.save(BasicTensorAwareStateDict(state_of(rank, 1)), 1)
    sizes = 300_000 if rank == 0 else 10
    try:
        m.save(BasicTensorAwareStateDict(state_of(rank, 2, sizes)), 2)
    except CheckpointingException as error:
        text = str(error)
    else:
        text = "no error"
    m.save(BasicTensorAwareStateDict(state_of(rank, 3)), 3)
    return text, sorted(path.name for path in m.local_ckpt_dir.glob("iter_*"))


@pytest.mark.no_second_try
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small tmpfs needs root")
def test_no_space_for_a_replica_is_an_error_on_all_ranks(four_ranks, tmp_path):
    """ENOSPC at a peer fails the save everywhere, names it, and the next save succeeds."""
    place = tmp_path / "small"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", place], check=True)
    try:
        found = four_ranks.run(full_replica, tmp_path / "root", place)
        for rank, (text, listing) in enumerate(found):
            assert "rank 0: " in text
            assert "No space left" in text
            pair = sorted((rank, rank ^ 1))
            assert listing == [f"iter_0000003_{r}_local.pt" for r in pair]
    finally:
        subprocess.run(["umount", "-l", place], check=True)


@pytest.fixture
def server(tmp_path):
    """A server of copies at rank 1, in this process."""
    found = PeerServer(RankDirectory(tmp_path, "", 1), "127.0.0.1", TOKEN, lambda *_: "", 2.0)
    yield found
    found.close()


def peer_of(server, token=TOKEN, timeout_s=2.0):
    return Peer(1, "127.0.0.1", server.port, token, timeout_s)


def job_of(tmp_path, peers, nbytes=100_000):
    content = ShardContent(ShardIdentity(3, 0, "", 2), "x", b"N.", ((nbytes, "w"),))
    return SaveJob(str(tmp_path), "", 0, content, tuple(peers)), [bytes(range(250)) * 400]


def test_a_copy_is_read_back_as_it_was(server, tmp_path):
    """A copy that a peer gives back has the bytes of the original, and its name only when whole."""
    job, storages = job_of(tmp_path, [peer_of(server)])
    assert run_save_job(job, storages) == ""
    source = PeerSource(peer_of(server), ShardName(3, 0))
    manifest = read_manifest(source)
    data = bytearray(100_000)
    source.read_into(manifest.records[2].offset, memoryview(data))
    source.close()
    assert bytes(data) == storages[0]


class RendezvousSource(PeerSource):
    """A copy whose first large read waits until the other copy is being read as well."""

    rendezvous = threading.Barrier(2)
    has_met = False

    def read_into(self, position, target):
        if target.nbytes > 10_000 and not self.has_met:
            self.has_met = True
            self.rendezvous.wait(60)
        super().read_into(position, target)


def test_a_shard_is_read_from_all_who_have_a_copy_at_once(tmp_path):
    """Two peers send different tensors at the same time, and each byte is right."""
    with contextlib.ExitStack() as stack:
        servers = []
        for rank in (1, 2):
            directory = RankDirectory(tmp_path, "", rank)
            servers.append(PeerServer(directory, "127.0.0.1", TOKEN, lambda *_: "", 20.0))
            stack.callback(servers[-1].close)
        peers = [peer_of(server, timeout_s=20.0) for server in servers]
        given = {f"w{k}": torch.rand(10_000) for k in range(6)}
        parts = split_state(BasicTensorAwareStateDict(given))
        lengths = [(storage.nbytes, "") for storage in parts.storages]
        identity = ShardIdentity(3, 0, "", 3)
        content = ShardContent(identity, parts.state_class, parts.skeleton, tuple(lengths))
        job = SaveJob(str(tmp_path), "", 0, content, tuple(peers))
        assert run_save_job(job, parts.storages) == ""
        sources = [RendezvousSource(peer, ShardName(3, 0)) for peer in peers]
        state = load_state(read_manifest(sources[0]), sources, strict=True)
        for source in sources:
            source.close()
    assert all(source.has_met for source in sources)
    assert all(torch.equal(state.state_dict[name], given[name]) for name in given)


class FlippingTarget(PeerTarget):
    """A network that changes one bit of what is sent, in the bytes of the tensor."""

    def __call__(self, position, data):
        changed = bytearray(data)
        if len(changed) > 1000:
            changed[len(changed) // 2] ^= 1
        super().__call__(position, memoryview(changed))


@pytest.mark.no_second_try
def test_a_copy_with_other_bytes_is_refused(server, tmp_path, monkeypatch):
    """A bit that changes on the way fails the save, names the tensor, and leaves no copy."""
    monkeypatch.setattr(job_module, "PeerTarget", FlippingTarget)
    problem = run_save_job(*job_of(tmp_path, [peer_of(server)]))
    assert "other bytes than the original: w" in problem
    assert server.wait_for_stores(20)
    assert os.listdir(tmp_path / "1") == []


@pytest.mark.parametrize(
    "error",
    [
        PeerError(Peer(1, "node1", 7, b"", 2.0), OSError(errno.ENOSPC, "no space")),
        SameMachineReplicationException((3, 0, "session")),
    ],
)
def test_errors_keep_their_fields_when_they_are_copied(error):
    """Another process gets such an error as it was raised."""
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), vars(copy)) == (type(error), str(error), vars(error))


def test_a_copied_error_has_no_secret():
    """Errors are gathered, logged and kept in files: the token of the job stays where it is."""
    error = PeerError(Peer(1, "node1", 7, TOKEN, 2.0), "no space")
    assert TOKEN not in pickle.dumps(error)
    assert pickle.loads(pickle.dumps(error)).peer == Peer(1, "node1", 7, b"", 2.0)


def test_who_does_not_know_the_token_gets_and_gives_nothing(server):
    """A wrong token is refused, by the server of a peer and by its client."""
    with pytest.raises(PeerError):
        PeerTarget(peer_of(server, b"wrong" * 7), ShardName(3, 0))
    assert RankDirectory(server._directory._session or "", "", 1).names() == []


@pytest.mark.parametrize(
    "garbage", [b"", b"GET / HTTP/1.1\r\n\r\n", os.urandom(200), b"\xff" * 5000]
)
def test_garbage_does_not_disturb_a_peer(server, tmp_path, garbage):
    """Whatever a client without the token sends, the peer goes on serving ranks of the job."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as client:
        client.sendall(garbage)
    job, storages = job_of(tmp_path, [peer_of(server)])
    assert run_save_job(job, storages) == ""


@pytest.mark.no_second_try
def test_a_copy_that_is_not_finished_is_dropped(server, tmp_path):
    """A sender that goes away in the middle leaves nothing behind at the peer."""
    target = PeerTarget(peer_of(server), ShardName(3, 0))
    target(0, memoryview(bytes(1000)))
    target.close()
    assert server.wait_for_stores(20)
    assert os.listdir(tmp_path / "1") == []


@pytest.mark.no_second_try
def test_a_sender_that_stands_still_is_dropped(server, tmp_path, monkeypatch):
    """A sender that neither goes on nor ends holds up its peer for a limited time."""
    monkeypatch.setattr(protocol, "PATIENCE", 0.25)
    target = PeerTarget(peer_of(server), ShardName(3, 0))
    target(0, memoryview(bytes(1000)))
    assert server.wait_for_stores(20)
    assert os.listdir(tmp_path / "1") == []
    target.close()


def test_a_peer_without_threads_says_so(server, tmp_path, monkeypatch):
    """A peer that cannot start another thread fails the save, with the reason, and goes on."""
    job, storages = job_of(tmp_path, [peer_of(server)])
    with monkeypatch.context() as patch:
        patch.setattr(peer_server, "_signs_of_life", raise_no_threads)
        problem = run_save_job(job, storages)
    assert "rank 1 at 127.0.0.1" in problem
    assert "can't start new thread" in problem
    assert run_save_job(job, storages) == ""


def raise_no_threads(*_):
    raise RuntimeError("can't start new thread")


def test_a_peer_that_cannot_serve_for_a_while_serves_later(server, tmp_path, monkeypatch, caplog):
    """A connection for which there is no thread fails its save, is logged, and ends no server."""
    job, storages = job_of(tmp_path, [peer_of(server)])
    no_threads.refuse(monkeypatch, "nvrx-peer", times=1)
    assert "rank 1 at 127.0.0.1" in run_save_job(job, storages)
    assert "cannot serve a rank that replicates to this one: can't start" in caplog.text
    assert run_save_job(job, storages) == ""


# A peer whose disk hangs in one system call, in the program that then ends.
HANGS = """
import contextlib, os, sys, threading
from nvidia_resiliency_ext.checkpointing._shard.directory import RankDirectory, ShardName
from nvidia_resiliency_ext.checkpointing._shard.layout import ShardIdentity
from nvidia_resiliency_ext.checkpointing._shard.peer import Peer, PeerTarget
from nvidia_resiliency_ext.checkpointing._shard.peer_server import PeerServer
from nvidia_resiliency_ext.checkpointing._shard.write import ShardContent, write_content
root, call = sys.argv[1:]
server = PeerServer(RankDirectory(root, "", 1), "127.0.0.1", b"t", lambda *_: "", 30.0)
hangs = threading.Event()
def hang(*_):
    hangs.set()
    threading.Event().wait()
setattr(os, call, hang)
def send():
    target = PeerTarget(Peer(1, "127.0.0.1", server.port, b"t", 30.0), ShardName(3, 0))
    content = ShardContent(ShardIdentity(3, 0, "", 2), "x", b"N.", ((100, "w"),))
    with contextlib.suppress(OSError):
        write_content(content, [bytes(100)], lambda *_: None, [target])
        target.finish()
threading.Thread(target=send, daemon=True).start()
hangs.wait()
server.close()
print("closed", flush=True)
"""


@pytest.mark.no_second_try
@pytest.mark.parametrize("call", ["pwrite", "fsync"])
def test_a_disk_that_hangs_does_not_hold_up_the_end_of_the_peer(tmp_path, call):
    """A trainer whose disk hangs while it keeps a copy closes its server and ends, and says so."""
    done = subprocess.run(
        [sys.executable, "-c", HANGS, str(tmp_path), call],
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "closed\n"), done.stderr
    assert f"the file system of {tmp_path}/1 has not let them end" in done.stderr
    assert "Traceback" not in done.stderr


def test_requests_that_nobody_sends_end_their_connection_only(server, tmp_path, caplog):
    """Numbers too large for the system, and JSON nested too deeply, from a rank with the token."""
    source = PeerTarget(peer_of(server), ShardName(4, 0))
    source._sock.sendall(protocol.RANGE.pack((1 << 64) - 1, 1) + b"x")
    with pytest.raises(PeerError, match=r"too (large|big)"):
        source.finish()
    source.close()
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as client:
        text = b"[" * 60_000
        nonce = protocol.receive(client, 16)
        client.sendall(
            protocol.proof_of(TOKEN, nonce + text) + protocol.LENGTH.pack(len(text)) + text
        )
        assert client.recv(1) == b""
    assert "a connection of a replicating rank ended" in caplog.text
    assert run_save_job(*job_of(tmp_path, [peer_of(server)])) == ""


def test_a_copy_with_parts_that_were_sent_twice_is_refused(server, tmp_path):
    """A peer names no copy whose content depends on which of two bytes was written last."""
    job, storages = job_of(tmp_path, [])
    target = PeerTarget(peer_of(server), ShardName(3, 0))
    manifest = write_content(job.content, storages, lambda *_: None, [target])
    target(manifest.records[2].offset + 10, memoryview(b"other"))
    with pytest.raises(PeerError, match="twice"):
        target.finish()
    target.close()
    assert os.listdir(tmp_path / "1") == []


@pytest.mark.no_second_try
@pytest.mark.parametrize("how", ["gone", "silent"])
def test_a_lost_peer_is_an_error_that_names_it(tmp_path, how):
    """A peer that refuses or never answers fails the save within the timeout."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        if how == "gone":
            listener.close()
        peer = Peer(1, "127.0.0.1", port, TOKEN, 0.5)
        problem = run_save_job(*job_of(tmp_path, [peer]))
    assert "rank 1 at 127.0.0.1" in problem
    assert [str(name) for name in RankDirectory(tmp_path, "", 0).names()] == [
        "iter_0000003_0_local.dirty.pt"
    ]
    assert RankDirectory(tmp_path, "", 0).remove_leftovers() == [problem]


@pytest.mark.no_second_try
@pytest.mark.parametrize("how", ["dies", "stops"])
def test_a_peer_that_is_lost_in_the_middle_fails_the_save(tmp_path, how):
    """A connection that breaks, or a peer that gives no sign of life, is reported."""
    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        timeout_s = 5.0 if how == "dies" else 2.0
        peer = Peer(1, "127.0.0.1", listener.getsockname()[1], TOKEN, timeout_s)

        def take_a_part():
            # The part of a peer up to the first bytes of the copy.
            connection, _ = listener.accept()
            with connection:
                nonce = b"n" * 16
                connection.sendall(nonce)
                protocol.receive(connection, 32)
                request = json.loads(protocol.receive_text(connection))
                connection.sendall(protocol.proof_of(TOKEN, bytes.fromhex(request["nonce"])))
                protocol.send_json(connection, {"error": ""})
                protocol.receive(connection, 100)
                if how == "stops":
                    over.wait(100)

        thread = threading.Thread(target=take_a_part)
        thread.start()
        begin = time.monotonic()
        problem = run_save_job(*job_of(tmp_path, [peer]))
        seconds = time.monotonic() - begin
        over.set()
        thread.join()
    assert "rank 1 at 127.0.0.1" in problem
    if how == "stops":
        assert "no sign of life for 2 s (peer_timeout_s)" in problem
        assert seconds < 50


@pytest.mark.no_second_try
def test_a_peer_whose_disk_is_slow_is_waited_for(server, tmp_path, monkeypatch):
    """While a copy is made durable the peer gives signs of life, for longer than the timeout."""
    told, many = [], threading.Event()
    send = protocol.send_json

    def note(sock, value):
        send(sock, value)
        told.append("is_working" in value)
        if sum(told) == 6:  # each a quarter of the timeout
            many.set()

    publish = ShardInProgress.publish

    def publish_late(shard):
        if shard.path.split("/")[-2] == "1":
            assert many.wait(60)
        publish(shard)

    monkeypatch.setattr(protocol, "send_json", note)
    monkeypatch.setattr(ShardInProgress, "publish", publish_late)
    job, storages = job_of(tmp_path, [peer_of(server, timeout_s=2.0)])
    assert run_save_job(job, storages) == ""
    assert many.is_set()


@pytest.mark.no_second_try
def test_a_peer_whose_disk_hangs_is_given_up(server, tmp_path, monkeypatch):
    """Signs of life do not make a save wait for ever."""
    over = threading.Event()
    publish = ShardInProgress.publish

    def publish_in_the_end(shard):
        if shard.path.split("/")[-2] == "1":
            over.wait(60)
        publish(shard)

    monkeypatch.setattr(protocol, "PATIENCE", 0.25)
    monkeypatch.setattr(ShardInProgress, "publish", publish_in_the_end)
    problem = run_save_job(*job_of(tmp_path, [peer_of(server)]))
    over.set()
    assert "rank 1 at 127.0.0.1" in problem
    assert "its disk has not made the copy durable for 0.5 s" in problem


class OwnStrategy(CliqueReplicationStrategy):
    """A strategy of the user's, whose states are exchanged as objects."""


class Unmovable(BasicTensorAwareStateDict):
    """A state that rank 1 cannot bring to the host, or take its tensors out of."""

    def copy_tensors_to_cpu(self, non_blocking=False):
        if self.state_dict["how"] == "copy":
            raise RuntimeError("no memory on the host")
        super().copy_tensors_to_cpu(non_blocking)

    def pop_tensors(self):
        if self.state_dict["how"] == "pop":
            raise RuntimeError("the tensors are gone")
        return super().pop_tensors()


def fail_alone(rank, world, root, how):
    """Save or look with one rank that cannot take part; return what each rank raises."""
    group = dist.new_group([0, 1, 2, 3])
    looking = manager(root, True)
    looking._agreement.all_true(True)  # gloo reads the variable, too: its groups exist by now
    try:
        if how == "thread":
            with pytest.MonkeyPatch.context() as patch:
                no_threads.refuse(patch, "nvrx-peers" if rank == 1 else "no such thread")
                looking.find_latest()
        elif how == "address":
            os.environ["GLOO_SOCKET_IFNAME"] = "nosuchif0" if rank == 1 else "lo"
            looking.find_latest()
        else:
            m = LocalCheckpointManager(root, repl_strategy=OwnStrategy(group))
            state = {"w": torch.ones(2), "how": how if rank == 1 else ""}
            m.save(Unmovable(state), 1)
    except CheckpointingException as error:
        return str(error)
    finally:
        os.environ.pop("GLOO_SOCKET_IFNAME", None)
    return "no error"


@pytest.mark.no_second_try
@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("address", "nosuchif0"),
        ("thread", "can't start new thread"),
        ("copy", "no memory"),
        ("pop", "the tensors are gone"),
    ],
)
def test_a_rank_that_cannot_take_part_holds_up_nobody(four_ranks, tmp_path, how, text):
    """What fails on one rank before an exchange is an error on all of them, with the cause."""
    found = four_ranks.run(fail_alone, tmp_path, how)
    assert all("rank 1: " in one and text in one for one in found), found


def test_a_peer_without_descriptors_recovers(server, tmp_path):
    """When descriptors run out for a while, copies are accepted again afterwards."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket() as client:
        highest = max(int(name) for name in os.listdir("/proc/self/fd"))
        spare = [os.dup(0) for _ in range(highest + 1 - len(os.listdir("/proc/self/fd")))]
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(highest, *spare, 0) + 1, hard))
        try:
            client.connect(("127.0.0.1", server.port))
            time.sleep(0.3)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for descriptor in spare:
                os.close(descriptor)
    job, storages = job_of(tmp_path, [peer_of(server, timeout_s=20.0)])
    assert run_save_job(job, storages) == ""


def default_jump(rank, world):
    """Return the jump chosen with an environment that is set after the strategy was made."""
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger(strategies.__name__).addHandler(handler)
    found = []
    for local_world in ("2", "4", None):
        strategy = LazyCliqueReplicationStrategy()
        os.environ.pop("LOCAL_WORLD_SIZE")
        if local_world is not None:
            os.environ["LOCAL_WORLD_SIZE"] = local_world
        try:
            found.append(strategy.replication_strategy.replication_jump)
        except AssertionError as error:
            found.append(str(error))
        finally:
            os.environ["LOCAL_WORLD_SIZE"] = "1"
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    CliqueReplicationStrategy.from_replication_params(1, 2)
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    logging.getLogger(strategies.__name__).removeHandler(handler)
    return found, lines


@pytest.mark.no_second_try
@pytest.mark.skipif(torch.cuda.is_available(), reason="with CUDA the jump is the device count")
def test_default_jump_is_the_ranks_per_node(four_ranks):
    """The jump comes from `LOCAL_WORLD_SIZE` when groups are built; a bad one gives a warning."""
    for rank, (found, lines) in enumerate(four_ranks.run(default_jump)):
        assert (found[0], found[2]) == (2, 1)
        assert "4" in found[1]
        assert ("use a jump of 2" in " ".join(lines)) == (rank == 0)


def same_machine(rank, world, root):
    m = manager(root, True, allow_same_machine=False)
    try:
        m.save(BasicTensorAwareStateDict(state_of(rank, 1)), 1)
    except SameMachineReplicationException as error:
        return error.ckpt_id, str(error)
    return None


@pytest.mark.no_second_try
def test_copies_on_one_machine_are_refused_on_request(four_ranks, tmp_path):
    """With `allow_same_machine=False` a save whose copies would be lost together is an error."""
    found = four_ranks.run(same_machine, tmp_path)
    assert [ckpt_id for ckpt_id, _ in found] == [(1, rank, "") for rank in range(4)]
    assert all("same machine" in text for _, text in found)


class ExchangesObjects(CliqueReplicationStrategy):
    """Copies are exchanged as objects, as for any strategy of a user."""


def load_from_a_bad_sector(rank, world, root, bad):
    """Return what a rank loads when `bad` ranks can read shard 0's manifest only."""
    strategy = ExchangesObjects.from_replication_params(1, len(bad) + 1)
    first = LocalCheckpointManager(root, repl_strategy=strategy)
    first.save(BasicTensorAwareStateDict({"w": torch.full((3,), float(rank))}), 1)
    second = LocalCheckpointManager(root, repl_strategy=strategy)
    second.find_latest()
    open_source = RankDirectory.source

    def source(self, name):
        found = open_source(self, name)
        read = found.read_into

        def read_into(position, target):
            if len(target) == 12:
                raise OSError(errno.EIO, "bad sector")
            return read(position, target)

        if name.owner == 0:
            found.read_into = read_into
        return found

    with pytest.MonkeyPatch.context() as patch:
        if rank in bad:
            patch.setattr(RankDirectory, "source", source)
        state, ckpt_id = second.load()
    kept = second.local_ckpt_dir.glob("*")
    return ckpt_id[0], next(iter(state.tensors)).tolist(), any("damaged" in str(p) for p in kept)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("bad", [[0], [0, 1, 2], [0, 2, 3]])
def test_a_shard_that_cannot_be_read_is_taken_from_a_peer(four_ranks, tmp_path, bad):
    """A rank whose own shard cannot be read, but is listed, gets the copy that can be read."""
    found = four_ranks.run(load_from_a_bad_sector, str(tmp_path), bad)
    assert found == [(1, [float(rank)] * 3, False) for rank in range(4)]
