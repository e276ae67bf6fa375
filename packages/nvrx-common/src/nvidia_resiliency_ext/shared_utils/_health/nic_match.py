# SPDX-License-Identifier: Apache-2.0
"""Which network adapter is nearest to which GPU? Pure: it works on lists of PCI ancestors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .pci_address import natural_key

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["match_nics"]


def match_nics(
    gpus: Mapping[int, Sequence[str]], nics: Mapping[str, Sequence[str]]
) -> dict[int, str]:
    """Return an adapter for each GPU that has a PCI ancestor in common with one.

    The closest pairs are joined first, each adapter to one GPU; GPUs that are left share the
    adapter that is closest to them.

    Args:
        gpus: PCI ancestors of each GPU, nearest first.
        nics: PCI ancestors of each adapter.
    """
    distances = {
        (gpu, nic): distance
        for gpu, above_gpu in gpus.items()
        for nic, above_nic in nics.items()
        if (distance := _distance(above_gpu, above_nic)) is not None
    }
    ordered = sorted(
        distances, key=lambda pair: (distances[pair], pair[0], natural_key(pair[1]), pair[1])
    )
    matched: dict[int, str] = {}
    used: set[str] = set()
    for gpu, nic in ordered:
        if gpu not in matched and nic not in used:
            matched[gpu] = nic
            used.add(nic)
    for gpu, nic in ordered:
        matched.setdefault(gpu, nic)
    return dict(sorted(matched.items()))


def _distance(above_gpu: Sequence[str], above_nic: Sequence[str]) -> int | None:
    """Return the bridges between two devices below their nearest common one."""
    places = {bridge: steps for steps, bridge in enumerate(above_nic)}
    for steps, bridge in enumerate(above_gpu):
        if bridge in places:
            return steps + places[bridge]
    return None
