# SPDX-License-Identifier: Apache-2.0
"""Workers on the NUMA node of their GPU: the words that go before a worker's command. Pure."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["NUMACTL", "NumaBinding"]

NUMACTL = "numactl"


@dataclass(frozen=True, slots=True)
class NumaBinding:
    """How workers are bound.

    Attributes:
        numactl: Path of the program that binds, and then becomes the worker.
        gpus_per_node: So many local ranks in a row share a NUMA node.
        is_strict: Whether memory must come from that node, instead of from where the worker runs.
    """

    numactl: str
    gpus_per_node: int
    is_strict: bool

    def words(self, local_rank: int) -> tuple[str, ...]:
        """Return what goes before the command of a worker."""
        node = str(local_rank // self.gpus_per_node)
        memory = ("--membind", node) if self.is_strict else ("--localalloc",)
        return (self.numactl, "--cpunodebind", node, *memory)
