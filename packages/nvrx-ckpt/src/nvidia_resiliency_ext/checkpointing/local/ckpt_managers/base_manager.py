# SPDX-License-Identifier: Apache-2.0
"""Save, find and load checkpoints of which each rank keeps its own part, on all ranks together."""

from __future__ import annotations

import functools
import logging
import operator
import time
import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

from nvidia_resiliency_ext.checkpointing._errors import DamagedCheckpointError
from nvidia_resiliency_ext.checkpointing.async_ckpt._agreement import control_group
from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncRequest
from nvidia_resiliency_ext.checkpointing.local._pickling import join_state, split_state
from nvidia_resiliency_ext.checkpointing.local.base_state_dict import TensorAwareStateDict
from nvidia_resiliency_ext.checkpointing.local.ckpt_managers._agreement import (
    gather_held,
    latest_iteration,
)
from nvidia_resiliency_ext.checkpointing.local.replication.strategies import (
    NoReplicasAvailableError,
    ReplicationStrategy,
)
from nvidia_resiliency_ext.shared_utils.events import CkptLoad, CkptSave, EventLog

__all__ = [
    "BaseCheckpointManager",
    "CheckpointingException",
    "CkptID",
    "SameMachineReplicationException",
]

logger = logging.getLogger(__name__)

CkptID = tuple[int, int, Any]


class CheckpointingException(Exception):  # noqa: N818 - the name is public
    """A local checkpoint could not be saved or loaded; all ranks raise it together."""


class SameMachineReplicationException(CheckpointingException):
    """A rank's only copies lie on its own machine, so they would be lost with it.

    Args:
        ckpt_id: The checkpoint.
    """

    def __init__(self, ckpt_id: CkptID) -> None:
        super().__init__(ckpt_id)
        self.ckpt_id = ckpt_id

    def __str__(self) -> str:
        return f"all copies of {self.ckpt_id} lie on the same machine"


@dataclass
class SaveCall:
    """How one rank writes its part of a checkpoint.

    Attributes:
        function: Writes the part; after a failure it returns a text or raises.
        args: Its arguments; the second one holds the tensors.
        expected: The shards that this rank has afterwards.
        problem: The reason why the part cannot be written, or empty.
        nbytes: Bytes of the tensors.
    """

    function: Callable[..., str | None] | None
    args: tuple[Any, ...]
    expected: list[CkptID]
    problem: str = ""
    nbytes: int = 0


