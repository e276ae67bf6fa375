# SPDX-License-Identifier: Apache-2.0
"""Scenarios: the ways in which torchrun's users start many nodes, each on hosts of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from many_nodes import PORT

if TYPE_CHECKING:
    from collections.abc import Callable

    from many_nodes import NodesJob

pytestmark = pytest.mark.netns

STATIC = "--nnodes={nnodes} --node_rank={node_rank} --master_addr={addr} --master_port={port}"
ENDPOINT = "--nnodes={nnodes} --rdzv-endpoint={addr}:{port} --master_port={port}"


@pytest.mark.parametrize("hosts", [2, 3])
@pytest.mark.parametrize("backend", ["", "--rdzv-backend=static"])
@pytest.mark.parametrize("form", [STATIC, ENDPOINT], ids=["static", "endpoint"])
def test_the_port_of_the_meeting_is_given_as_master_port_too(
    nodes_job: Callable[..., NodesJob], form: str, backend: str, hosts: int
) -> None:
    """The nodes meet at the one port that was given, train, and train again after a fault."""
    job = nodes_job(hosts)
    # The last first: the host of the endpoint may be the last to come.
    for node_rank, host in reversed(list(enumerate(job.network))):
        words = form.format(nnodes=hosts, node_rank=node_rank, addr=job.network[0].name, port=PORT)
        job.start(
            *("--steps", "10000000", "--step-ms", "40"),
            hosts=[host],
            nproc=2,
            meeting=[*words.split(), *backend.split()],
            flags=["--ft-prewarm", "off"],
        )
    job.wait_for_step(0, 3, ranks=2 * hosts)
    job.signal_rank(0, 2 * hosts - 1)
    job.wait_for_step(1, 3, ranks=2 * hosts)
    job.let_end()
    assert job.wait() == dict.fromkeys(job.launchers, 0), job.tails()
    job.assert_counted()
    job.assert_fenced()
    if form is STATIC:
        ranks = {entry["rank"]: entry["host"] for entry in job.entries("start", 1)}
        assert [ranks[rank] for rank in range(0, 2 * hosts, 2)] == [h.name for h in job.network]
