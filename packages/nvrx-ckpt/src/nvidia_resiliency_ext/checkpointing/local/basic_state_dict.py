# SPDX-License-Identifier: Apache-2.0
"""`TensorAwareStateDict` over nested dicts, lists and tuples."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from nvidia_resiliency_ext.checkpointing.local._placeholder import (
    TensorPlaceholder,
    get_default_device_from_type,
)
from nvidia_resiliency_ext.checkpointing.local.base_state_dict import TensorAwareStateDict

__all__ = [
    "BasicTensorAwareStateDict",
    "TensorPlaceholder",
    "dict_list_map_inplace",
    "nested_values",
]


def nested_values(x: Any) -> Iterator[Any]:
    """Yield the leaves of nested dicts, lists and tuples.

    Args:
        x: The structure; anything that is no dict, list or tuple is a leaf.
    """
    if isinstance(x, dict):
        for value in x.values():
            yield from nested_values(value)
    elif isinstance(x, (list, tuple)):
        for value in x:
            yield from nested_values(value)
    else:
        yield x


def dict_list_map_inplace(f: Callable[[Any], Any], x: Any) -> Any:
    """Replace the leaves of nested dicts and lists by `f(leaf)`, in place.

    Tuples cannot change, so a new one takes the place of each.

    Returns:
        `x`, or `f(x)` when it is a leaf.
    """
    if isinstance(x, dict):
        for key, value in x.items():
            x[key] = dict_list_map_inplace(f, value)
        return x
    if isinstance(x, list):
        x[:] = [dict_list_map_inplace(f, value) for value in x]
        return x
    if isinstance(x, tuple):
        return _tuple_like(x, [dict_list_map_inplace(f, value) for value in x])
    return f(x)


class BasicTensorAwareStateDict(TensorAwareStateDict):
    """The state in nested dicts, lists and tuples, with tensors on the CPU or on CUDA devices.

    The structure is copied, so the caller's own dict never changes; the tensors are not.
    Each tensor returns to the device type that it came from, on the device that is current then.
    Tensors that share memory still do after a round trip through a file.

    Args:
        state_dict: The state. Other leaves than tensors must be of the types that
            `torch.load(weights_only=True)` accepts or that were registered with
            `torch.serialization.add_safe_globals`.

    Raises:
        TypeError: A dataclass in the state holds tensors; the message says where. Turn it into
            a dict first (`dataclasses.asdict` copies tensors, a dict of its fields does not).
        ValueError: A container holds itself.

    Example:
        >>> state = BasicTensorAwareStateDict({"step": 3, "weights": [torch.ones(2)]})
        >>> [tuple(tensor.shape) for tensor in state.tensors]
        [(2,)]
    """

    def __init__(self, state_dict: Any) -> None:
        self.state_dict = _copy_structure(state_dict, "state_dict", ())
        self._device_types: list[str] | None = None
        self._hollow = False

    def pop_tensors(self) -> list[torch.Tensor]:
        """Take the tensors out; a tensor that occurs more than once is returned once.

        Raises:
            RuntimeError: The state is hollow already.
        """
        if self._hollow:
            raise RuntimeError("the state is hollow already: its tensors were taken out before")
        popped: list[torch.Tensor] = []
        numbers: dict[int, int] = {}

        def take(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            if id(leaf) in numbers:
                return TensorPlaceholder(leaf, numbers[id(leaf)])
            numbers[id(leaf)] = len(popped)
            popped.append(leaf)
            return TensorPlaceholder(leaf)

        self.state_dict = dict_list_map_inplace(take, self.state_dict)
        self._hollow = True
        return popped

    @property
    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield the tensors in the order of `pop_tensors`."""
        if self._hollow:
            raise RuntimeError("the state is hollow: it has no tensors")
        found = (leaf for leaf in nested_values(self.state_dict) if isinstance(leaf, torch.Tensor))
        return iter({id(leaf): leaf for leaf in found}.values())

    @property
    def is_hollow(self) -> bool:
        """Return whether the tensors have been taken out."""
        return self._hollow

    def insert_tensors(self, tensor_data: Iterable[torch.Tensor]) -> None:
        """Put tensors into the hollow state.

        Args:
            tensor_data: As many tensors as `pop_tensors` returned, in its order.

        Raises:
            RuntimeError: The state is not hollow.
            ValueError: There are too few or too many tensors.
        """
        if not self._hollow:
            raise RuntimeError("the state has its tensors; take them out first")
        tensors = list(tensor_data)
        places = [p for p in nested_values(self.state_dict) if isinstance(p, TensorPlaceholder)]
        wanted = sum(place.same_as is None for place in places)
        if wanted != len(tensors):
            raise ValueError(f"the state has room for {wanted} tensors, got {len(tensors)}")
        following = iter(tensors)

        def put(leaf: Any) -> Any:
            if not isinstance(leaf, TensorPlaceholder):
                return leaf
            return next(following) if leaf.same_as is None else tensors[leaf.same_as]

        self.state_dict = dict_list_map_inplace(put, self.state_dict)
        self._hollow = False

    def init_tensors(self) -> None:
        """Fill the hollow state with uninitialised tensors."""
        places = [p for p in nested_values(self.state_dict) if isinstance(p, TensorPlaceholder)]
        self.insert_tensors(place.init_tensor() for place in places if place.same_as is None)

    def copy_tensors_to_cpu(self, non_blocking: bool = False) -> None:
        """Move the tensors to the CPU and remember their device types; CPU tensors stay.

        With `non_blocking` the data of CUDA tensors must not be read before the stream was
        synchronised.
        """
        self._device_types = [tensor.device.type for tensor in self.tensors]
        cpu = torch.device("cpu")
        moved = _move([*self.tensors], [cpu] * len(self._device_types), non_blocking=non_blocking)
        self._replace(moved)

    def restore_tensor_device(self, non_blocking: bool = True) -> None:
        """Move the tensors to the current device of the type from which each came.

        Args:
            non_blocking: Return before the copies have ended. Default True.
        """
        if self._device_types is None:
            return
        devices = [get_default_device_from_type(name) for name in self._device_types]
        self._replace(_move([*self.tensors], devices, non_blocking=non_blocking))

    def _replace(self, tensors: list[torch.Tensor]) -> None:
        by_id = {id(old): new for old, new in zip(self.tensors, tensors, strict=True)}
        self.state_dict = dict_list_map_inplace(
            lambda leaf: by_id.get(id(leaf), leaf), self.state_dict
        )


