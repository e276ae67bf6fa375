# SPDX-License-Identifier: Apache-2.0
"""Plan and finalise an asynchronous DCP save; a queue runs the write between them."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import inspect
import os
import pickle
import zlib
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import (
    CheckpointException,
    _is_wrapped_exception,
    _wrap_exception,
)
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.utils import _DistWrapper

from nvidia_resiliency_ext.checkpointing._places import place_of_cycle

from ._agreement import control_group

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import SavePlanner
    from torch.distributed.checkpoint.storage import WriteResult

    from .filesystem_async import FileSystemWriterAsync

__all__ = [
    "CheckpointMetadataCache",
    "get_metadata_caching_status",
    "init_checkpoint_metadata_cache",
    "save_state_dict_async_finalize",
    "save_state_dict_async_plan",
    "verify_global_md_reuse",
]

_cache: CheckpointMetadataCache | None = None


class CheckpointMetadataCache:
    """Keeps the plan of a save for later saves of a state with the same structure.

    The third save in a row with the same structure is the first that needs no planning.

    Attributes:
        cached_central_plan: This rank's part of the plan.
        cached_local_plan: The plan that this rank proposed.
        cached_global_metadata: Metadata of the last save (coordinator), or of the one loaded.
        validated_cache_reuse: Whether two saves in a row had the same plan.
        validated_loaded_metadata_reuse: Whether loaded metadata fits on all ranks.
        loaded_all_plans: The plans of all ranks in loaded metadata, or None.
        signature: Structure of the last state.
    """

    def __init__(self) -> None:
        self.cached_central_plan: SavePlan | None = None
        self.cached_local_plan: SavePlan | None = None
        self.cached_global_metadata: Metadata | None = None
        self.validated_cache_reuse = False
        self.validated_loaded_metadata_reuse = False
        self.loaded_all_plans: list[SavePlan] | None = None
        self.signature: bytes | None = None

    def set_cached_global_metadata(self, cached_global_metadata: Metadata) -> None:
        """Begin with the metadata of a checkpoint that was loaded.

        Args:
            cached_global_metadata: The metadata of that checkpoint.
        """
        self.cached_global_metadata = cached_global_metadata
        self.loaded_all_plans = getattr(cached_global_metadata, "all_local_plans", None)

    def set_cache_metadata(
        self, central_plan: SavePlan, local_plan: SavePlan, global_md_verify_reuse: bool = False
    ) -> None:
        """Keep the plans of a save, and record whether the central plan equals the one before.

        Args:
            central_plan: The plan as the coordinator returned it to this rank.
            local_plan: The plan as this rank proposed it.
            global_md_verify_reuse: Whether the plans in loaded metadata equal those of this save on
                all ranks (see `verify_global_md_reuse`). Default False.
        """
        self.validated_loaded_metadata_reuse = global_md_verify_reuse
        self.validated_cache_reuse = self.cached_central_plan is not None and bool(
            _compare_dataclasses(self.cached_central_plan, central_plan) == []
        )
        self.cached_central_plan = central_plan
        self.cached_local_plan = local_plan

    def prepare_save_state_dict_ret(
        self, rank: int, coordinator: int, ret: tuple[Any, Metadata | None, Any]
    ) -> tuple[Any, Metadata | None, Any]:
        """Return the result of planning, with cached metadata where the coordinator has none.

        Args:
            rank: This process's rank.
            coordinator: The rank that publishes.
            ret: The result of planning: writer, metadata or None, ranks that save.

        Returns:
            The same three, on the coordinator always with metadata.
        """
        writer, metadata, wrapper = ret
        if rank == coordinator:
            if metadata is None:
                metadata = copy.copy(self.cached_global_metadata)
            else:
                self.cached_global_metadata = metadata
        return writer, metadata, wrapper

    def get_cache_metadata(
        self,
    ) -> tuple[SavePlan | None, SavePlan | None, bool, list[SavePlan] | None]:
        """Return central plan, local plan, whether they may be reused, and loaded plans."""
        return (
            self.cached_central_plan,
            self.cached_local_plan,
            self.validated_cache_reuse,
            self.loaded_all_plans,
        )

    def get_metadata_caching_status(self) -> tuple[bool, bool]:
        """Return whether the plan, and whether loaded metadata, is reused."""
        return self.validated_cache_reuse, self.validated_loaded_metadata_reuse


def init_checkpoint_metadata_cache(cached_global_metadata: Metadata | None = None) -> None:
    """Create the cache that saves of this process use when none is passed.

    Args:
        cached_global_metadata: Metadata of the checkpoint that was loaded; None: none was.
    """
    global _cache  # noqa: PLW0603 - given
    _cache = CheckpointMetadataCache()
    if cached_global_metadata is not None:
        _cache.set_cached_global_metadata(cached_global_metadata)


def get_metadata_caching_status() -> tuple[bool, bool] | None:
    """Return the status of the cache of this process; None without one."""
    return None if _cache is None else _cache.get_metadata_caching_status()


def save_state_dict_async_plan(  # noqa: PLR0913, PLR0917 - given
    state_dict: dict[str, Any],
    storage_writer: FileSystemWriterAsync,
    process_group: dist.ProcessGroup | None = None,
    coordinator_rank: int = 0,
    planner: SavePlanner | None = None,
    enable_cache: bool = False,
    metadata_cache: CheckpointMetadataCache | None = None,
) -> tuple[FileSystemWriterAsync, Metadata | None, _DistWrapper]:
    """Plan a save on all ranks and let the writer prepare its part.

    Args:
        state_dict: The state to save.
        storage_writer: A new writer for this checkpoint.
        process_group: Ranks that save; None for all.
        coordinator_rank: Rank in the group that writes the metadata. Default 0.
        planner: Default `DefaultSavePlanner()`.
        enable_cache: Skip planning if the structure did not change on any rank. Default False.
        metadata_cache: The cache of plans; default the one of this process.

    Returns:
        The arguments of `save_state_dict_async_finalize`.

    Raises:
        CheckpointException: Planning failed on some rank; all ranks raise it.

    Example:
        >>> import functools, tempfile
        >>> from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncRequest
        >>> from nvidia_resiliency_ext.checkpointing.async_ckpt.filesystem_async import (
        ...     FileSystemWriterAsync)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     writer = FileSystemWriterAsync(folder)
        ...     planned = save_state_dict_async_plan({"weight": torch.ones(2)}, writer)
        ...     function, preload, args = writer.get_save_function_and_args()
        ...     finalize = functools.partial(save_state_dict_async_finalize, *planned)
        ...     AsyncRequest(function, args, [finalize], preload_fn=preload).execute_sync()
        ...     os.path.exists(f"{folder}/.metadata")
        True
    """
    wrapper = _DistWrapper(process_group, dist.is_initialized(), coordinator_rank)
    save = _Planning(state_dict, storage_writer, planner or DefaultSavePlanner(), wrapper)
    cache = None
    if enable_cache:
        cache = metadata_cache if metadata_cache is not None else _cache
        cache = cache if cache is not None else CheckpointMetadataCache()
    central, metadata = save.plan(cache)
    final = save.planner.finish_plan(central)
    storage_writer.prepare_write_data(final, save.planner)
    ret = (storage_writer, metadata, wrapper)
    if cache is not None:
        ret = cache.prepare_save_state_dict_ret(wrapper.rank, coordinator_rank, ret)
    storage_writer.publication = _Publication(*ret)
    return ret


class _Planning:
    """One save while it is planned."""

    def __init__(
        self,
        state_dict: dict[str, Any],
        writer: FileSystemWriterAsync,
        planner: SavePlanner,
        wrapper: _DistWrapper,
    ) -> None:
        self._state_dict = state_dict
        self._writer = writer
        self.planner = planner
        self._wrapper = wrapper
        self._local: SavePlan | None = None

    def plan(self, cache: CheckpointMetadataCache | None) -> tuple[SavePlan, Metadata | None]:
        """Return this rank's part of the plan, and the metadata on the coordinator."""
        if cache is None:
            central, metadata, _ = self._new_plan(None)
            return central, metadata
        # Whatever fails here on one rank is seen by all of them in the full planning.
        signature = self._signature()
        usable = signature is not None and cache.validated_cache_reuse
        same = usable and cache.signature == signature
        reuse = control_group(self._wrapper.group).all_true(same)
        if reuse and cache.cached_central_plan is not None:
            self._set_up_writer()
            self._writer.prepare_local_plan(cache.cached_central_plan)
            return cache.cached_central_plan, None
        central, metadata, verified = self._new_plan(cache)
        cache.set_cache_metadata(central, self._local or central, verified)
        cache.signature = signature
        return central, metadata

    def _new_plan(
        self, cache: CheckpointMetadataCache | None
    ) -> tuple[SavePlan, Metadata | None, bool]:
        planner, writer = self.planner, self._writer
        decentralized = getattr(planner, "can_run_decentralized_global_plan", False) and getattr(
            writer, "can_run_decentralized_global_plan", False
        )
        if decentralized:
            return self._decentralized_plan(cache)
        metadata: Metadata | None = None

        def global_step(plans: list[SavePlan]) -> list[SavePlan]:
            nonlocal metadata
            plans, metadata = planner.create_global_plan(plans)
            return list(writer.prepare_global_plan(plans))

        central: SavePlan = self._wrapper.reduce_scatter("plan", self._local_step, global_step)
        return central, metadata, False

    def _decentralized_plan(
        self, cache: CheckpointMetadataCache | None
    ) -> tuple[SavePlan, Metadata | None, bool]:
        planner: Any = self.planner
        local = self._local_step_on_all()
        loaded = None if cache is None else cache.loaded_all_plans
        verified = bool(
            loaded and verify_global_md_reuse(loaded, local, self._wrapper.rank, self._wrapper)
        )
        metadata: Any = None
        if verified and cache is not None:
            metadata = copy.copy(cache.cached_global_metadata)
        else:
            plans = self._wrapper.gather_object(local)
            if self._wrapper.is_coordinator and plans is not None:
                _, metadata = planner.create_global_plan(plans)
                metadata.all_local_plans = plans
        central = planner.create_decentralized_global_plan(local)
        central = self._writer.prepare_decentralized_global_plan(central)
        return central, metadata if self._wrapper.is_coordinator else None, verified

    def _local_step_on_all(self) -> SavePlan:
        """Return the local plan; what fails on one rank is raised on all of them."""
        failure, local = None, SavePlan([])
        try:
            local = self._local_step()
        except Exception as error:  # noqa: BLE001 - a planner may raise anything
            failure = _wrap_exception(error)
        if not control_group(self._wrapper.group).all_true(failure is None):
            failures = self._wrapper.all_gather_object(failure) or []
            raise CheckpointException("plan", {r: one for r, one in enumerate(failures) if one})
        return local

    def _local_step(self) -> SavePlan:
        try:
            self._set_up_planner()
        except RecursionError as error:
            place = place_of_cycle(self._state_dict)
            if not place:
                raise
            where = self._writer.checkpoint_id
            raise ValueError(f"{place} of the state for {where} is in itself") from error
        self._set_up_writer()
        local = self.planner.create_local_plan()
        self._local = self._writer.prepare_local_plan(local)
        return self._local

    def _set_up_planner(self) -> None:
        if "storage_meta" in inspect.signature(self.planner.set_up_planner).parameters:
            self.planner.set_up_planner(
                state_dict=self._state_dict,
                storage_meta=self._writer.storage_meta(),
                is_coordinator=self._wrapper.is_coordinator,
            )
        else:
            set_up: Any = self.planner.set_up_planner  # of an older form
            set_up(self._state_dict, self._wrapper.is_coordinator)

    def _set_up_writer(self) -> None:
        self._writer.set_up_storage_writer(self._wrapper.is_coordinator)

    def _signature(self) -> bytes | None:
        """Return a digest of the structure of the state; None where planning fails."""
        try:
            self._set_up_planner()
            # A plan holds for these ranks only: fewer ranks save what others have saved before.
            ranks = repr((self._wrapper.rank, _ranks_of(self._wrapper))).encode()
            if type(self.planner) is DefaultSavePlanner:
                return ranks + _state_signature(self.planner.state_dict)
            return ranks + _plan_signature(self.planner.create_local_plan())
        except Exception:  # noqa: BLE001 - it fails again in the full planning, which reports it
            return None


