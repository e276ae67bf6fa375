# SPDX-License-Identifier: Apache-2.0
"""The one collective of the timeout calculation: maxima over ranks that agree on their sections.

Ranks whose sections differ must get an error, not a hang or mixed-up values. All ranks therefore
reduce a vector of one fixed length that also carries a fingerprint of the names, once as it is and
once negated: after a maximum the two agree only if every rank sent the same. Values beyond the
fixed length follow in a second reduction, when all are known to have the same number.
"""

import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .errors import TimeoutsCalcError

if TYPE_CHECKING:
    import torch

__all__ = ["max_over_ranks", "reduction_device_type"]

_FIRST_VALUES = 253  # with the three words of the head, 2 KiB
_NOTHING = -1.0


def reduction_device_type(backend_config: str) -> str:
    """Choose the device for a small reduction from torch's "device:backend,..." description.

    The CPU side is used when there is one, so that no device context and no synchronisation with a
    device is forced.
    """
    backends = dict(part.split(":", 1) for part in backend_config.split(",") if ":" in part)
    if "cpu" in backends or not backends:
        return "cpu"
    return next(iter(backends))


def max_over_ranks(values: Sequence[float], names: Sequence[str]) -> list[float]:
    """Return the element-wise maximum of `values` over the default process group.

    Args:
        values: this rank's numbers; as many on every rank that has the same `names`.
        names: what the numbers stand for; must be the same on all ranks.

    Raises:
        TimeoutsCalcError: torch.distributed is not initialised, or `names` differ between ranks.
    """
    # A program that has not imported torch has no process group, and need not wait for the import.
    dist = sys.modules.get("torch.distributed")
    if dist is None or not (dist.is_available() and dist.is_initialized()):
        raise TimeoutsCalcError(
            "timeouts of all ranks cannot be combined: torch.distributed is not initialised"
        )
    import torch

    device_type = reduction_device_type(dist.get_backend_config())
    device = torch.device(device_type)
    if device_type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())

    encoded_names = json.dumps(list(names)).encode()
    fingerprint = float(_fingerprint(encoded_names))
    padding = [_NOTHING] * (_FIRST_VALUES - len(values))
    first = torch.tensor(
        [fingerprint, -fingerprint, float(len(encoded_names)), *values[:_FIRST_VALUES], *padding],
        dtype=torch.float64,
        device=device,
    )
    dist.all_reduce(first, op=dist.ReduceOp.MAX)
    largest, negated_smallest, longest_names, *maxima = first.tolist()
    if largest != -negated_smallest:
        raise TimeoutsCalcError(
            _describe_difference(_gather_names(encoded_names, int(longest_names), device))
        )
    if len(values) <= _FIRST_VALUES:
        return maxima[: len(values)]
    rest = torch.tensor(values[_FIRST_VALUES:], dtype=torch.float64, device=device)
    dist.all_reduce(rest, op=dist.ReduceOp.MAX)
    return maxima + [float(value) for value in rest.tolist()]


def _fingerprint(encoded_names: bytes) -> int:
    import hashlib

    # Six bytes: a float64 holds them exactly.
    return int.from_bytes(hashlib.blake2b(encoded_names, digest_size=6).digest(), "big")


def _gather_names(
    encoded_names: bytes, longest_names: int, device: "torch.device"
) -> list[list[str]]:
    """Return every rank's names. Called by all ranks or by none."""
    import torch
    import torch.distributed as dist

    padded = encoded_names.ljust(longest_names, b" ")
    own = torch.tensor(list(padded), dtype=torch.uint8, device=device)
    gathered = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, own)
    return [json.loads(bytes(tensor.tolist())) for tensor in gathered]


def _describe_difference(names_of_ranks: Sequence[Sequence[str]]) -> str:
    ranks_by_names: dict[tuple[str, ...], list[int]] = {}
    for rank, names in enumerate(names_of_ranks):
        ranks_by_names.setdefault(tuple(names), []).append(rank)
    groups = "; ".join(
        f"ranks {_short_list(ranks)} have {list(names)}" for names, ranks in ranks_by_names.items()
    )
    common = set(names_of_ranks[0]).intersection(*names_of_ranks)
    different = sorted(set().union(*names_of_ranks) - common)
    return f"sections {different} are not configured on all ranks: {groups}"


def _short_list(ranks: Sequence[int], limit: int = 16) -> str:
    shown = ",".join(str(rank) for rank in ranks[:limit])
    return shown if len(ranks) <= limit else f"{shown},... ({len(ranks)} in all)"
