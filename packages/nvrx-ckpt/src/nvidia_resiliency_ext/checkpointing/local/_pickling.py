# SPDX-License-Identifier: Apache-2.0
"""Take a state apart into a pickled skeleton and the storages of its tensors, and back.

The skeleton is what `torch.save` writes as `data.pkl`. Unpickling it runs code that it names, so
that is done with a closed list of names; for state classes of the user's own program any name is
allowed, once the caller has checked where the bytes come from.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from nvidia_resiliency_ext.checkpointing._places import (
    parts_of,
    place_that_fails,
    place_where,
)
from nvidia_resiliency_ext.checkpointing.local.basic_state_dict import (
    BasicTensorAwareStateDict,
    TensorPlaceholder,
)

_STORAGE = "storage"
_OWN_CLASS = f"{BasicTensorAwareStateDict.__module__}.{BasicTensorAwareStateDict.__qualname__}"
_OWN_NAMES = {
    _OWN_CLASS: BasicTensorAwareStateDict,
    f"{TensorPlaceholder.__module__}.{TensorPlaceholder.__qualname__}": TensorPlaceholder,
}


class UnsafeSkeletonError(pickle.UnpicklingError):
    """A skeleton names something that may not be loaded; nothing of it was run."""


@dataclass(frozen=True)
class SplitState:
    """A state taken apart.

    Attributes:
        state_class: Module and name of its class.
        skeleton: The pickled state without the bytes of its tensors.
        storages: These bytes: uint8 tensors that share the memory of the state's tensors.
        names: For each storage a tensor that lies in it, as far as one was found.
    """

    state_class: str
    skeleton: bytes
    storages: list[torch.Tensor]
    names: list[str]


def split_state(state: Any) -> SplitState:
    """Take a state apart; tensors that share memory share a storage.

    Args:
        state: A state whose tensors are on the CPU; others are copied to it.

    Raises:
        TypeError: The state holds something that cannot be pickled, or, in a
            `BasicTensorAwareStateDict`, that could not be loaded again without running code; the
            message says where.
    """
    buffer = io.BytesIO()
    pickler = _Pickler(buffer)
    try:
        pickler.dump(state)
    # Whatever a user's class raises while it is pickled ends up here.
    except Exception as error:
        place = place_that_fails(state, lambda item: _Pickler(io.BytesIO()).dump(item))
        raise TypeError(f"{place} cannot be saved: {error}") from error
    name = _name_of(type(state))
    if runs_no_code(name):
        allowed = _allowed_names()
        foreign = sorted(pickler.named - allowed.keys())
        if foreign:
            raise TypeError(
                f"{_place_of_name(state, foreign[0])} has the type {foreign[0]}, which could not "
                "be loaded without running foreign code; leave it out, turn it into plain values, "
                "or allow it with torch.serialization.add_safe_globals"
            )
    storages = list(pickler.storages.values())
    names = [""] * len(storages)
    for path, tensor in _tensors_by_path(state):
        number = pickler.number_of(tensor)
        if number is not None and not names[number]:
            names[number] = path
    return SplitState(name, buffer.getvalue(), storages, names)


def runs_no_code(state_class: str) -> bool:
    """Return whether states of this class load with a closed list of names."""
    return state_class == _OWN_CLASS


def join_state(
    skeleton: bytes | bytearray, storages: Sequence[torch.Tensor], *, any_name: bool
) -> Any:
    """Put a state together again.

    Args:
        skeleton: What `split_state` returned, from a place that the caller has checked.
        storages: The bytes of the storages, as uint8 tensors; the state will use their memory.
        any_name: Whether the skeleton may name anything that can be imported. Such a skeleton can
            run any code.

    Raises:
        UnsafeSkeletonError: It names something that is not on the list.
        Exception: Whatever the classes of the state raise while they are put together.
    """
    return _Unpickler(io.BytesIO(skeleton), storages, any_name=any_name).load()


class _Pickler(pickle.Pickler):
    """Pickles as `torch.save` does, and keeps the storages aside."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=2)
        self.storages: dict[int, torch.Tensor] = {}
        self.named: set[str] = set()
        self._numbers: dict[int, int] = {}
        self._kept: list[Any] = []

    def persistent_id(self, obj: Any) -> Any:
        """Return the reference to a storage in the skeleton; None for all else."""
        typed: Any = obj
        if isinstance(obj, torch.storage.TypedStorage):
            # torch's own serialisation asks a storage for the same.
            untyped, elements = typed._untyped_storage, typed._size()  # noqa: SLF001
            kind = getattr(torch, typed._pickle_storage_type())  # noqa: SLF001
        elif isinstance(obj, torch.UntypedStorage):
            untyped, kind, elements = obj, torch.UntypedStorage, obj.nbytes()
        else:
            return None
        return (_STORAGE, kind, str(self._number(untyped)), "cpu", elements)

    def reducer_override(self, obj: Any) -> Any:
        """Note which classes and functions the skeleton names."""
        if isinstance(obj, type) or (callable(obj) and hasattr(obj, "__qualname__")):
            self.named.add(_name_of(obj))
        return NotImplemented

    def number_of(self, tensor: torch.Tensor) -> int | None:
        """Return the number of the storage that a tensor lies in."""
        try:
            return self._numbers.get(tensor.untyped_storage()._cdata)  # noqa: SLF001
        except (NotImplementedError, RuntimeError):
            return None  # a tensor without memory of its own, such as a wrapper around others

    def _number(self, untyped: torch.UntypedStorage) -> int:
        key = untyped._cdata  # noqa: SLF001 - two wrappers of one storage differ as objects
        if key not in self._numbers:
            number = self._numbers[key] = len(self._numbers)
            here: Any = untyped
            self._kept.append(untyped)
            host = untyped if untyped.device.type == "cpu" else here.cpu()
            flat = torch.empty(0, dtype=torch.uint8).set_(host)
            self.storages[number] = flat
        return self._numbers[key]