def _ranks_of(wrapper: _DistWrapper) -> list[int]:
    return dist.get_process_group_ranks(wrapper.group) if dist.is_initialized() else [0]


def save_state_dict_async_finalize(
    storage_writer: FileSystemWriterAsync,
    global_metadata: Metadata | None,
    dist_wrapper: _DistWrapper,
) -> None:
    """Publish a checkpoint whose files are written on all ranks; all ranks call it.

    Args:
        storage_writer: The writer that `save_state_dict_async_plan` was given.
        global_metadata: The metadata that planning returned; None except on the coordinator.
        dist_wrapper: The ranks that save, as planning returned them.

    Raises:
        CheckpointException: A rank could not write, or the coordinator could not publish; on all
            ranks, with the details on the coordinator.
    """
    publication = storage_writer.publication
    if not isinstance(publication, _Publication) or publication.metadata is not global_metadata:
        publication = _Publication(storage_writer, global_metadata, dist_wrapper)
    if not publication.begun:
        publication.gather()
        publication.write()
    publication.agree()


class _Publication:
    """The last step of a save: its metadata is written when all files are durable on all ranks.

    A queue takes the first two steps by itself, `write` in a thread.

    Args:
        writer: The writer of this rank.
        metadata: The metadata, on the coordinator.
        wrapper: The ranks that save.
    """

    def __init__(
        self, writer: FileSystemWriterAsync, metadata: Metadata | None, wrapper: _DistWrapper
    ) -> None:
        self.metadata = metadata
        self.place = os.path.normpath(writer.checkpoint_id)
        self.begun = False
        self._writer = writer
        self._wrapper = wrapper
        self._results: list[Any] | None = None
        self._failures: dict[int, Any] = {}

    def gather(self) -> bool:
        """Bring the results of all ranks to the coordinator; return whether this rank is it."""
        self.begun = True
        writer, wrapper = self._writer, self._wrapper
        results = writer.retrieve_write_results()
        failed = _is_wrapped_exception(results)
        manifest = writer.rank_manifest() if hasattr(writer, "rank_manifest") else None
        exchange = _exchange_of(wrapper)
        digest = 0 if failed else _results_digest(results)
        known = not failed and exchange.knows(digest, wrapper)
        numbers = control_group(wrapper.group).gather_numbers([
            int(failed), int(known), digest,
            *((manifest["crc32"], manifest["bytes"], manifest["rank"]) if manifest else (0, -1, 0)),
        ])  # fmt: skip
        if all(row[1] for row in numbers):
            self._results = exchange.results_of(numbers) if wrapper.is_coordinator else None
        else:
            self._results = wrapper.gather_object(results)
            if not any(row[0] for row in numbers):
                exchange.keep(digest, self._results, numbers)
        if not wrapper.is_coordinator or self._results is None:
            return False
        self._failures = {r: v for r, v in enumerate(self._results) if _is_wrapped_exception(v)}
        if not self._failures and self.metadata is None:
            unplanned = ValueError("the coordinator has no metadata of this save: plan it anew")
            self._failures = {wrapper.rank: _wrap_exception(unplanned)}
        writer.rank_manifests = _rank_manifests(numbers)
        return not self._failures

    def write(self, is_dropped: Callable[[], bool] = lambda: False) -> None:
        """Write the metadata on the coordinator, unless the save was dropped meanwhile."""
        if self._results is None or self._failures or self.metadata is None or is_dropped():
            return
        try:
            self._writer.finish(self.metadata, self._results)
        except Exception as error:  # noqa: BLE001 - all ranks must hear of it
            self._failures = {self._wrapper.rank: _wrap_exception(error)}

    def agree(self) -> None:
        """Raise on all ranks if one has failed, with the details on the coordinator."""
        if not control_group(self._wrapper.group).all_true(not self._failures):
            raise CheckpointException("write", self._failures)


