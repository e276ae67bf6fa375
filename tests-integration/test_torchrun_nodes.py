# SPDX-License-Identifier: Apache-2.0
"""Scenarios: the ways in which torchrun's users start many nodes, each on hosts of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import tomllib
from hosts import CHECKOUT
from many_nodes import PORT

if TYPE_CHECKING:
    from collections.abc import Callable

    from hosts import Host
    from many_nodes import NodesJob

pytestmark = pytest.mark.netns

STATIC = "--nnodes={nnodes} --node_rank={node_rank} --master_addr={addr} --master_port={port}"
ENDPOINT = "--nnodes={nnodes} --rdzv-endpoint={addr}:{port} --master_port={port}"


TORCHRUN = "torch.distributed.run"
NEVER = "10000000"
PYPROJECT = CHECKOUT / "packages/nvrx-ft/pyproject.toml"


def nvrx_backend(job: NodesJob, **conf: object) -> list[str]:
    """Return the flags of a torchrun that meets by our rounds."""
    settings = ",".join(f"{name}={value}" for name, value in conf.items())
    rendezvous = f"--rdzv-backend=nvrx --rdzv-endpoint={job.network[0].name}:{PORT} --rdzv-id=t"
    return [*rendezvous.split(), f"--rdzv-conf={settings}"]


def with_entry_point(job: NodesJob) -> dict[str, str]:
    """Return the environment in which torch finds the entry point that the project declares."""
    info = job.folder / "site" / "declared-1.0.dist-info"
    if not info.exists():
        info.mkdir(parents=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: declared\nVersion: 1.0\n")
        group = "torchrun.handlers"
        declared = tomllib.loads(PYPROJECT.read_text())["project"]["entry-points"][group]
        lines = [f"{name} = {value}\n" for name, value in declared.items()]
        (info / "entry_points.txt").write_text(f"[{group}]\n{''.join(lines)}")
    return {"PYTHONPATH": str(info.parent)}


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_spare_takes_over_under_plain_torchrun(nodes_job: Callable[..., NodesJob]) -> None:
    """A host loses its power: its lease expires, the spare works on; the result is undisturbed."""
    job = nodes_job(3, launcher=TORCHRUN)
    first, second, third = job.network

    def start(host: Host) -> None:
        job.start(
            *("--steps", NEVER, "--step-ms", "40"),
            hosts=[host],
            nnodes="2:3",
            nproc=2,
            max_restarts=3,
            rendezvous=nvrx_backend(job, heartbeat_timeout=1),
            environment=with_entry_point(job),
        )

    start(first)
    start(second)
    job.wait_for_step(0, 3, ranks=4, limit_s=90)
    start(third)
    job.wait_for(lambda: len(job.events("job_start")) == 3, "the spare", 90)
    second.power_off()
    job.wait_for_step(1, 3, ranks=4, limit_s=90)
    assert {entry["host"] for entry in job.entries("start", 1)} == {first.name, third.name}
    job.let_end()
    codes = job.wait(90)
    assert (codes[first.name], codes[third.name]) == (0, 0), job.tails()
    job.assert_counted()
    job.assert_fenced()
    assert {event["cycle"] for event in job.events("cycle_start")} == {0, 1}
    assert [event["result"] for event in job.events("job_end")] == ["success", "success"]


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_an_excluded_host_leaves_under_plain_torchrun(nodes_job: Callable[..., NodesJob]) -> None:
    """What the scheduler excludes leaves before the next round with 1; the others end well."""
    job = nodes_job(3, launcher=TORCHRUN)
    files = job.folder / "health"
    files.mkdir()
    for number, host in enumerate(job.network):
        job.start(
            *("--steps", NEVER, "--step-ms", "40"),
            hosts=[host],
            nnodes="2:3",
            max_restarts=3,
            rendezvous=nvrx_backend(job, heartbeat_timeout=1, segment_health_check_dir=files),
            environment={
                **with_entry_point(job),
                "SLURM_JOB_ID": str(50 + number),
                "SLURM_PROCID": str(number),
            },
        )
    job.wait_for_step(0, 3, ranks=2, limit_s=90)
    victim, _ = job.rank(0, 1)
    index = [host.name for host in job.network].index(victim.name)
    (files / f"segment_health_check.{50 + index}.{50 + index}").write_text("fan broken")
    job.wait_for(lambda: len(job.events("job_start")) == 3, "the spare", 90)
    job.signal_rank(0, 1)
    job.wait_for_step(1, 3, ranks=2, limit_s=90)
    job.let_end()
    codes = job.wait(90)
    assert codes.pop(victim.name) == 1, job.tails()
    assert set(codes.values()) == {0}, job.tails()
    assert "fan broken" in job.log(victim)
    job.assert_counted()
    job.assert_fenced()


@pytest.mark.parametrize(
    ("form", "backend", "hosts"),
    [  # any two of the three together
        pytest.param(STATIC, "", 2, id="static-2"),
        pytest.param(STATIC, "--rdzv-backend=static", 3, id="static-backend-3"),
        pytest.param(ENDPOINT, "", 3, id="endpoint-3"),
        pytest.param(ENDPOINT, "--rdzv-backend=static", 2, id="endpoint-backend-2"),
    ],
)
def test_the_port_of_the_rendezvous_is_given_as_master_port_too(
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
            rendezvous=[*words.split(), *backend.split()],
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
