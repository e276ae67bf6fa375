# SPDX-License-Identifier: Apache-2.0
"""Jobs of real processes under torch's own elastic agent, which meet through our handlers."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nvidia_resiliency_ext.fault_tolerance._workers.command import PortReservation

PROGRAM = Path(__file__).parent / "programs" / "torch_agent_node.py"
NODES = 2
# Three interpreters import torch: on a busy host that alone takes half a minute.
DEADLINE_S = 150

pytestmark = [pytest.mark.serial, pytest.mark.timeout(DEADLINE_S + 30)]


def run_nodes(which: str, directory: Path, *, nodes: int = NODES, spares: int = 0) -> list[str]:
    """Run the agents of a job, and return what each said in the end."""
    reserved = PortReservation()
    environ = {k: v for k, v in os.environ.items() if not k.startswith("SLURM")}
    environ |= {"RES_OPTIONS": "timeout:1 attempts:1", "TMPDIR": str(directory)}
    environ["TEST_NODES"] = str(nodes + spares)
    words = [sys.executable, str(PROGRAM), which]
    with contextlib.ExitStack() as stack:
        stack.callback(reserved.release)
        started = []
        for number in range(nodes + spares):
            file = stack.enter_context((directory / f"node{number}.log").open("w"))
            process = subprocess.Popen(
                [*words, str(number), str(nodes), str(reserved.port), str(directory)],
                env=environ, stdout=file, stderr=file,
            )  # fmt: skip
            stack.callback(process.wait)
            stack.callback(process.kill)
            started.append(process)
        try:
            codes = [process.wait(DEADLINE_S) for process in started]
        except subprocess.TimeoutExpired:
            codes = []
    said = [path.read_text() for path in sorted(directory.glob("node*.log"))]
    assert codes == [0] * len(started), "\n".join(text[-3000:] for text in said)
    return [text.partition("RESULT ")[2].splitlines()[0] for text in said]


def test_torchs_agent_restarts_over_the_barrier(tmp_path: Path) -> None:
    """A worker fails: all nodes go into the next round; the spare stands by and ends with them."""
    said = run_nodes("barrier", tmp_path, spares=1)
    assert sorted(said) == ["SUCCEEDED torch", "SUCCEEDED torch", "standby torch"]
    results = {path.read_text() for path in tmp_path.glob("rank*")}
    assert {text.rsplit(" ", 1)[0] for text in results} == {f"{rank} 4" for rank in range(4)}
    assert len({text.rsplit(" ", 1)[1] for text in results}) == 1


def test_torchs_agent_restarts_over_the_older_rendezvous(tmp_path: Path) -> None:
    """A worker fails: both nodes go into the next round and end well."""
    assert run_nodes("legacy", tmp_path) == ["SUCCEEDED torch"] * NODES
    assert len(list(tmp_path.glob("rank*"))) == 2 * NODES


def test_our_agent_restarts_its_workers_under_monitors(tmp_path: Path) -> None:
    """With our agent, too, all restart and a spare stands by; ranks have a monitor each."""
    said = run_nodes("ours", tmp_path, spares=1)
    assert sorted(said) == ["SUCCEEDED torch", "SUCCEEDED torch", "standby torch"]
    assert len(list(tmp_path.glob("rank*"))) == 2 * NODES
    assert {path.read_text() for path in tmp_path.glob("watched*")} == {"True"}


def test_our_agent_leaves_survivors_alone(tmp_path: Path) -> None:
    """One of two nodes fails where one is enough: the other goes on, and its end is the job's."""
    said = run_nodes("min-healthy", tmp_path)
    assert sorted(said) == ["SUCCEEDED {0: True, 1: True}", "standby None"]


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
