# SPDX-License-Identifier: Apache-2.0
"""Local checkpoints in files of the node's own file system."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import weakref
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from nvidia_resiliency_ext.checkpointing._errors import DamagedCheckpointError
from nvidia_resiliency_ext.checkpointing._shard.directory import (
    DAMAGED,
    DIRTY,
    DirectoryLock,
    RankDirectory,
    ShardName,
    shard_file_name,
)
from nvidia_resiliency_ext.checkpointing._shard.job import SaveJob, run_save_job
from nvidia_resiliency_ext.checkpointing._shard.layout import Manifest, ShardIdentity
from nvidia_resiliency_ext.checkpointing._shard.peer import Peer, PeerSource
from nvidia_resiliency_ext.checkpointing._shard.peer_server import PeerServer
from nvidia_resiliency_ext.checkpointing._shard.read import read_manifest
from nvidia_resiliency_ext.checkpointing._shard.write import ShardContent
from nvidia_resiliency_ext.checkpointing.async_ckpt._options import verify_option
from nvidia_resiliency_ext.checkpointing.local._load import load_state
from nvidia_resiliency_ext.checkpointing.local._pickling import split_state
from nvidia_resiliency_ext.checkpointing.local.base_state_dict import TensorAwareStateDict
from nvidia_resiliency_ext.checkpointing.local.ckpt_managers._clique import connect_clique
from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.base_manager import (
    BaseCheckpointManager,
    CheckpointingException,
    CkptID,
    SameMachineReplicationException,
    SaveCall,
)
from nvidia_resiliency_ext.checkpointing.local.replication.strategies import (
    CliqueReplicationStrategy,
    LazyReplicationStrategyBuilder,
    ReplicationStrategy,
)
from nvidia_resiliency_ext.shared_utils.abandonable import AbandonableCall
from nvidia_resiliency_ext.shared_utils.errors import ConfigError

__all__ = ["LocalCheckpointManager"]

logger = logging.getLogger(__name__)

_LOAD_POLICIES = ("auto", "strict")
_CLOSE_S = 5.0


class LocalCheckpointManager(BaseCheckpointManager):
    """Keeps each rank's checkpoints in `<root>/<session_id>/<rank>` on the node's own disks.

    Args:
        root_local_ckpt_dir: Directory of all sessions, on a RAM disk or NVMe; created on demand.
        session_id: Checkpoints of other sessions are ignored.
        repl_strategy: Which ranks keep copies of which checkpoints; None for no copies.
        keep_last: Number of complete iterations to keep. Default 1.
        load_policy: "auto" loads any class of state, from files and directories that only this
            user can write to; "strict" loads only `BasicTensorAwareStateDict`, which runs no code.
        peer_timeout_s: Seconds without a message after which a rank that keeps copies is lost.
            While its disk makes a copy durable, it sends a message every quarter of this time; it
            is then lost after ten times this value. Default 30.
        verify_on_load: Verify checksums at every load. Default
            `NVRX_CKPT_VERIFY_ON_LOAD` (0 or 1), else yes.
        allow_same_machine: Allow copies on the machine of their original, although both are then
            lost together. Otherwise such a save raises `SameMachineReplicationException`. Default
            True.

    Raises:
        ConfigError: A value is not allowed.
        ValueError: `NVRX_CKPT_VERIFY_ON_LOAD` is neither 0 nor 1.

    Example:
        >>> import tempfile, torch, warnings
        >>> from nvidia_resiliency_ext.checkpointing.local.basic_state_dict import (
        ...     BasicTensorAwareStateDict,
        ... )
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     manager = LocalCheckpointManager(folder)
        ...     manager.save(BasicTensorAwareStateDict({"w": torch.ones(2)}), iteration=1)
        ...     latest = LocalCheckpointManager(folder)
        ...     latest.find_latest()
        ...     state, ckpt_id = latest.load()
        1
        >>> ckpt_id, state.state_dict
        ((1, 0, ''), {'w': tensor([1., 1.])})
    """

    def __init__(  # noqa: PLR0913 - one for each option
        self,
        root_local_ckpt_dir: str | Path,
        session_id: str = "",
        repl_strategy: ReplicationStrategy | None = None,
        *,
        keep_last: int = 1,
        load_policy: str = "auto",
        peer_timeout_s: float = 30.0,
        verify_on_load: bool | None = None,
        allow_same_machine: bool = True,
    ) -> None:
        super().__init__(session_id, repl_strategy)
        if keep_last < 1:
            raise ConfigError(f"keep_last is {keep_last}; it must be 1 or more")
        if load_policy not in _LOAD_POLICIES:
            raise ConfigError(f"load_policy is {load_policy!r}; it must be 'auto' or 'strict'")
        self.root_local_ckpt_dir = Path(root_local_ckpt_dir)
        self._keep_last = keep_last
        self._load_policy = load_policy
        self._peer_timeout_s = peer_timeout_s
        self._verify = verify_option(default=True) if verify_on_load is None else verify_on_load
        self._allow_same_machine = allow_same_machine
        self._one_machine = False
        self._server: PeerServer | None = None
        self._peers: tuple[Peer, ...] = ()
        self._removal: AbandonableCall[None] | None = None
        self._complained: set[str] = set()
        self._complete: set[int] = set()
        self._lock: DirectoryLock | None = None

    @property
    def local_ckpt_dir(self) -> Path:
        """Return this rank's directory."""
        return Path(self._directory().path)

    def _directory(self) -> RankDirectory:
        root = os.fspath(self.root_local_ckpt_dir)
        return RankDirectory(root, str(self.session_id), self._agreement.rank)

    def _filename_from_template(
        self, iteration: int | str, rank: int | str, extra_suffix: str = ""
    ) -> str:
        """Return the name of a shard's file; texts such as `*` take the place of numbers."""
        return shard_file_name(iteration, rank, extra_suffix)

    def _filename_to_id(self, filename: str) -> CkptID:
        """Return the id of the shard with that file name.

        Raises:
            CheckpointingException: It is no name of a shard.
        """
        name = ShardName.parse(os.path.basename(filename))
        if name is None or name.suffix:
            raise CheckpointingException(f"{filename!r} is not the name of a shard's file")
        return (name.iteration, name.owner, self.session_id)

    def _local_ckpt_path_from_id(self, ckpt_id: CkptID, is_dirty: bool = False) -> Path:
        """Return the path of a shard in this rank's directory, or of the file in progress."""
        iteration, owner, _ = ckpt_id
        return self.local_ckpt_dir / shard_file_name(iteration, owner, DIRTY if is_dirty else "")

    def _identity(self, ckpt_id: CkptID) -> ShardIdentity:
        iteration, owner, session_id = ckpt_id
        world_size = self._agreement.size
        clique = self._clique_strategy()
        jump, factor = 0, 1
        if clique is not None:
            jump, factor = clique.replication_jump, clique.replication_factor
        return ShardIdentity(iteration, owner, str(session_id), world_size, jump, factor)

    def _my_ckpt_ids(self) -> Iterable[CkptID]:
        """Return the shards in this rank's directory that are whole as far as their end says."""
        directory = self._directory()
        found = []
        for name in directory.names():
            if name.suffix:
                continue
            try:
                self._read_manifest(directory, name)
            except (DamagedCheckpointError, OSError) as error:
                self._complain(str(error))
                continue
            found.append((name.iteration, name.owner, self.session_id))
        return found

    def _read_manifest(self, directory: RankDirectory, name: ShardName) -> Manifest:
        source = directory.source(name)
        try:
            manifest = read_manifest(source)
        finally:
            source.close()
        self._check_identity(source.name, manifest.identity, name)
        return manifest

    def _check_identity(self, path: str, found: ShardIdentity, name: ShardName) -> None:
        expected = self._identity((name.iteration, name.owner, self.session_id))
        for field in ("iteration", "owner", "session_id", "world_size"):
            mine, its = getattr(expected, field), getattr(found, field)
            if mine != its:
                problem = f"saved with {field} {its!r}, here it is {mine!r}; not used"
                raise DamagedCheckpointError(path, problem)
        if (found.jump, found.factor) != (expected.jump, expected.factor):
            self._complain(
                f"{path} was saved with replication jump {found.jump} and factor {found.factor}, "
                f"here they are {expected.jump} and {expected.factor}; it is used all the same"
            )

    def _complain(self, problem: str) -> None:
        if problem not in self._complained:
            self._complained.add(problem)
            logger.warning("local checkpoints: %s", problem)

    def _load(self, ckpt_id: CkptID) -> TensorAwareStateDict:
        """Return a shard's state; every byte is checked on the way."""
        iteration, owner, _ = ckpt_id
        name = ShardName(iteration, owner)
        source = self._directory().source(name)
        try:
            manifest = read_manifest(source)
            self._check_identity(source.name, manifest.identity, name)
            state: TensorAwareStateDict = load_state(
                manifest, [source], strict=self._is_strict(), verify=self._verify
            )
        finally:
            source.close()
        return state

    def _set_aside(self, ckpt_id: CkptID) -> None:
        iteration, owner, _ = ckpt_id
        try:
            self._directory().set_aside(ShardName(iteration, owner))
        except OSError as error:
            logger.warning("a damaged shard cannot be set aside: %s", error)

    def _save(self, state_dict: TensorAwareStateDict, ckpt_id: CkptID) -> None:
        """Write a state into this rank's directory.

        Raises:
            CheckpointingException: It cannot be written.
        """
        call = self._file_call(state_dict, ckpt_id)
        assert call.function is not None
        problem = call.function(*call.args)
        if problem:
            raise CheckpointingException(problem)

    def _save_call(
        self, state_dict: TensorAwareStateDict, ckpt_id: CkptID, *, is_async: bool
    ) -> SaveCall:
        if self._save_is_replaced() or self._exchanges_objects():
            return super()._save_call(state_dict, ckpt_id, is_async=is_async)
        call = self._file_call(state_dict, ckpt_id, self._peers)
        iteration, _, session_id = ckpt_id
        call.expected += [(iteration, peer.rank, session_id) for peer in self._peers]
        return call

    def _exchanges_objects(self) -> bool:
        if self.repl_strategy is None:
            return False
        return self._save_is_replaced() or self._clique_strategy() is None

    def _save_is_replaced(self) -> bool:
        return type(self)._save is not _OWN_SAVE  # noqa: SLF001 - ours

    def _clique_strategy(self) -> CliqueReplicationStrategy | None:
        """Return the strategy if its copies can be sent from file to file."""
        strategy = self.repl_strategy
        if isinstance(strategy, LazyReplicationStrategyBuilder):
            strategy = strategy.replication_strategy
        return strategy if type(strategy) is CliqueReplicationStrategy else None

    def _connect_clique(self) -> None:
        """Exchange addresses with the ranks of the clique, once; all ranks call this together."""
        clique = self._clique_strategy()
        if clique is None or self._server is not None:
            return
        # The server must not keep the manager alive, which closes it at its end.
        reference = weakref.ref(self)

        def may_keep(name: ShardName, manifest: Manifest) -> str:
            manager = reference()
            if manager is None or manager._lock is None:  # noqa: SLF001 - ours
                return "this rank does not save"
            try:
                manager._check_identity(str(name), manifest.identity, name)  # noqa: SLF001 - ours
            except DamagedCheckpointError as error:
                return str(error)
            return ""

        group = clique.local_group
        links = connect_clique(group, self._directory(), may_keep, self._peer_timeout_s)
        # All ranks, not only those of the clique: the others would wait in the next exchange.
        if not self._agreement.all_true(not links.problem and links.server is not None):
            if links.server is not None:
                links.server.close()
            problems = self._agreement.gather_problems(links.problem)
            raise CheckpointingException(f"copies cannot be exchanged: {problems}")
        assert links.server is not None
        self._server, self._peers = links.server, links.peers
        self._one_machine = not self._agreement.all_true(not links.one_machine)
        self._end = weakref.finalize(self, self._server.close)

    def close(self) -> None:
        """Wait for the removal of old shards and stop keeping copies for other ranks.

        Call it when no rank saves or loads any more; a garbage-collected manager does the same. A
        file system that hangs delays it by at most 10 s.
        """
        removal, self._removal = self._removal, None
        if removal is not None and not removal.ended.wait(_CLOSE_S):
            path = self._directory().path
            logger.warning("%s: old shards are not removed after %.1f s", path, removal.age_s())
        if self._server is not None:
            self._server.close()
            self._server, self._peers = None, ()
        self._lock = None

    def _clique(self) -> int:
        clique = self._clique_strategy()
        return super()._clique() if clique is None else min(clique.local_group.ranks)

    def _look_for_latest(
        self, below: int | None = None, *, unusable: Collection[CkptID] = ()
    ) -> int:
        self._connect_clique()
        found = super()._look_for_latest(below, unusable=unusable)
        if found != -1:
            self._complete.add(found)
        return found

    def _retrieve(
        self, ckpt_id: CkptID, state: TensorAwareStateDict | None
    ) -> TensorAwareStateDict | None:
        if self._clique_strategy() is None:
            return super()._retrieve(ckpt_id, state)
        # Whoever has its shard answers the others, in threads.
        return state if state is not None else self._load_from_peers(ckpt_id)

    def _load_from_peers(self, ckpt_id: CkptID) -> TensorAwareStateDict | None:
        name = ShardName(ckpt_id[0], ckpt_id[1])
        sources: list[PeerSource] = []
        manifests: list[Manifest] = []
        try:
            for peer in self._peers:
                try:
                    sources.append(PeerSource(peer, name))
                    manifests.append(read_manifest(sources[-1]))
                    self._check_identity(sources[-1].name, manifests[-1].identity, name)
                except (OSError, DamagedCheckpointError) as error:
                    logger.warning("no copy of shard %s to be had: %s", ckpt_id, error)
                    if len(sources) > len(manifests):
                        manifests.append(Manifest(self._identity(ckpt_id), ""))
            usable = [manifest for manifest in manifests if manifest.records]
            if not usable:
                return None
            same = [s for s, m in zip(sources, manifests, strict=True) if m == usable[0]]
            state: TensorAwareStateDict = load_state(
                usable[0], same, strict=self._is_strict(), verify=self._verify
            )
        # As for an own shard: a damaged copy can raise anything while it is put together.
        except Exception as error:  # noqa: BLE001
            logger.warning("the copies of shard %s are not usable: %s", ckpt_id, error)
            return None
        finally:
            for source in sources:
                source.close()
        return state

    def _is_strict(self) -> bool:
        return self._load_policy == "strict"

    def _file_call(
        self, state_dict: TensorAwareStateDict, ckpt_id: CkptID, peers: tuple[Peer, ...] = ()
    ) -> SaveCall:
        parts = split_state(state_dict)
        lengths = [storage.nbytes for storage in parts.storages]
        content = ShardContent(
            self._identity(ckpt_id),
            parts.state_class,
            parts.skeleton,
            tuple(zip(lengths, parts.names, strict=True)),
        )
        root = os.fspath(self.root_local_ckpt_dir)
        job = SaveJob(root, str(self.session_id), self._agreement.rank, content, peers)
        return SaveCall(run_save_job, (job, parts.storages), [ckpt_id], nbytes=sum(lengths))

    def _load_together(self, iteration: int) -> TensorAwareStateDict | None:
        state = super()._load_together(iteration)
        if state is None:
            # It must not take the place of one that can be loaded when old ones are removed.
            self._complete.discard(iteration)
        return state

    def _prepare(
        self, state_dict: TensorAwareStateDict, iteration: int, *, is_async: bool
    ) -> SaveCall:
        self._connect_clique()
        if self._one_machine and not self._allow_same_machine:
            raise SameMachineReplicationException(self._ckpt_id(iteration))
        return super()._prepare(state_dict, iteration, is_async=is_async)

    def _begin_save(self, iteration: int) -> None:
        self.wait_for_cleanup()
        directory = self._directory()
        directory.ensure()
        before, self._lock = self._lock, None  # it may be of a directory that is gone
        self._lock = directory.lock()
        del before
        directory.remove_leftovers()
        stale = [name for name in directory.names() if name.iteration == iteration]
        directory.remove([name for name in stale if name.suffix != DIRTY])

    def _finish_save(self, iteration: int, call: SaveCall, begin: float, *, is_async: bool) -> None:
        for ckpt_id in set(call.expected) & self._held():
            logger.info("saved %s", self._local_ckpt_path_from_id(ckpt_id))
        super()._finish_save(iteration, call, begin, is_async=is_async)

    def _finish_cleanup(self, iteration: int, *, in_background: bool) -> None:
        clean = functools.partial(self._cleanup_safely, iteration)
        if in_background:
            with contextlib.suppress(RuntimeError):  # the system gives no thread
                self._removal = AbandonableCall("local-cleanup", clean)
                return
        clean()

    def wait_for_cleanup(self) -> None:
        """Wait until shards that are no longer needed have been removed."""
        removal, self._removal = self._removal, None
        if removal is not None:
            removal.ended.wait()

    def _cleanup_safely(self, iteration: int) -> None:
        try:
            self._cleanup(iteration)
        # A file that cannot be removed costs space; the checkpoint itself is saved.
        except OSError as error:
            logger.warning("shards before iteration %d cannot be removed: %s", iteration, error)

    def _cleanup(self, iteration: int) -> None:
        directory = self._directory()
        names = [name for name in directory.names() if name.suffix != DIRTY]
        # What is older than all that this manager knows was kept by one before, as it was whole.
        # What lies between is left of saves that not all ranks could finish.
        first = min(self._complete, default=iteration)
        older = {n.iteration for n in names if n.iteration < iteration and not n.suffix}
        whole = sorted(number for number in older if number in self._complete or number < first)
        kept = {*whole[max(0, len(whole) - self._keep_last + 1) :], iteration}
        self._complete = {number for number in self._complete if number in kept} | {iteration}
        gone = [n for n in names if n.iteration <= iteration and n.iteration not in kept]
        gone += [n for n in names if n.suffix == DAMAGED]
        spare = {n.owner: n for n in gone if not n.suffix}  # the newest of each
        directory.remove([n for n in gone if n is not spare.get(n.owner)])
        directory.keep_as_spare(list(spare.values()))

    def _cleanup_failed_save(self, iteration: int) -> None:
        if self._server is not None:
            self._server.wait_for_stores(self._peer_timeout_s)
        if self._lock is None:
            return  # what lies there is another process's
        directory = self._directory()
        try:
            directory.remove_leftovers()
            directory.remove([n for n in directory.names() if n.iteration == iteration])
            directory.keep_as_spare([])  # the next attempt may need the space
        except OSError as error:
            logger.warning("shards of iteration %d cannot be removed: %s", iteration, error)

    def _failure_note(self) -> str:
        path = self._directory().path
        try:
            notes = self._directory().remove_leftovers()
        except OSError as error:
            return str(error)
        if not notes and not os.path.isdir(path):
            notes = [f"{path} is gone: create or mount it"]
        return "; ".join(notes)


_OWN_SAVE: Any = LocalCheckpointManager._save  # noqa: SLF001 - to notice a replaced `_save`
