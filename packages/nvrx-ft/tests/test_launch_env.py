# SPDX-License-Identifier: Apache-2.0
"""What workers find in their environment, whatever their rank and cycle."""

import dataclasses

import pytest

from nvidia_resiliency_ext.fault_tolerance._agent.many_nodes import StoreEndpoint
from nvidia_resiliency_ext.fault_tolerance._workers.command import JobEnvironment, shared_variables

JOB = JobEnvironment(2, "default", "job", "run", 3, "/run/launcher", (), inprocess_store="h:1234")


def test_ranks_that_restart_in_their_processes_find_the_jobs_store() -> None:
    """On many nodes the launcher's store is named, unless the user has named another."""
    assert shared_variables(JOB, {})["NVRX_INPROCESS_STORE"] == "h:1234"
    users = {"NVRX_INPROCESS_STORE": "other:1"}
    assert shared_variables(JOB, users)["NVRX_INPROCESS_STORE"] == "other:1"


def test_ranks_know_the_signals_that_are_passed_on() -> None:
    """As under torchrun, in its variable."""
    job = dataclasses.replace(JOB, signals_to_handle="SIGTERM,SIGUSR1")
    assert shared_variables(job, {})["TORCHELASTIC_SIGNALS_TO_HANDLE"] == "SIGTERM,SIGUSR1"


def test_one_node_names_no_store() -> None:
    """Where the launcher has no store, it names none."""
    alone = JobEnvironment(2, "default", "job", "run", 3, "/run/launcher", ())
    assert "NVRX_INPROCESS_STORE" not in shared_variables(alone, {})


@pytest.mark.parametrize(("host", "text"), [("10.0.0.1", "10.0.0.1:29400"), ("::1", "[::1]:29400")])
def test_an_endpoint_is_written_as_it_is_read(host: str, text: str) -> None:
    """An address of IPv6 stands in brackets."""
    assert StoreEndpoint(host, 29400, None).address == text
