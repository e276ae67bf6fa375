# SPDX-License-Identifier: Apache-2.0
"""Jobs of real processes under torch's own elastic agent, which meet through our handlers."""

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from nvidia_resiliency_ext.fault_tolerance._workers.command import PortReservation

PROGRAM = Path(__file__).parent / "programs" / "torch_agent_node.py"
NODES = 2
WITH_SPARE = ("barrier", "ours")
# Three interpreters import torch: on a busy host that alone takes half a minute.
DEADLINE_S = 240

pytestmark = [pytest.mark.serial, pytest.mark.timeout(DEADLINE_S + 30)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """Run all jobs one after the other on the same nodes; give what each of them left.

    The third node is the spare of two jobs, and has no part in the others.
    """
    top = tmp_path_factory.mktemp("jobs")
    jobs = {which: top / which for which in (*WITH_SPARE, "legacy", "min-healthy")}
    environ = {k: v for k, v in os.environ.items() if not k.startswith("SLURM")}
    environ |= {"RES_OPTIONS": "timeout:1 attempts:1", "TMPDIR": str(top)}
    words: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        for which, folder in jobs.items():
            folder.mkdir()
            reserved = PortReservation()
            stack.callback(reserved.release)
            count = NODES + (which in WITH_SPARE)
            words[which] = f"{which}:{count}:{reserved.port}:{folder}"
        started = []
        for number in range(NODES + 1):
            file = stack.enter_context((top / f"node{number}.log").open("w"))
            here = words if number < NODES else WITH_SPARE
            process = subprocess.Popen(
                [sys.executable, str(PROGRAM), str(number), str(NODES), *map(words.get, here)],
                env=environ, stdout=file, stderr=file,
            )  # fmt: skip
            stack.callback(process.wait)
            stack.callback(process.kill)
            started.append(process)
        try:
            codes = [process.wait(DEADLINE_S) for process in started]
        except subprocess.TimeoutExpired:
            codes = []
    said = [path.read_text() for path in sorted(top.glob("node*.log"))]
    assert codes == [0] * len(started), "\n".join(text[-3000:] for text in said)
    yield jobs
    shutil.rmtree(top)


def results(folder: Path) -> list[str]:
    """Return what each node's agent of a job said in the end."""
    return sorted(path.read_text() for path in folder.glob("result*"))


def test_torchs_agent_restarts_over_the_barrier(folders: dict[str, Path]) -> None:
    """A worker fails: all nodes go into the next round; the spare stands by and ends with them."""
    folder = folders["barrier"]
    assert results(folder) == ["SUCCEEDED torch", "SUCCEEDED torch", "standby torch"]
    ranks = {path.read_text() for path in folder.glob("rank*")}
    assert {text.rsplit(" ", 1)[0] for text in ranks} == {f"{rank} 4" for rank in range(4)}
    assert len({text.rsplit(" ", 1)[1] for text in ranks}) == 1


def test_torchs_agent_restarts_over_the_older_rendezvous(folders: dict[str, Path]) -> None:
    """A worker fails: both nodes go into the next round and end well."""
    folder = folders["legacy"]
    assert results(folder) == ["SUCCEEDED torch"] * NODES
    assert len(list(folder.glob("rank*"))) == 2 * NODES


def test_our_agent_restarts_its_workers_under_monitors(folders: dict[str, Path]) -> None:
    """With our agent, too, all restart and a spare stands by; ranks have a monitor each."""
    folder = folders["ours"]
    assert results(folder) == ["SUCCEEDED torch", "SUCCEEDED torch", "standby torch"]
    assert len(list(folder.glob("rank*"))) == 2 * NODES
    assert {path.read_text() for path in folder.glob("watched*")} == {"True"}


def test_our_agent_leaves_survivors_alone(folders: dict[str, Path]) -> None:
    """One of two nodes fails where one is enough: the other goes on, and its end is the job's."""
    assert results(folders["min-healthy"]) == ["SUCCEEDED {0: True, 1: True}", "standby None"]


def test_a_handler_that_does_not_fit_is_refused() -> None:
    """Our agent needs our handler, min-healthy the older one; both are said by name."""
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs

    from nvidia_resiliency_ext.fault_tolerance.config import FaultToleranceConfig
    from nvidia_resiliency_ext.fault_tolerance.launcher import LocalElasticAgent

    spec = WorkerSpec(role="r", local_world_size=1, rdzv_handler=object(), entrypoint="true")
    for policy, problem in (("any-failed", "a handler of this package"), ("some", "'some'")):
        with pytest.raises(ValueError, match=problem):
            LocalElasticAgent(
                spec, FaultToleranceConfig(), DefaultLogsSpecs(), restart_policy=policy
            )
