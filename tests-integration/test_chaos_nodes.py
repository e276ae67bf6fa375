# SPDX-License-Identifier: Apache-2.0
"""Twenty random faults on four hosts, every kind of them; `bench/chaos_nodes.py` makes more."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from chaos import Campaign, hosts_needed
from chaos_plan import plan

if TYPE_CHECKING:
    from collections.abc import Callable

    from many_nodes import NodesJob


@pytest.mark.netns
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("seed", "count", "control"), [(1, 11, True), (2, 9, False)])
@pytest.mark.no_second_try
def test_a_job_survives_random_faults(
    nodes_job: Callable[..., NodesJob], seed: int, count: int, control: bool
) -> None:
    """After each fault all ranks train again for one restart; the result is that of no faults."""
    job = nodes_job(hosts_needed(control=control))
    campaign = Campaign(job.network, job, control=control)
    outcomes = campaign.run(plan(seed, count, control=control))
    assert len(outcomes) == count
