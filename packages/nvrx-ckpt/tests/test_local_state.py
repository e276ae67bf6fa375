# SPDX-License-Identifier: Apache-2.0
"""States of nested containers: taking tensors out, putting them back, and what is refused."""

import collections
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch

from nvidia_resiliency_ext.checkpointing.local.basic_state_dict import (
    BasicTensorAwareStateDict,
    TensorPlaceholder,
    dict_list_map_inplace,
    nested_values,
)
from nvidia_resiliency_ext.checkpointing.local.replication import _torch_future, torch_device_utils


class Pair(NamedTuple):
    """A tuple with names."""

    left: object
    right: object


def nested():
    shared = torch.arange(3)
    return {
        "a": shared,
        "again": shared,
        "list": [torch.ones(2), {"deep": torch.zeros(1)}],
        "tuple": (torch.ones(1), 5),
        "named": Pair(torch.ones(4), "x"),
        "ordered": collections.OrderedDict(k=torch.ones(5)),
        "plain": [1, "text", None],
    }


def test_tensors_go_out_and_come_back():
    """Popped tensors, inserted again, give the same state; a tensor that occurs twice stays one."""
    state = BasicTensorAwareStateDict(nested())
    before = list(state.tensors)
    popped = state.pop_tensors()
    assert [id(t) for t in popped] == [id(t) for t in before]
    assert state.is_hollow
    assert not [v for v in nested_values(state.state_dict) if isinstance(v, torch.Tensor)]
    with pytest.raises(RuntimeError, match="hollow already"):
        state.pop_tensors()
    with pytest.raises(ValueError, match="room for 6 tensors, got 5"):
        state.insert_tensors(popped[1:])
    state.insert_tensors(popped)
    assert state.state_dict["again"] is state.state_dict["a"]
    assert state.state_dict["named"] == Pair(popped[4], "x")
    assert isinstance(state.state_dict["ordered"], collections.OrderedDict)


def test_the_callers_dict_never_changes():
    """Taking the tensors out of the state leaves the dict that was given as it was."""
    given = nested()
    BasicTensorAwareStateDict(given).pop_tensors()
    assert all(isinstance(t, torch.Tensor) for t in (given["a"], given["list"][1]["deep"]))


def test_empty_tensors_take_the_place_of_lost_ones():
    """A hollow state can be filled with tensors of the recorded shapes and types."""
    state = BasicTensorAwareStateDict(nested())
    shapes = [(t.shape, t.dtype) for t in state.tensors]
    state.pop_tensors()
    state.init_tensors()
    assert [(t.shape, t.dtype) for t in state.tensors] == shapes


def test_moves_between_devices_keep_what_is_tied():
    """On the CPU a move there and back changes nothing, and shared memory stays shared."""
    state = BasicTensorAwareStateDict(nested())
    before = list(state.tensors)
    state.copy_tensors_to_cpu()
    state.restore_tensor_device()
    assert [t.data_ptr() for t in state.tensors] == [t.data_ptr() for t in before]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_tensors_return_to_their_device():
    """Tensors of both kinds of device return to the kind that they came from, and stay tied."""
    shared = torch.arange(6.0, device="cuda")
    given = {"gpu": shared, "view": shared[2:4], "cpu": torch.ones(2)}
    state = BasicTensorAwareStateDict(given)
    state.copy_tensors_to_cpu()
    assert {t.device.type for t in state.tensors} == {"cpu"}
    state.restore_tensor_device()
    torch.cuda.synchronize()
    found = state.state_dict
    assert [found[k].device.type for k in ("gpu", "view", "cpu")] == ["cuda", "cuda", "cpu"]
    assert found["view"].data_ptr() == found["gpu"][2:].data_ptr()


@dataclass
class Holder:
    """A dataclass with a tensor."""

    weights: torch.Tensor


def test_what_cannot_be_taken_apart_is_refused_with_its_place():
    """A tensor inside a dataclass and a container inside itself are errors that say where."""
    with pytest.raises(TypeError, match=r"state_dict\['x'\]\[0\]\.weights"):
        BasicTensorAwareStateDict({"x": [Holder(torch.ones(1))]})
    cyclic = {"inner": []}
    cyclic["inner"].append(cyclic)
    with pytest.raises(ValueError, match="itself a part of"):
        BasicTensorAwareStateDict(cyclic)


def test_leaves_are_mapped_in_place():
    """`dict_list_map_inplace` keeps dicts and lists and replaces their leaves."""
    given = {"a": [1, 2], "b": {"c": 3}}
    inner = given["a"]
    assert dict_list_map_inplace(lambda leaf: leaf * 2, given) == {"a": [2, 4], "b": {"c": 6}}
    assert given["a"] is inner
    assert list(nested_values(given)) == [2, 4, 6]


def test_placeholders_describe_tensors():
    """Placeholders give tensors of the recorded shape and type, and check what is put in."""
    tensor = torch.ones(2, 3, dtype=torch.float16)
    assert TensorPlaceholder(tensor).init_tensor().shape == (2, 3)
    place = torch_device_utils.TensorPlaceholder(tensor)
    assert place.device == torch.device("cpu")
    assert place.empty_like().dtype == torch.float16
    assert place.restore(tensor) is tensor
    with pytest.raises(AssertionError, match="expected"):
        place.restore(tensor.float())
    with pytest.raises(ValueError, match="'tpu'"):
        torch_device_utils.get_default_device_from_type("tpu")


def test_objects_become_tensors_and_back():
    """An object survives the way through a byte tensor; unknown keywords are left out of calls."""
    tensor, size = _torch_future.object_to_tensor({"a": [1, 2]})
    assert _torch_future.tensor_to_object(tensor, size) == {"a": [1, 2]}
    assert _torch_future.call_with_only_valid_kwargs(lambda a: a, a=1, b=2) == 1
    assert _torch_future.call_with_only_valid_kwargs(lambda **kw: kw, a=1, b=2) == {"a": 1, "b": 2}
