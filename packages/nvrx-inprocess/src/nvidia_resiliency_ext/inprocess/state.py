# SPDX-License-Identifier: Apache-2.0
"""State of a rank in a call: `State`, which the wrapper changes, and its frozen snapshot.

Callbacks get the snapshot. It shares its values with the state, so it costs nothing and works for
exceptions that cannot be copied.
"""

from __future__ import annotations

import dataclasses
import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import _inputs

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["FrozenState", "Mode", "State", "freeze_dataclass"]


class Mode(enum.Enum):
    """Role of a rank in this iteration."""

    INITIALIZED = enum.auto()
    ACTIVE = enum.auto()
    INACTIVE = enum.auto()
    TERMINATED = enum.auto()


def freeze_dataclass(cls: type[Any]) -> type[Any]:
    """Return a frozen dataclass with the fields of `cls`, named `Frozen` and its name.

    Raises:
        TypeError: `cls` is no dataclass.
    """
    fields = [(each.name, each.type, _same_field(each)) for each in dataclasses.fields(cls)]
    name = f"Frozen{cls.__name__}"
    frozen = dataclasses.make_dataclass(name, fields, frozen=True)
    frozen.__module__ = cls.__module__
    frozen.__doc__ = f"A snapshot of `{cls.__name__}`; assignment raises `FrozenInstanceError`."
    return frozen


def _same_field(field: dataclasses.Field[Any]) -> Any:
    names = ("default", "default_factory", "init", "repr", "hash", "compare", "metadata", "kw_only")
    options: Any = {name: getattr(field, name) for name in names}
    return dataclasses.field(**options)


@dataclass
class State:
    """State of a rank; the guide explains its three numbers.

    Attributes:
        rank: The wrapper's number for this rank; changes as ranks are lost.
        world_size: Number of surviving ranks.
        active_rank: The value of `RANK` in the function; `None` while the rank is a reserve rank.
        active_world_size: The value of `WORLD_SIZE` in the function.
        initial_rank: `RANK` at the call; never changes.
        initial_world_size: `WORLD_SIZE` at the call; never changes.
        iteration: 0 for the first run of the function, one more for each restart.
        mode: What the rank does.
        fn_exception: Exception of the function on this rank; `None` if only others failed.

    Example:
        >>> from nvidia_resiliency_ext.inprocess.state import State
        >>> State(rank=3, world_size=8).freeze().initial_rank
        3
    """

    rank: int | None
    world_size: int
    active_rank: int | None = None
    active_world_size: int | None = None
    initial_rank: int | None = None
    initial_world_size: int | None = None
    iteration: int = 0
    mode: Mode = Mode.INITIALIZED
    fn_exception: Exception | None = None

    def __post_init__(self) -> None:
        if self.initial_rank is None:
            self.initial_rank = self.rank
        if self.initial_world_size is None:
            self.initial_world_size = self.world_size

    @classmethod
    def from_env(cls) -> State:
        """Return the state at the call, from `RANK` (default 0) and `WORLD_SIZE` (default 1).

        Raises:
            ValueError: One of them is not a number.
        """
        return cls(_inputs.number("RANK", 0), _inputs.number("WORLD_SIZE", 1))

    def set_distributed_vars(self) -> None:
        """Export `RANK` and `WORLD_SIZE` for this iteration.

        A rank without active rank does not run the function; it gets the values from before the
        call, so that readers, such as callbacks, always find two consistent numbers.
        """
        rank, world_size = self.active_rank, self.active_world_size
        if rank is None or world_size is None:
            rank, world_size = self.initial_rank, self.initial_world_size
        if rank is not None and world_size is not None:
            _inputs.export_ranks(rank, world_size)

    def advance(self) -> None:
        """Begin the next iteration; release the exception and everything that its frames hold."""
        self.iteration += 1
        self.fn_exception = None

    def freeze(self) -> FrozenState:
        """Return a snapshot that shares its values, the exception above all, with this state."""
        return FrozenState(**vars(self))

    def copy_from(self, other: State | FrozenState, fields: Iterable[str] | None = None) -> None:
        """Copy fields of another state.

        Args:
            other: The state to copy from.
            fields: Names of the fields; None: all.

        Raises:
            ValueError: A name is no field; nothing was changed.
        """
        names = list(_NAMES if fields is None else fields)
        unknown = [name for name in names if name not in _NAMES]
        if unknown:
            raise ValueError(f"a state has no {unknown[0]!r}, only {', '.join(_NAMES)}")
        for name in names:
            setattr(self, name, getattr(other, name))


_NAMES = tuple(field.name for field in dataclasses.fields(State))

if TYPE_CHECKING:
    # What the call below builds, for tools that cannot run it; a test compares the two.
    @dataclass(frozen=True)
    class FrozenState:
        """A snapshot of `State`, with the same fields; assignment raises `FrozenInstanceError`.

        Attributes:
            rank: As in `State`, like all fields.
            world_size: Number of ranks that take part.
            active_rank: Rank that the function sees; None on a reserve rank.
            active_world_size: World size that the function sees.
            initial_rank: `RANK` at the call.
            initial_world_size: `WORLD_SIZE` at the call.
            iteration: Number of restarts so far.
            mode: Whether the rank is active, a reserve, or terminated.
            fn_exception: Exception that the function raised on this rank, or None.
        """

        rank: int | None
        world_size: int
        active_rank: int | None = None
        active_world_size: int | None = None
        initial_rank: int | None = None
        initial_world_size: int | None = None
        iteration: int = 0
        mode: Mode = Mode.INITIALIZED
        fn_exception: Exception | None = None

else:
    FrozenState = freeze_dataclass(State)
