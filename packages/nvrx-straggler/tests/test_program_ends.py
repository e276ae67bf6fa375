# SPDX-License-Identifier: Apache-2.0
"""Programs of two ranks end as they want to, whatever a report still waits for."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

_PROGRAM = Path(__file__).parent / "helpers" / "straggler_program.py"

pytestmark = [pytest.mark.timeout(180), pytest.mark.slow]


def _run(way: str, folder: Path) -> tuple[list[int], str]:
    """Return the exit codes of both ranks and what rank 0 has said."""
    ranks = [
        subprocess.Popen(
            [sys.executable, str(_PROGRAM), way, str(folder / "store"), str(rank)],
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [process.communicate(timeout=150)[1] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    return [process.returncode for process in ranks], said[0]


@pytest.mark.parametrize(
    ("way", "code"), [("exit", 7), ("destroyed", 0), ("at_exit", 0), ("too_late", 0)]
)
def test_programs_end_while_a_report_waits(tmp_path, way, code):
    """A rank that ends while a report waits for another has the exit code that it wants."""
    codes, said = _run(way, tmp_path)
    assert codes == [code, 0], said
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


def test_a_killed_rank_is_one_line(tmp_path):
    """A rank that is killed after a report is one line of the log, without a traceback."""
    codes, said = _run("killed", tmp_path)
    assert codes == [0, -9]
    (line,) = [line for line in said.splitlines() if "straggler" in line]
    assert "the connection to another rank is lost, which has ended or was killed" in line
    assert "Traceback" not in said
