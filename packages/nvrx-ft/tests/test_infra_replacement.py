# SPDX-License-Identifier: Apache-2.0
"""Replacement groups from the variables of Slurm and of the user; short lists of nodes."""

import pytest

from nvidia_resiliency_ext.fault_tolerance._core.infra import (
    compact_nodes,
    default_replacement_group_size,
    replacement_group_id,
)

TASK = {"SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_JOB_ID": "77"}


@pytest.mark.parametrize(
    ("environ", "group"),
    [
        ({}, None),
        ({"SLURM_JOB_ID": "1"}, None),
        (TASK, "3"),
        ({"SLURM_ARRAY_TASK_ID": "0"}, "0"),
        ({**TASK, "NVRX_REPLACEMENT_GROUP_ID": "rack 7"}, "rack 7"),
        ({**TASK, "NVRX_REPLACEMENT_GROUP_ID": " "}, "3"),
        ({"NVRX_REPLACEMENT_GROUP_ID": "a"}, "a"),
    ],
)
def test_the_group_of_a_node(environ, group):
    """The user's name for it wins, then the array task; without either there is none."""
    assert replacement_group_id(environ) == group


@pytest.mark.parametrize(
    ("environ", "size"),
    [
        ({}, None),
        ({"SLURM_NNODES": "4"}, None),
        ({**TASK, "SLURM_NNODES": "4", "SLURM_JOB_NUM_NODES": "9"}, 4),
        ({**TASK, "SLURM_JOB_NUM_NODES": "9"}, 9),
        ({"SLURM_ARRAY_TASK_ID": "0", "SLURM_NNODES": "1"}, 1),
        ({"NVRX_REPLACEMENT_GROUP_ID": "a", "SLURM_NNODES": "4"}, None),
    ],
)
def test_the_default_size_of_a_group(environ, size):
    """In a job array a group has the nodes of one task; elsewhere there are no groups."""
    assert default_replacement_group_size(environ) == size


@pytest.mark.parametrize(
    ("nodes", "error", "message"),
    [
        ({}, RuntimeError, "neither SLURM_NNODES nor SLURM_JOB_NUM_NODES is set"),
        ({"SLURM_NNODES": "four"}, ValueError, "SLURM_NNODES='four' is not a whole number"),
        ({"SLURM_NNODES": "0"}, ValueError, "at least one node, not 0"),
    ],
)
def test_a_size_that_slurm_does_not_tell(nodes, error, message):
    """A missing or impossible number of nodes is an error that names the variable."""
    with pytest.raises(error, match=message):
        default_replacement_group_size({**TASK, **nodes})


@pytest.mark.parametrize(
    ("addrs", "text"),
    [
        ([], ""),
        (["node2", "node1", "node1"], "node[1-2]"),
        (["n10.a.b", "n9.a.b", "login.a.b", "n9.c"], "login.a.b,n[9-10].a.b,n9.c"),
        (["10.0.0.3", "10.0.0.1", "10.0.0.2"], "10.0.0.[1-3]"),
        (["fe80::1", "fe80::2"], "fe80::[1-2]"),
        (["::ffff:10.0.0.1", "::ffff:10.0.0.2"], "::ffff:10.0.0.[1-2]"),
        (["n1.a", "n3.a", "n2"], "n2,n[1,3].a"),
    ],
)
def test_short_lists_of_addresses(addrs, text):
    """Names of one domain form one range, numeric addresses too, whatever their order."""
    assert compact_nodes(addrs) == text