def verify_global_md_reuse(
    loaded_all_plans: Sequence[SavePlan],
    local_plan: SavePlan,
    rank: int,
    dist_wrapper: _DistWrapper,
) -> bool:
    """Return whether the plans in loaded metadata are those of this save, on all ranks.

    Args:
        loaded_all_plans: The local plans of all ranks in the loaded metadata, by rank.
        local_plan: This rank's plan of the save.
        rank: This process's rank, an index of `loaded_all_plans`.
        dist_wrapper: The ranks that save; all of them call this.
    """
    same = rank < len(loaded_all_plans) and not _compare_dataclasses(
        local_plan, loaded_all_plans[rank]
    )
    return control_group(dist_wrapper.group).all_true(same)


class _ResultsExchange:
    """Results that the coordinator has already, so that only their digest must travel."""

    def __init__(self) -> None:
        self._sent: int | None = None
        self._kept: dict[int, tuple[int, list[WriteResult]]] = {}

    def knows(self, digest: int, wrapper: _DistWrapper) -> bool:
        """Return whether this rank has sent these results before."""
        complete = not wrapper.is_coordinator or len(self._kept) == wrapper.get_world_size()
        return complete and self._sent == digest

    def keep(
        self, digest: int, results: list[Any] | None, numbers: Sequence[Sequence[int]]
    ) -> None:
        """Keep the digest of the sent results, and the received results by rank."""
        self._sent = digest
        if results is not None:
            rows = zip(numbers, results, strict=True)
            self._kept = {rank: (row[2], part) for rank, (row, part) in enumerate(rows)}

    def results_of(self, numbers: Sequence[Sequence[int]]) -> list[Any]:
        """Return the results of all ranks; an error in place of those that are not the same."""
        found: list[Any] = []
        for rank, row in enumerate(numbers):
            digest, part = self._kept[rank]
            error = RuntimeError(f"rank {rank} has other results than it says")
            found.append(part if digest == row[2] else _wrap_exception(error))
        if any(map(_is_wrapped_exception, found)):
            self._kept = {}  # after an exchange that was broken off: all send theirs again
        return found