class _Unpickler(pickle.Unpickler):
    """Loads a skeleton; names outside of the list are refused before anything of them runs."""

    def __init__(
        self, file: io.BytesIO, storages: Sequence[torch.Tensor], *, any_name: bool
    ) -> None:
        super().__init__(file)
        self._storages = storages
        self._any_name = any_name
        self._allowed = _allowed_names()
        self._typed: dict[tuple[str, int], Any] = {}

    def find_class(self, module: str, name: str) -> Any:
        """Return the object of a name in the skeleton, if it may be loaded."""
        found = self._allowed.get(f"{module}.{name}")
        if found is not None:
            return found
        if not self._any_name:
            raise UnsafeSkeletonError(
                f"{module}.{name} is not on the list of what may be loaded without running code"
            )
        return super().find_class(module, name)

    def persistent_load(self, pid: Any) -> Any:
        """Return the storage that a part of the skeleton stands for."""
        kind, storage_type, key, _, elements = pid
        if kind != _STORAGE or not 0 <= int(key) < len(self._storages):
            raise UnsafeSkeletonError(
                f"the skeleton refers to {kind!r} {key!r}, which is not there"
            )
        untyped = self._storages[int(key)].untyped_storage()
        dtype = torch.uint8 if storage_type is torch.UntypedStorage else storage_type.dtype
        if elements * dtype.itemsize > untyped.nbytes():
            raise UnsafeSkeletonError(f"storage {key} is shorter than the skeleton says")
        where = (key, id(dtype))
        if where not in self._typed:
            make: Any = torch.storage.TypedStorage
            self._typed[where] = make(wrap_storage=untyped, dtype=dtype, _internal=True)
        return self._typed[where]


def _allowed_names() -> dict[str, Any]:
    """Return the names that `torch.load(weights_only=True)` allows, and our own classes."""
    # torch keeps the list in a private module; its users can only add to it.
    from torch import _weights_only_unpickler as torch_list

    allowed: dict[str, Any] = dict(torch_list._get_allowed_globals())  # noqa: SLF001
    for item in torch.serialization.get_safe_globals():
        entry = item if isinstance(item, tuple) else (item, _name_of(item))
        allowed[entry[1]] = entry[0]
    return {**_plain_names(), **allowed, **_OWN_NAMES}


def _plain_names() -> dict[str, Any]:
    import collections
    import datetime as dt

    classes = [
        collections.OrderedDict, collections.defaultdict, collections.deque, collections.Counter,
        dt.date, dt.datetime, dt.time, dt.timedelta, dt.timezone,
        set, frozenset, complex, bytearray, slice, range, list, dict, tuple, int, float, str, bool,
        object,
    ]  # fmt: skip
    names: dict[str, Any] = {_name_of(item): item for item in classes}
    # How protocol 2 writes these classes and functions down.
    old: dict[str, Any] = {
        f"__builtin__.{item.__name__}": item for item in classes if _is_builtin(item)
    }
    old["__builtin__.xrange"] = range
    old["copy_reg._reconstructor"] = names["copyreg._reconstructor"] = _reconstruct
    names["_codecs.encode"] = _encode
    return {**names, **old}


def _is_builtin(item: type) -> bool:
    return item.__module__ == "builtins"


def _reconstruct(cls: type, base: type, state: Any) -> Any:
    """Make an object as `copyreg` does; the class itself has passed the list before."""
    if base is object:
        return object.__new__(cls)
    return base.__new__(cls, state)


def _encode(text: str, encoding: str = "latin1") -> bytes:
    if encoding != "latin1":
        raise UnsafeSkeletonError(f"bytes in the encoding {encoding!r}")
    return text.encode("latin1")


def _name_of(item: Any) -> str:
    module = getattr(item, "__module__", None) or "builtins"
    return f"{module}.{item.__qualname__}"


def _tensors_by_path(state: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors and where they are; looks into dicts, lists, tuples and attributes."""
    seen: set[int] = set()
    waiting: list[tuple[str, Any]] = [("", state)]
    while waiting:
        path, item = waiting.pop()
        if isinstance(item, torch.Tensor):
            yield path, item
        elif id(item) not in seen:
            seen.add(id(item))
            waiting.extend(parts_of(path, item))


def _place_of_name(state: Any, name: str) -> str:
    def names(item: Any) -> bool:
        pickler = _Pickler(io.BytesIO())
        pickler.dump(item)
        return name in pickler.named

    return place_where(state, names)
