# SPDX-License-Identifier: Apache-2.0
"""Programs of two ranks end as they want to, whatever a report still waits for."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import ranks_of_node

_PROGRAM = Path(__file__).parent / "helpers" / "straggler_program.py"

pytestmark = [pytest.mark.timeout(180), pytest.mark.slow]


# Each way with its exit code on rank 0.
_WAYS = {"exit": 7, "destroyed": 0, "at_exit": 0, "too_late": 0, "killed": 0}


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """Run two ranks for each way; return by way the exit codes, and what rank 0 has said."""
    folder = tmp_path_factory.mktemp("ends")
    with ranks_of_node.started(
        folder, 2 * len(_WAYS), _PROGRAM, [str(folder), *_WAYS], os.environ
    ) as ranks:
        codes = ranks.wait(150)
    said = [(folder / f"rank{2 * number}.log").read_text() for number in range(len(_WAYS))]
    return {
        way: (codes[2 * number : 2 * number + 2], said[number]) for number, way in enumerate(_WAYS)
    }


@pytest.mark.parametrize("way", ["exit", "destroyed", "at_exit", "too_late"])
def test_programs_end_while_a_report_waits(ended, way):
    """A rank that ends while a report waits for another has the exit code that it wants."""
    codes, said = ended[way]
    assert codes == [_WAYS[way], 0], said
    assert "Traceback" not in said


_TAKES_REQUESTS = """
import os, sys, time
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
os.environ["MASTER_PORT"] = str(store.port)
from nvidia_resiliency_ext.attribution.straggler import Detector
Detector.initialize(cuda_profiling="off")
Detector.generate_report_if_interval_elapsed()
while not store.check(["nvrx-straggler/control/0/challenge"]):
    time.sleep(0.001)
"""


def test_a_program_ends_while_its_own_store_is_waited_for(tmp_path):
    """Rank 0, which holds the store and waits in it for requests, ends without `shutdown`."""
    token = tmp_path / "token"
    token.touch(0o600)
    token.write_text("of the job")
    names = {"MASTER_ADDR": "127.0.0.1", "NVRX_STRAGGLER_TOKEN_FILE": str(token)}
    done = subprocess.run(
        [sys.executable, "-c", _TAKES_REQUESTS],
        env={**os.environ, **names}, capture_output=True, text=True, timeout=150, check=False,
    )  # fmt: skip
    assert (done.returncode, "terminate" in done.stderr) == (0, False), done.stderr


def test_a_killed_rank_is_one_line(ended):
    """A rank that is killed after a report is one line of the log, without a traceback."""
    codes, said = ended["killed"]
    assert codes == [0, -9]
    (line,) = [line for line in said.splitlines() if "straggler" in line]
    assert "the connection to another rank is lost, which has ended or was killed" in line
    assert "Traceback" not in said