_exchanges: dict[tuple[int, ...], _ResultsExchange] = {}


def _exchange_of(wrapper: _DistWrapper) -> _ResultsExchange:
    ranks: tuple[int, ...] = (0,)
    if wrapper.use_dist:
        group = wrapper.group
        ranks = tuple(dist.get_process_group_ranks(dist.group.WORLD if group is None else group))
    return _exchanges.setdefault((*ranks, wrapper.coordinator_rank), _ResultsExchange())


def _results_digest(results: Any) -> int:
    return zlib.crc32(pickle.dumps([(r.index, r.size_in_bytes, r.storage_data) for r in results]))


def _rank_manifests(numbers: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
    from nvidia_resiliency_ext.checkpointing._manifest import rank_manifest_name

    return [
        {"name": rank_manifest_name(str(row[5])), "crc32": row[3], "bytes": row[4]}
        for row in numbers
        if row[4] >= 0
    ]


def _state_signature(state: dict[str, Any]) -> bytes:
    """Return a digest of the names, types, shapes and dtypes in a flat state."""
    parts: list[Any] = []
    for name, value in state.items():
        if type(value) in (torch.Tensor, torch.nn.Parameter):
            parts.append((name, value.shape, value.dtype, value.requires_grad))
        elif isinstance(value, torch.Tensor):
            placements = getattr(value, "placements", None)
            parts.append((name, type(value).__qualname__, value.shape, value.dtype, placements))
        else:
            parts.append((name, type(value).__qualname__))
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).digest()


def _plan_signature(plan: SavePlan) -> bytes:
    items = [(item.index, item.index.index, item.type, item.tensor_data) for item in plan.items]
    return hashlib.blake2b(repr(items).encode(), digest_size=16).digest()


def _compare_dataclasses(left: Any, right: Any) -> list[str]:
    """Return the names of the fields in which two plans differ; empty when they are equal."""
    if type(left) is not type(right):
        return ["type"]
    different = []
    for part in dataclasses.fields(left):
        a, b = getattr(left, part.name), getattr(right, part.name)
        if part.name == "items":
            same = len(a) == len(b) and all(
                x == y and x.index.index == y.index.index for x, y in zip(a, b, strict=True)
            )
        else:
            same = a == b
        if not same:
            different.append(part.name)
    return different
