# SPDX-License-Identifier: Apache-2.0
"""Replacement groups: nodes that a scheduler replaces together, such as a Slurm array task.

Pure: reads a mapping of environment variables.
"""

from collections.abc import Mapping

from nvidia_resiliency_ext.fault_tolerance import _env

from .rank import nodes_per_array_task

__all__ = ["default_replacement_group_size", "replacement_group_id"]


def replacement_group_id(environ: Mapping[str, str]) -> str | None:
    """Return the group of this node: the user's name for it, else the number of the array task."""
    for name in (_env.REPLACEMENT_GROUP_ID, _env.SLURM_ARRAY_TASK_ID):
        group = environ.get(name, "").strip()
        if group:
            return group
    return None


def default_replacement_group_size(environ: Mapping[str, str]) -> int | None:
    """Return the nodes of each array task, or None outside a Slurm job array.

    Raises:
        ValueError: Their number is no positive whole number.
        RuntimeError: Slurm does not tell it.
    """
    if not environ.get(_env.SLURM_ARRAY_TASK_ID):
        return None
    nodes = nodes_per_array_task(environ)
    if nodes < 1:
        raise ValueError(f"a Slurm array task has at least one node, not {nodes} (SLURM_NNODES)")
    return nodes
