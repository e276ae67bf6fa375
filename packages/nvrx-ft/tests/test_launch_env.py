# SPDX-License-Identifier: Apache-2.0
"""What workers find in their environment, whatever their rank and cycle."""

import signal
import types
from collections.abc import Mapping
from typing import Any

import pytest

from nvidia_resiliency_ext.fault_tolerance._agent.many_nodes import StoreEndpoint
from nvidia_resiliency_ext.fault_tolerance._agent.run_files import shared_variables

PLAN: Any = types.SimpleNamespace(
    nproc_per_node=2,
    role="default",
    run_id="job",
    max_restarts=3,
    omp_num_threads=None,
    signals=(signal.SIGTERM, signal.SIGUSR1),
)
PATHS: Any = types.SimpleNamespace(run_id="run", launcher_socket="/run/launcher")


def shared(environ: Mapping[str, str], store: str | None = None) -> dict[str, str]:
    """Return the environment of all workers of a node."""
    return shared_variables(PLAN, PATHS, environ, store)


def test_ranks_that_restart_in_their_processes_find_the_jobs_store() -> None:
    """On many nodes the launcher's store is named, unless the user has named another."""
    assert shared({}, "h:1234")["NVRX_INPROCESS_STORE"] == "h:1234"
    users = {"NVRX_INPROCESS_STORE": "other:1"}
    assert shared(users, "h:1234")["NVRX_INPROCESS_STORE"] == "other:1"


def test_ranks_know_the_signals_that_are_passed_on() -> None:
    """As under torchrun, in its variable."""
    assert shared({})["TORCHELASTIC_SIGNALS_TO_HANDLE"] == "SIGTERM,SIGUSR1"


def test_one_node_names_no_store() -> None:
    """Where the launcher has no store, it names none."""
    assert "NVRX_INPROCESS_STORE" not in shared({})


def test_a_rank_s_child_hands_on_nothing_of_that_rank() -> None:
    """A launcher that is the child of a rank keeps that rank's monitor from its own workers."""
    outer = {"FT_RANK_MONITOR_IPC_SOCKET": "/outer", "NVRX_INFRA_RANK": "7", "HOME": "/h"}
    found = shared(outer)
    assert found["HOME"] == "/h"
    assert not {"FT_RANK_MONITOR_IPC_SOCKET", "NVRX_INFRA_RANK"} & found.keys()


@pytest.mark.parametrize(("host", "text"), [("10.0.0.1", "10.0.0.1:29400"), ("::1", "[::1]:29400")])
def test_an_endpoint_is_written_as_it_is_read(host: str, text: str) -> None:
    """An address of IPv6 stands in brackets."""
    assert StoreEndpoint(host, 29400, None).address == text