class BaseCheckpointManager(ABC):
    """Saves, finds and loads checkpoints of which each rank keeps its own part.

    All ranks must call all methods in the same order. A subclass defines where the parts are
    kept.

    Args:
        session_id: Parts of other sessions are ignored.
        repl_strategy: Which ranks keep copies of which parts; None for no copies.

    Attributes:
        latest_iteration: Iteration that `find_latest` found or that was saved last; -1: unknown.
        globally_available_ids: For each rank the parts that it had at the last exchange.
    """

    def __init__(self, session_id: Any, repl_strategy: ReplicationStrategy | None = None) -> None:
        self.session_id = session_id
        self.repl_strategy = repl_strategy
        self.latest_iteration = -1
        self.globally_available_ids: dict[int, list[CkptID]] = {}
        self._agreement = control_group()
        self._events = EventLog.join(src="ckpt")

    @property
    def rank(self) -> int:
        """Return this process's global rank; 0, with a warning, without torch.distributed."""
        import torch.distributed as dist

        if not (dist.is_available() and dist.is_initialized()):
            warnings.warn("torch.distributed is not initialized: this is rank 0", stacklevel=2)
            return 0
        return self._agreement.rank

    def _ckpt_id(self, iteration: int) -> CkptID:
        """Return the id of this rank's own part.

        Raises:
            CheckpointingException: The iteration is negative.
        """
        if iteration < 0:
            raise CheckpointingException(f"iteration {iteration} is negative: there is none")
        return (iteration, self._agreement.rank, self.session_id)

    @abstractmethod
    def _my_ckpt_ids(self) -> Iterable[CkptID]:
        """Return the parts that this rank keeps."""

    @abstractmethod
    def _load(self, ckpt_id: CkptID) -> TensorAwareStateDict:
        """Return a part that this rank keeps; raise when it is not as it was saved."""

    @abstractmethod
    def _save(self, state_dict: TensorAwareStateDict, ckpt_id: CkptID) -> None:
        """Keep a part."""

    @abstractmethod
    def _cleanup(self, iteration: int) -> None:
        """Remove the parts of iterations before this one, which all ranks have now."""

    @abstractmethod
    def _cleanup_failed_save(self, iteration: int) -> None:
        """Remove the parts of an iteration that not all ranks have."""

    def _begin_save(self, iteration: int) -> None:
        """Prepare for a save: after this, this rank holds no part of that iteration."""
        del iteration

    def _set_aside(self, ckpt_id: CkptID) -> None:
        """Note that a part is not as it was saved."""
        del ckpt_id

    def _finish_cleanup(self, iteration: int, *, in_background: bool) -> None:
        """Call `_cleanup`, at once or in the background."""
        del in_background
        self._cleanup(iteration)

    def _failure_note(self) -> str:
        """Return the message of a failed save in another process."""
        return ""

    def _clique(self) -> int:
        """Return a number that is equal on ranks that can give each other their parts."""
        return self._agreement.rank if self.repl_strategy is None else 0

    def find_latest(self) -> int:
        """Return the newest iteration that can be loaded on every rank; -1 when there is none.

        The result is kept until the next save. Assign -1 to `latest_iteration` to search again.

        Example:
            >>> import tempfile
            >>> from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager import (
            ...     LocalCheckpointManager,
            ... )
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     LocalCheckpointManager(folder).find_latest()
            -1
        """
        if self.latest_iteration == -1:
            self.latest_iteration = self._look_for_latest()
        return self.latest_iteration

    def _look_for_latest(
        self, below: int | None = None, *, unusable: Collection[CkptID] = ()
    ) -> int:
        ids = self._held().difference(unusable)
        mine = [
            (i, owner)
            for i, owner, session in ids
            if session == self.session_id and (below is None or i < below)
        ]
        held = gather_held(self._agreement, self._clique(), mine)
        self.globally_available_ids = {
            rank: [(iteration, owner, self.session_id) for iteration, owner in sorted(one.shards)]
            for rank, one in enumerate(held)
        }
        return latest_iteration(held)

    def _held(self) -> set[CkptID]:
        """Return the parts that this rank keeps; none when they cannot be looked at."""
        try:
            return set(self._my_ckpt_ids())
        except OSError as error:
            logger.warning("local checkpoints of this rank cannot be used: %s", error)
            return set()

    def load(self) -> tuple[TensorAwareStateDict, CkptID]:
        """Return this rank's part of the newest checkpoint, with its tensors on their devices.

        If a part is damaged, its copy is loaded. Without a copy, all ranks load the next older
        iteration. The returned id contains the iteration.

        Returns:
            The state, and the id `(iteration, rank, session_id)`.

        Raises:
            CheckpointingException: There is no checkpoint, `find_latest` was not called, or a rank
                could not bring its tensors back to their devices; on all ranks.
        """
        if self.latest_iteration == -1:
            raise CheckpointingException(
                "no checkpoint is known: call find_latest() first and load only when it finds one"
            )
        if not self.globally_available_ids:
            self._look_for_latest()
        asked = iteration = self.latest_iteration
        begin = time.monotonic()
        while iteration != -1:
            state = self._load_together(iteration)
            if state is not None:
                self.latest_iteration = iteration
                self._restore_devices(state, iteration)
                seconds = time.monotonic() - begin
                self._record(CkptLoad, iteration, stall_s=seconds)
                return state, self._ckpt_id(iteration)
            logger.warning("iteration %d cannot be loaded on all ranks, trying an older", iteration)
            iteration = self._look_for_latest(below=iteration)
        self.latest_iteration = -1
        problem = (
            f"iteration {asked} is damaged or lost on at least one rank, and no older is whole"
        )
        self._record(CkptLoad, asked, problem)
        raise CheckpointingException(problem)

    def _restore_devices(self, state: TensorAwareStateDict, iteration: int) -> None:
        """Bring tensors back to their devices; what fails on one rank is raised on all."""
        problem = ""
        try:
            state.restore_tensor_device()
        # It may run out of device memory, or be a user's and raise anything.
        except Exception as error:
            logger.warning("the tensors cannot be brought back", exc_info=True)
            problem = f"{type(error).__name__}: {error}"
        if self._agreement.all_true(not problem):
            return
        text = self._agreement.gather_problems(problem)
        message = f"iteration {iteration} is whole, but cannot be brought back to its devices: "
        self._record(CkptLoad, iteration, message + text)
        raise CheckpointingException(message + text)

    def _load_together(self, iteration: int) -> TensorAwareStateDict | None:
        """Return this rank's part when every rank has got its own; None on all ranks otherwise."""
        ckpt_id = self._ckpt_id(iteration)
        state = None
        if ckpt_id in self.globally_available_ids[self._agreement.rank]:
            state = self._load_or_none(ckpt_id)
        if self._agreement.all_true(state is not None):
            return state
        if self.repl_strategy is None:
            return None
        state = self._retrieve(ckpt_id, state)
        return state if self._agreement.all_true(state is not None) else None

    def _load_or_none(self, ckpt_id: CkptID) -> TensorAwareStateDict | None:
        try:
            return self._load(ckpt_id)
        # A damaged part can raise anything while it is put together, and an exception on one rank
        # would leave the others waiting.
        except Exception as error:  # noqa: BLE001
            logger.warning("shard %s is not usable: %s", ckpt_id, error)
            # What lacks memory, threads or a class of the program can be loaded another time.
            if isinstance(error, DamagedCheckpointError):
                self._set_aside(ckpt_id)
            return None

    def _retrieve(
        self, ckpt_id: CkptID, state: TensorAwareStateDict | None
    ) -> TensorAwareStateDict | None:
        """Return this rank's part from a copy when it has none; all ranks call this together."""
        strategy = self.repl_strategy
        assert strategy is not None
        wanted = [ckpt_id] if state is None else []
        # What could not be read may still be listed: others must send it.
        unusable = set(wanted)
        while True:
            self._look_for_latest(unusable=unusable)
            needed: dict[Any, TensorAwareStateDict | None] = {}
            plan = None
            try:
                plan = strategy.retrieve_plan(self.globally_available_ids, wanted)
                needed = {id_: self._load_or_none(id_) for id_ in plan.required_ids()}
            except NoReplicasAvailableError as error:
                logger.warning("no copy of a shard is left: %s", error)
            lost = {id_ for id_, part in needed.items() if part is None}
            # Twice the same: the strategy, which may be a user's, knows no other holder.
            if not self._agreement.all_true(plan is not None and not lost & unusable):
                return state
            # A holder whose copy is damaged says so before anybody waits for it.
            if self._agreement.all_true(not lost):
                break
            unusable |= lost
        received: dict[Any, TensorAwareStateDict] = strategy.retrieve_execute(plan, needed)
        return received.get(ckpt_id, state)

    def save(
        self, state_dict: TensorAwareStateDict, iteration: int, is_async: bool = False
    ) -> AsyncRequest | None:
        """Save this rank's part of a checkpoint, and the copies that the strategy asks for.

        The previous checkpoint is kept until this one is complete on all ranks.

        Args:
            state_dict: The state; the manager takes it over.
            iteration: Training iteration; larger than the one that was saved or found before.
            is_async: Return a request for an `AsyncCallsQueue` instead of writing now. Its tensors
                are copied when it is scheduled. Default False.

        Returns:
            None, or the request.

        Raises:
            TypeError: The iteration is not an integer.
            AssertionError: The iteration is not larger than `latest_iteration`.
            CheckpointingException: A rank could not save; on all ranks. With `is_async` it is
                raised when the request is finalised.
        """
        iteration = operator.index(iteration)  # a number of numpy's or torch's, too
        if iteration <= self.latest_iteration:
            raise AssertionError(
                f"iteration {iteration} is not after iteration {self.latest_iteration}, "
                "which is saved already"
            )
        begin = time.monotonic()
        call = self._prepare(state_dict, iteration, is_async=is_async)
        finish = functools.partial(self._finish_save, iteration, call, begin, is_async=is_async)
        if is_async:
            return AsyncRequest(None if call.problem else call.function, call.args, [finish])
        if not call.problem and call.function is not None:
            call.problem = _problem_of(call.function, call.args)
        # What other ranks write on this one's behalf is there when they have all come to here.
        self._all_true(True, call.problem)
        finish()
        return None

    def _prepare(
        self, state_dict: TensorAwareStateDict, iteration: int, *, is_async: bool
    ) -> SaveCall:
        """Make all ranks begin the same save; what fails here is raised when the save finishes."""
        ckpt_id = self._ckpt_id(iteration)
        problem = ""
        try:
            self._begin_save(iteration)
        except OSError as error:
            problem = str(error)
        # From here on no rank has a part of that iteration from an earlier attempt, so a new one
        # can never be taken together with an old one.
        low, high = self._agreement.minimum([iteration, -iteration])
        if low != -high:
            raise CheckpointingException(
                f"the ranks save different iterations; this rank saves {iteration}"
            )
        # A state that cannot be saved on one rank must not leave the others waiting.
        try:
            if not problem:
                state_dict.copy_tensors_to_cpu()
        except Exception as error:
            logger.warning("%s cannot be saved", ckpt_id, exc_info=True)
            problem = f"{type(error).__name__}: {error}"
        if self._exchanges_objects() and not self._agreement.all_true(not problem):
            return SaveCall(None, (), [ckpt_id], problem or "not saved, as another rank cannot")
        try:
            if not problem:
                return self._save_call(state_dict, ckpt_id, is_async=is_async)
        except Exception as error:
            logger.warning("%s cannot be saved", ckpt_id, exc_info=True)
            problem = f"{type(error).__name__}: {error}"
        return SaveCall(None, (), [ckpt_id], problem)

    def _all_true(self, value: bool, problem: str) -> bool:
        """Return whether a value is true on all ranks; raise with `problem` if a rank is lost.

        Raises:
            CheckpointingException: The ranks cannot agree, and something went wrong before.
            RuntimeError: They cannot agree, and nothing is known that explains it.
        """
        try:
            return self._agreement.all_true(value)
        except RuntimeError as error:
            if not problem:
                raise
            raise CheckpointingException(f"{problem}; the ranks cannot agree: {error}") from error

    def _exchanges_objects(self) -> bool:
        """Return whether `_save_call` waits for other ranks; the same on all of them."""
        return self.repl_strategy is not None

    def _save_call(
        self, state_dict: TensorAwareStateDict, ckpt_id: CkptID, *, is_async: bool
    ) -> SaveCall:
        """Return how this rank writes its part and the copies of others' parts."""
        states, ids = [state_dict], [ckpt_id]
        if self.repl_strategy is not None:
            states, ids = self.repl_strategy.replicate(state_dict, ckpt_id)
        call = SaveCall(None, (ids, states), list(ids))
        if is_async:
            call.args = (ids, [_private_copy(state) for state in states])
            call.function = _InTrainer(self, call)
        else:
            call.function = self._save_all
        return call

    def _save_all(self, ids: list[CkptID], states: list[TensorAwareStateDict]) -> None:
        for ckpt_id, state in zip(ids, states, strict=True):
            self._save(state, ckpt_id)

    def _finish_save(self, iteration: int, call: SaveCall, begin: float, *, is_async: bool) -> None:
        """Make sure that all ranks have the iteration; then remove older ones, else this one."""
        problem = call.problem
        if not problem:
            mine = self._held()
            missing = [id_ for id_ in call.expected if id_ not in mine]
            if missing:
                problem = self._failure_note() or f"shards are not there: {missing}"
        seconds = time.monotonic() - begin
        if self._all_true(not problem, problem):
            self.latest_iteration = iteration
            self.globally_available_ids = {}  # as it was before; looked at again when it is loaded
            self._record(CkptSave, iteration, bytes=call.nbytes, write_s=seconds)
            self._finish_cleanup(iteration, in_background=is_async)
            return
        text = self._agreement.gather_problems(problem)
        self._cleanup_failed_save(iteration)
        message = f"iteration {iteration} could not be saved, earlier ones are untouched: {text}"
        self._record(CkptSave, iteration, message, write_s=seconds)
        raise CheckpointingException(message)

    def _record(
        self, kind: type[CkptSave | CkptLoad], iteration: int, error: str = "", **more: Any
    ) -> None:
        """Record that all ranks have saved or loaded a checkpoint, or that one could not."""
        result = "failed" if error else "ok"
        event = kind(iteration=iteration, mode="local", result=result, error=error or None, **more)
        self._events.record(event, cycle=None, rank=self._agreement.rank)