def _move(
    tensors: list[torch.Tensor], devices: list[torch.device], *, non_blocking: bool
) -> list[torch.Tensor]:
    """Return the tensors on the devices; tensors that share memory are moved together."""
    moved_storages: dict[tuple[int, str], torch.UntypedStorage] = {}
    moved = []
    for tensor, device in zip(tensors, devices, strict=True):
        if tensor.device.type == device.type:
            moved.append(tensor)
        elif type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.is_quantized:
            moved.append(tensor.detach().to(device, non_blocking=non_blocking))
        else:
            storage = tensor.untyped_storage()
            key = (storage.data_ptr(), str(device))
            if key not in moved_storages:
                flat = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
                there = flat.to(device, non_blocking=non_blocking)
                moved_storages[key] = there.untyped_storage()
            view = torch.empty(0, dtype=tensor.dtype, device=device)
            view.set_(moved_storages[key], tensor.storage_offset(), tensor.size(), tensor.stride())
            moved.append(view)
    return moved


def _copy_structure(x: Any, path: str, parents: tuple[int, ...]) -> Any:
    if isinstance(x, torch.Tensor):
        return x
    if id(x) in parents:
        raise ValueError(f"{path} holds a container that it is itself a part of")
    inside = (*parents, id(x))
    if isinstance(x, dict):
        # `copy` keeps the class and what it knows besides the entries (a default, an order).
        copy = x.copy()
        for key, value in x.items():
            copy[key] = _copy_structure(value, f"{path}[{key!r}]", inside)
        return copy
    if isinstance(x, (list, tuple)):
        values = [_copy_structure(v, f"{path}[{i}]", inside) for i, v in enumerate(x)]
        return values if isinstance(x, list) else _tuple_like(x, values)
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        for field in dataclasses.fields(x):
            for leaf in nested_values(getattr(x, field.name)):
                if isinstance(leaf, torch.Tensor):
                    place = f"{path}.{field.name}"
                    raise TypeError(
                        f"{place} holds a tensor inside the dataclass {type(x).__name__}; "
                        "only dicts, lists and tuples may hold tensors"
                    )
    return x


def _tuple_like(x: tuple[Any, ...], values: list[Any]) -> tuple[Any, ...]:
    if isinstance(x, torch.Size) or not hasattr(x, "_fields"):
        return x if isinstance(x, torch.Size) else tuple(values)
    return type(x)(*values)
