# SPDX-License-Identifier: Apache-2.0
"""Where the store is, and the prefix of a job's keys."""

import pytest

from nvidia_resiliency_ext.inprocess._store.endpoint import (
    Endpoint,
    cycle_prefix,
    find_endpoint,
    job_name,
)
from nvidia_resiliency_ext.shared_utils.errors import ConfigError

MASTER = {"MASTER_ADDR": "node1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("host:1", "host", 1),
        ("10.0.0.1:65535", "10.0.0.1", 65535),
        (" [fe80::1]:29 ", "fe80::1", 29),
    ],
)
def test_the_launchers_store_wins(text: str, host: str, port: int) -> None:
    """NVRX_INPROCESS_STORE is used, and arguments are not."""
    found = find_endpoint({**MASTER, "NVRX_INPROCESS_STORE": text}, "other", 77)
    assert found == Endpoint(host, port, is_served=True)
    assert find_endpoint({"NVRX_INPROCESS_STORE": str(found)}) == found


@pytest.mark.parametrize(
    "text", ["host", ":1", "host:", "host:0", "host:65536", "a:b", "fe80::1:29"]
)
def test_no_endpoint_is_named(text: str) -> None:
    """A value of NVRX_INPROCESS_STORE that is none is an error that names it."""
    with pytest.raises(ConfigError, match="NVRX_INPROCESS_STORE"):
        find_endpoint({"NVRX_INPROCESS_STORE": text})


def test_arguments_stand_before_the_environment() -> None:
    """Host and port given win over MASTER_ADDR and MASTER_PORT, each on its own."""
    assert find_endpoint(MASTER) == Endpoint("node1", 29500, is_served=False)
    assert find_endpoint(MASTER, port=29502) == Endpoint("node1", 29502, is_served=False)
    assert find_endpoint(MASTER, "h") == Endpoint("h", 29500, is_served=False)
    assert find_endpoint({}, "h", 1) == Endpoint("h", 1, is_served=False)


@pytest.mark.parametrize("missing", MASTER)
def test_what_is_missing_is_named(missing: str) -> None:
    """Without argument and variable the error names the variable."""
    with pytest.raises(ConfigError, match=missing):
        find_endpoint({name: value for name, value in MASTER.items() if name != missing})


def test_an_address_is_ours_or_not() -> None:
    """An address of this host is known as such, one of the documentation network is not."""
    assert Endpoint("127.0.0.1", 1, is_served=False).is_here()
    assert not Endpoint("192.0.2.1", 1, is_served=False).is_here()


def test_each_job_and_cycle_has_its_prefix() -> None:
    """Job and cycle stand in the prefix, and two jobs or cycles never share it."""
    environments = [
        {"TORCHELASTIC_RUN_ID": "job"},
        {"TORCHELASTIC_RUN_ID": "job2"},
        {"TORCHELASTIC_RUN_ID": "job", "TORCHELASTIC_RESTART_COUNT": "1"},
        {"TORCHELASTIC_RUN_ID": "job", "SLURM_RESTART_COUNT": "1"},
        {"SLURM_JOB_ID": "17", "TORCHELASTIC_RUN_ID": "none"},
        {"SLURM_JOB_ID": "18"},
        MASTER,
        {**MASTER, "MASTER_PORT": "29501"},
        {**MASTER, "TORCHELASTIC_RUN_ID": "none", "MASTER_ADDR": "node2"},
        {"TORCHELASTIC_RUN_ID": "a/b"},
        {"TORCHELASTIC_RUN_ID": "a_b"},
        {"TORCHELASTIC_RUN_ID": "x" * 500},
        {"TORCHELASTIC_RUN_ID": "x" * 501},
    ]
    prefixes = [cycle_prefix(environment) for environment in environments]
    assert prefixes[0] == "nvrx/job/0.0/"
    assert prefixes[2] == "nvrx/job/0.1/"
    assert prefixes[4] == "nvrx/17/0.0/"
    assert len(set(prefixes)) == len(prefixes)
    assert all(len(prefix) < 120 and prefix.count("/") == 3 for prefix in prefixes)


def test_a_job_keeps_its_name_over_cycles() -> None:
    """Launch cycles change ports and counts, not the job's name."""
    job = {"TORCHELASTIC_RUN_ID": "job", **MASTER}
    again = {**job, "MASTER_PORT": "3", "TORCHELASTIC_RESTART_COUNT": "4"}
    assert job_name(job) == job_name(again) == "job"


@pytest.mark.parametrize("host", ["no.such.host.invalid", "a" * 300, "."])
def test_host_that_does_not_resolve_is_named(host: str) -> None:
    """A name that means no address is an error that has the name and where it may come from."""
    with pytest.raises(ConfigError, match=r"store's host .* \(MASTER_ADDR, .*does not resolve"):
        Endpoint(host, 29500, is_served=False).is_here()