class _InTrainer:
    """Saves with a `_save` that may be anybody's, in a thread of the trainer.

    Args:
        manager: Whose `_save` is called.
        call: Gets to know what went wrong.
    """

    def __init__(self, manager: BaseCheckpointManager, call: SaveCall) -> None:
        self._manager = manager
        self._call = weakref.ref(call)

    def __call__(self, ids: list[CkptID], states: list[TensorAwareStateDict]) -> None:
        """Save the states; a failure is raised on all ranks when the save is finished."""
        problem = _problem_of(self._manager._save_all, (ids, states))  # noqa: SLF001 - ours
        call = self._call()
        if call is not None:
            call.problem = problem

    def __reduce__(self) -> Any:
        """Refuse to be sent to another process, where `_save` would not be the same."""
        raise TypeError(
            f"{type(self._manager).__name__} saves with a `_save` or a replication strategy of its "
            "own, which only the trainer can run; use AsyncCallsQueue(persistent=False)"
        )


def _private_copy(state: TensorAwareStateDict) -> TensorAwareStateDict:
    """Return a state with the same content in memory of its own."""
    parts = split_state(state)
    copies = [storage.clone() for storage in parts.storages]
    copy: TensorAwareStateDict = join_state(parts.skeleton, copies, any_name=True)
    return copy


def _problem_of(function: Callable[..., str | None], args: tuple[Any, ...]) -> str:
    try:
        return function(*args) or ""
    # A subclass's `_save` may raise anything; all ranks learn of it when the save is finished.
    except Exception as error:
        logger.warning("a local checkpoint could not be written", exc_info=True)
        return f"{type(error).__name__}: {error}"
