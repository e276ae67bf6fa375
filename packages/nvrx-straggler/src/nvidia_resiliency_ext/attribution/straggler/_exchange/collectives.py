# SPDX-License-Identifier: Apache-2.0
"""What ranks tell each other for a report: two collectives when nothing is new.

The first is one minimum over a vector of fixed length: a header by which ranks notice that their
tables, settings or node names differ, and the medians. Its length does not depend on any table, so
a rank that has lost its tables cannot make it fail. The second collects one row per rank.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist

from nvidia_resiliency_ext.attribution.straggler import dist_utils
from nvidia_resiliency_ext.shared_utils.console import plain

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch.distributed import ProcessGroup

    from nvidia_resiliency_ext.attribution.straggler._scores.scoring import Array

SETTINGS_BYTES = 4096
"""Size of the message that carries changed settings."""

_PROTOCOL = 3
_HEADER = 16
_BLOCK = 4096
_NODE_BYTES = 255
_HALF_DIGEST = 6


@dataclass(frozen=True)
class RankState:
    """State of one rank in the header of an exchange.

    Attributes:
        tables: Digest of its tables of names, 16 bytes.
        proposed: Digest of its tables with the new names of its window, 16 bytes.
        settings_version: Version of the settings that it works with; rank 0 may have a newer one
            to give.
        step_time: Its median step time, s; infinity when unknown.
        needs_nodes: It does not know the nodes of all ranks, and should.
        node: The name of its node.
    """

    tables: bytes = bytes(16)
    proposed: bytes = bytes(16)
    settings_version: int = 0
    step_time: float = math.inf
    needs_nodes: bool = False
    node: str = ""


@dataclass(frozen=True)
class Agreement:
    """Result of the first collective, the same on all ranks.

    Attributes:
        same_tables: All ranks number names alike.
        same_proposal: All ranks number names alike with the new names of their windows, too.
        same_settings: All ranks work with the same version of the settings.
        step_time: The least step time of all ranks, s; infinity when unknown.
        needs_nodes: Some rank needs the nodes of all.
        longest_node: Bytes of the longest name of a node.
    """

    same_tables: bool
    same_proposal: bool
    same_settings: bool
    step_time: float
    needs_nodes: bool
    longest_node: int


def agree(state: RankState, medians: Array, group: ProcessGroup | None) -> tuple[Agreement, Array]:
    """Return the agreement of all ranks, and the least median of each of the first 4080 entries.

    The medians count only when all ranks propose the same tables.

    Raises:
        RuntimeError: A rank runs another version of this exchange.
    """
    vector = np.full(_BLOCK, np.inf)
    vector[:_HEADER] = _header(state)
    head = medians[: _BLOCK - _HEADER]
    vector[_HEADER : _HEADER + len(head)] = head
    least = _reduce_min(vector, group)
    return _read_header(least), least[_HEADER : _HEADER + len(head)]


def reduce_medians(head: Array, medians: Array, group: ProcessGroup | None) -> Array:
    """Return the least median of every entry; a collective only for those after the first 4080."""
    if len(medians) == len(head):
        return head
    return np.concatenate([head, _reduce_min(medians[len(head) :].copy(), group)])


def gather_medians(medians: Array, group: ProcessGroup | None) -> Array:
    """Return the medians of all ranks, shape `[ranks, entries]`, on every rank."""
    return _all_gather(medians, group).reshape(-1, len(medians))


def gather_rows(
    row: npt.NDArray[np.float32], vote: bool, group: ProcessGroup | None
) -> tuple[npt.NDArray[np.float32] | None, bool]:
    """Return the rows of all ranks on rank 0, None elsewhere, and whether all vote with True."""
    if dist_utils.get_world_size(group) == 1:
        return row.reshape(1, -1), vote
    rows = _all_gather(np.append(row, row.dtype.type(vote)), group).reshape(-1, len(row) + 1)
    return rows[:, :-1] if dist_utils.get_rank(group) == 0 else None, bool(rows[:, -1].all())


def gather_nodes(node: str, longest: int, group: ProcessGroup | None) -> list[str] | None:
    """Return the node of each rank on rank 0, None elsewhere; names are cut at 255 bytes."""
    slot = np.zeros(max(1, longest), dtype=np.uint8)
    data = _node_bytes(node)[:longest]
    slot[: len(data)] = np.frombuffer(data, dtype=np.uint8)
    gathered = dist_utils.gather_on_rank0(torch.from_numpy(slot), group)
    if gathered is None:
        return None
    texts = [item.numpy().tobytes().rstrip(b"\0") for item in gathered]
    names = {text: plain(text.decode("utf-8", "replace")) for text in set(texts)}
    return [names[text] for text in texts]


def broadcast_settings(settings: bytes, group: ProcessGroup | None) -> bytes:
    """Return rank 0's settings, of at most `SETTINGS_BYTES` bytes, on every rank."""
    buffer = np.zeros(SETTINGS_BYTES, dtype=np.uint8)
    buffer[: len(settings)] = np.frombuffer(settings, dtype=np.uint8)
    tensor = torch.from_numpy(buffer).to(dist_utils.get_device_for_backend(group))
    dist_utils.broadcast_from_rank0(tensor, group)
    return tensor.cpu().numpy().tobytes().rstrip(b"\0")


