# SPDX-License-Identifier: Apache-2.0
"""Faults made on purpose in a training run, to see that it recovers."""

from __future__ import annotations

import math
import os
import random
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nvidia_resiliency_ext.shared_utils.inject_fault import Fault, dispatch_fault_injection

from ._framework import module_available as is_module_available

if TYPE_CHECKING:
    from nvidia_resiliency_ext.shared_utils.inject_fault import DispatchedFault

__all__ = [
    "SimulatedFaultParams",
    "is_module_available",
    "parse_simulated_fault_params",
    "setup_simulated_fault",
]

_RANK_FAULTS = {"rank_killed": Fault.SIGKILL, "rank_hung": Fault.SIGSTOP}


@dataclass
class SimulatedFaultParams:
    """A fault that one rank makes happen to itself.

    Attributes:
        fault_type: `rank_killed` (SIGKILL), `rank_hung` (SIGSTOP), `random` (one of the two), or
            the name of a `shared_utils.inject_fault.Fault`, for example `SEGFAULT`.
        base_delay: Seconds from the start of training until the fault, 0 or more.
        rand_delay: Upper bound in seconds of a random time that is added to `base_delay`.
        rank_to_fail: Global rank of the victim; None lets rank 0 draw one.
        seed: Seed of all draws; None draws differently in each run.

    Raises:
        ValueError: The type is unknown, a delay is negative or not finite, or the rank is negative.

    Example:
        >>> SimulatedFaultParams("rank_hung", base_delay=30.0, rank_to_fail=1).rank_to_fail
        1
    """

    fault_type: str
    base_delay: float
    rand_delay: float = 0.0
    rank_to_fail: int | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        """Check the values."""
        known = ["random", *_RANK_FAULTS]
        if self.fault_type not in known and self.fault_type not in Fault.__members__:
            names = ", ".join([*known, *Fault.__members__])
            raise ValueError(f"fault_type {self.fault_type!r} is unknown; there are: {names}")
        for name in ("base_delay", "rand_delay"):
            value = getattr(self, name)
            if not 0.0 <= value < math.inf:
                raise ValueError(f"{name} must be 0 or more seconds, not {value!r}")
        if self.rank_to_fail is not None and self.rank_to_fail < 0:
            raise ValueError(f"rank_to_fail must be a global rank, not {self.rank_to_fail}")


def parse_simulated_fault_params(
    simulated_fault_params: SimulatedFaultParams | Mapping[str, Any] | None,
) -> SimulatedFaultParams | None:
    """Return the description of a fault, from a mapping of its fields too.

    Raises:
        ValueError: It is neither None, a `SimulatedFaultParams` nor a mapping of its fields, or a
            field is wrong.
    """
    params = simulated_fault_params
    if params is None or isinstance(params, SimulatedFaultParams):
        return params
    if not isinstance(params, Mapping):
        raise ValueError(  # noqa: TRY004 - callers catch this one
            f"simulated_fault_params must be SimulatedFaultParams or a mapping, not {params!r}"
        )
    try:
        return SimulatedFaultParams(**params)
    except TypeError as error:
        raise ValueError(f"simulated_fault_params {dict(params)!r}: {error}") from None


def setup_simulated_fault(fault_desc: SimulatedFaultParams) -> DispatchedFault | None:
    """Make the fault happen to the victim after its delay; return at once. All ranks call this.

    Args:
        fault_desc: What is to happen, when, and to which rank.

    Returns:
        A handle with `cancel()` on the victim, None on the other ranks.

    Raises:
        RuntimeError: torch.distributed is not initialised.
        ValueError: The job has no such rank.
    """
    from torch import distributed

    if not (distributed.is_available() and distributed.is_initialized()):
        raise RuntimeError(
            "a simulated fault needs an initialised process group; with one device, use"
            " Trainer(strategy='ddp')"
        )
    draw = random.Random(fault_desc.seed)  # noqa: S311 - no secret
    rank, world_size = distributed.get_rank(), distributed.get_world_size()
    victim = fault_desc.rank_to_fail
    if victim is None:
        choice = [draw.randrange(world_size)]
        distributed.broadcast_object_list(choice, src=0)
        victim = choice[0]
    if victim >= world_size:
        raise ValueError(f"rank_to_fail is {victim}, but the job has {world_size} ranks")
    if rank != victim:
        return None
    kind = fault_desc.fault_type
    if kind == "random":
        kind = draw.choice(sorted(_RANK_FAULTS))
    fault = _RANK_FAULTS.get(kind) or Fault[kind]
    delay = fault_desc.base_delay + fault_desc.rand_delay * draw.random()

    def announce() -> None:
        text = f"simulated fault: {fault.name} of rank {rank}, process {os.getpid()}"
        print(text, flush=True)  # noqa: T201 - so that logs of every kind show it
        print(text, file=sys.stderr, flush=True)  # noqa: T201

    return dispatch_fault_injection(fault, delay, announce)
