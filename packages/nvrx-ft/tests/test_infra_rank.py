# SPDX-License-Identifier: Apache-2.0
"""A node's place in the cluster, from the variables of schedulers."""

import hashlib
import os

import pytest

from nvidia_resiliency_ext.fault_tolerance import utils
from nvidia_resiliency_ext.fault_tolerance._core.infra import (
    infrastructure_rank,
)

JOB = {"SLURM_JOB_ID": "1"}
NAME = {"NVRX_INFRA_RANK_FROM_NODENAME": "1", "SLURMD_NODENAME": "nvl72134-T01"}
CROSS = {"CROSS_SLURM_PROCID": "40"}
ADDRESS = {"SLURM_TOPOLOGY_ADDR": "block3.node12", "SLURM_TOPOLOGY_ADDR_PATTERN": "block.node"}
BLOCK_OF_18 = {**ADDRESS, "SLURM_TOPOLOGY_NODES_PER_BLOCK": "18"}
PROC = {"SLURM_PROCID": "5"}
ARRAY = {**PROC, "SLURM_ARRAY_TASK_ID": "2", "SLURM_NNODES": "8"}
GROUP = {"GROUP_RANK": "6"}


@pytest.mark.parametrize(
    ("environ", "skip", "rank"),
    [
        ({}, False, -1),
        (GROUP, False, 6),
        ({**JOB, **GROUP}, False, 6),
        ({**JOB, **PROC, **GROUP}, False, 5),
        (ARRAY, False, 21),
        ({**ARRAY, "SLURM_NNODES": "", "SLURM_JOB_NUM_NODES": "4"}, False, 13),
        ({**ARRAY, "SLURM_JOB_NUM_NODES": "4"}, False, 21),
        ({"SLURM_ARRAY_TASK_ID": "2", **GROUP}, False, 6),
        ({**ADDRESS, **ARRAY}, False, 3 * 10**10 + 12),
        (BLOCK_OF_18, False, 3 * 18 + 12),
        ({**BLOCK_OF_18, "SLURM_TOPOLOGY_ADDR": "3.0"}, False, 54),
        ({**BLOCK_OF_18, **PROC}, True, 5),
        ({**ADDRESS, **PROC, "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.node"}, False, 5),
        ({"SLURM_TOPOLOGY_ADDR": "block3.node12", **PROC}, False, 5),
        ({**CROSS, **ADDRESS, **ARRAY}, False, 40),
        ({**CROSS, **ADDRESS, **ARRAY}, True, 40),
        ({**NAME, **CROSS, **ADDRESS, **ARRAY}, False, 7213401),
        ({**NAME, **CROSS}, True, 40),
        ({**NAME, **PROC}, True, 5),
        ({**NAME, "NVRX_INFRA_RANK_FROM_NODENAME": "", **PROC}, False, 5),
        ({"SLURMD_NODENAME": "node7", **PROC}, False, 5),
    ],
)
def test_first_rule_that_applies(environ, skip, rank):
    """The rules are tried in their order; the argument leaves out the two about topology."""
    assert infrastructure_rank(environ, skip_nodename_logic=skip) == rank


@pytest.mark.parametrize(
    ("environ", "error", "message"),
    [
        (JOB, RuntimeError, "start the launcher with srun"),
        ({**NAME, "SLURMD_NODENAME": "login"}, ValueError, "'login' has no digits"),
        ({"NVRX_INFRA_RANK_FROM_NODENAME": "1"}, ValueError, "SLURMD_NODENAME='' has no digits"),
        ({**ADDRESS, "SLURM_TOPOLOGY_ADDR": "b3"}, ValueError, "block.node"),
        ({**ADDRESS, "SLURM_TOPOLOGY_ADDR": "s1.b3.n2"}, ValueError, "block.node"),
        ({**ADDRESS, "SLURM_TOPOLOGY_ADDR": "b.n2"}, ValueError, "block.node"),
        ({**BLOCK_OF_18, "SLURM_TOPOLOGY_ADDR": "b1.n18"}, ValueError, "18 nodes per block"),
        (
            {**ADDRESS, "SLURM_TOPOLOGY_NODES_PER_BLOCK": "many"},
            ValueError,
            "SLURM_TOPOLOGY_NODES_PER_BLOCK='many'",
        ),
        ({**PROC, "SLURM_ARRAY_TASK_ID": "0"}, RuntimeError, "SLURM_JOB_NUM_NODES"),
        ({"SLURM_PROCID": "first"}, ValueError, "SLURM_PROCID='first' is not a whole number"),
    ],
)
def test_unusable_variables(environ, error, message):
    """A variable that is there but unusable is an error that names it; nothing is guessed."""
    with pytest.raises(error, match=message):
        infrastructure_rank(environ)