def _header(state: RankState) -> list[float]:
    """Return the header of a rank; a negated field gives the maximum."""
    fields = [
        *(_PROTOCOL, -_PROTOCOL),
        *_digest_fields(state.tables),
        *_digest_fields(state.proposed),
        *(state.settings_version, -state.settings_version),
        state.step_time,
        -state.needs_nodes,
        -len(_node_bytes(state.node)),
    ]
    return [*map(float, fields), *[0.0] * (_HEADER - len(fields))]


def _read_header(least: Array) -> Agreement:
    fields = least[:_HEADER].tolist()
    if (fields[0], -fields[1]) != (_PROTOCOL, _PROTOCOL):
        raise RuntimeError(
            f"ranks run versions {fields[0]:.0f} to {-fields[1]:.0f} of the report exchange:"
            " install the same nvrx-straggler on all nodes"
        )
    return Agreement(
        same_tables=fields[2] == -fields[3] and fields[4] == -fields[5],
        same_proposal=fields[6] == -fields[7] and fields[8] == -fields[9],
        same_settings=fields[10] == -fields[11],
        step_time=fields[12],
        needs_nodes=fields[13] < 0,
        longest_node=min(int(-fields[14]), _NODE_BYTES),
    )


def _digest_fields(digest: bytes) -> tuple[int, int, int, int]:
    """Return two numbers below 2**48 and their negatives: an exact minimum and maximum."""
    high = int.from_bytes(digest[:_HALF_DIGEST], "little")
    low = int.from_bytes(digest[_HALF_DIGEST : 2 * _HALF_DIGEST], "little")
    return high, -high, low, -low


def _reduce_min(vector: Array, group: ProcessGroup | None) -> Array:
    if dist_utils.get_world_size(group) == 1:
        return vector
    tensor = torch.from_numpy(vector).to(dist_utils.get_device_for_backend(group))
    dist_utils.all_reduce(tensor, op=dist.ReduceOp.MIN, group=group)
    least: Array = tensor.cpu().numpy()
    return least


def _all_gather(row: npt.NDArray[np.floating], group: ProcessGroup | None) -> npt.NDArray:  # type: ignore[type-arg]
    own = torch.from_numpy(row).to(dist_utils.get_device_for_backend(group))
    return dist_utils.all_gather_rows(own, group).cpu().numpy()


def _node_bytes(node: str) -> bytes:
    return node.encode("utf-8", "replace")[:_NODE_BYTES]
