# SPDX-License-Identifier: Apache-2.0
"""Objects sent between two ranks; torch has these functions itself from 2.4 on.

Objects are pickled: use them only inside the job's own process groups.
"""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed import recv_object_list, send_object_list

__all__ = [
    "call_with_only_valid_kwargs",
    "object_to_tensor",
    "recv_object_list",
    "send_object_list",
    "tensor_to_object",
]


def object_to_tensor(
    obj: Any, current_device: torch.device | str | None = None, group: Any = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pickle an object into a byte tensor.

    Args:
        obj: What to pickle.
        current_device: Where the tensors shall be; the CPU by default.
        group: Accepted for callers that pass torch's arguments; the device decides.

    Returns:
        The bytes, and their number as a tensor with one element.
    """
    del group
    data = torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8)
    device = torch.device("cpu") if current_device is None else current_device
    return data.to(device), torch.tensor([data.numel()], dtype=torch.long, device=device)


def tensor_to_object(tensor: torch.Tensor, tensor_size: Any, group: Any = None) -> Any:
    """Unpickle the first `tensor_size` bytes of a tensor from a rank of this job."""
    del group
    data = tensor.cpu()[: int(tensor_size)].contiguous()
    # A rank of this job made it: it runs the same program as we do.
    return pickle.loads(bytes(data.tolist()))  # noqa: S301


def call_with_only_valid_kwargs(fn: Callable[..., Any], **kwargs: Any) -> Any:
    """Call a function with those of the keyword arguments that it knows."""
    parameters = inspect.signature(fn).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return fn(**kwargs)
    return fn(**{name: value for name, value in kwargs.items() if name in parameters})