def test_public_function_reads_the_environment(clean_environment):
    """The public function takes this process's environment."""
    assert utils.get_infrastructure_rank() == -1
    for name, value in {**NAME, **PROC}.items():
        clean_environment.setenv(name, value)
    assert utils.get_infrastructure_rank() == 7213401
    assert utils.get_infrastructure_rank(skip_nodename_logic=True) == 5


BY_NAME = int(hashlib.md5(os.uname().nodename.encode()).hexdigest(), 16) % 4


@pytest.mark.parametrize(
    ("environ", "shard"),
    [
        (ARRAY, 21 % 4),
        (PROC, 5 % 4),
        ({}, BY_NAME),
        (GROUP, BY_NAME),
    ],
)
def test_log_server_of_a_node(environ, shard, clean_environment):
    """Nodes spread over log servers by their place in the job, else by name."""
    for name, value in environ.items():
        clean_environment.setenv(name, value)
    assert utils.get_log_aggregator_shard_index(4) == shard


def test_log_server_number_must_be_positive(clean_environment):
    """There must be a server to choose."""
    clean_environment.setenv("SLURM_PROCID", "3")
    assert utils.get_log_aggregator_shard_index(2) == 1
    assert utils.get_log_aggregator_shard_index(num_aggregators=0) == 0
    with pytest.raises(ValueError, match="at least 1"):
        utils.get_log_aggregator_shard_index(-1)


def test_the_pattern_of_an_address_may_be_in_capitals(clean_environment):
    """Slurm's pattern means the same in any case."""
    for name, value in {**ADDRESS, "SLURM_TOPOLOGY_NODES_PER_BLOCK": "18"}.items():
        clean_environment.setenv(name, value)
    rank = utils.get_infrastructure_rank()
    assert rank == 3 * 18 + 12
    clean_environment.setenv("SLURM_TOPOLOGY_ADDR_PATTERN", "BLOCK.NODE")
    assert utils.get_infrastructure_rank() == rank


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (None, False),
        ("1", True),
        ("TRUE", True),
        (" yes ", True),
        ("0", False),
        ("False", False),
        ("no", False),
    ],
)
def test_bool_variable(monkeypatch, text, value):
    """Switches are words in any case; unset is off."""
    monkeypatch.delenv("NVRX_TEST_SWITCH", raising=False)
    if text is not None:
        monkeypatch.setenv("NVRX_TEST_SWITCH", text)
    assert utils.parse_bool_env(var_name="NVRX_TEST_SWITCH") is value


@pytest.mark.parametrize("text", ["", "on", "2"])
def test_bad_bool_variable(monkeypatch, text):
    """Any other word is an error that names the variable."""
    monkeypatch.setenv("NVRX_TEST_SWITCH", text)
    with pytest.raises(ValueError, match="NVRX_TEST_SWITCH"):
        utils.parse_bool_env("NVRX_TEST_SWITCH")


def test_job_array(clean_environment):
    """A job array is known by its task number, also when that is 0."""
    assert not utils.is_slurm_job_array()
    clean_environment.setenv("SLURM_ARRAY_TASK_ID", "0")
    assert utils.is_slurm_job_array()


def test_reasons_and_exit_code():
    """Reasons in the store and the exit code are fixed."""
    assert utils.DEFAULT_NO_RESTART_EXIT_CODE == 93
    assert utils.RDZV_SHUTDOWN_REASON_GRACEFUL == "graceful"
    assert utils.RDZV_SHUTDOWN_REASON_FAILURE == "failure"
    assert set(utils.RDZV_NO_RESTART_REASONS) == {"attribution_stop", "no_progress"}


def test_node_lists():
    """Nodes are sorted by their numbers and shortened as Slurm does; ranks keep their order."""
    assert utils.slurm_sort_addrs(["n10", "n2", "m3", "n2a"]) == ["m3", "n2", "n2a", "n10"]
    assert utils.hostnames_to_slurm_nodelist(["n002", "n001", "n007"]) == "n[001-002,007]"
    assert utils.ranks_to_range_str([4, 5, 6, 0, 2, 1]) == "4-6,0,2,1"
    assert utils.ranks_to_range_str([]) == ""
