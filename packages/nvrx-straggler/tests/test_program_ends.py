# SPDX-License-Identifier: Apache-2.0
"""Programs of two ranks end as they want to, whatever a report still waits for."""

import subprocess
import sys
from pathlib import Path

import pytest

_PROGRAM = Path(__file__).parent / "helpers" / "straggler_program.py"

pytestmark = pytest.mark.timeout(180)


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


def test_a_killed_rank_is_one_line(tmp_path):
    """A rank that is killed after a report is one line of the log, without a traceback."""
    codes, said = _run("killed", tmp_path)
    assert codes == [0, -9]
    (line,) = [line for line in said.splitlines() if "straggler" in line]
    assert "the connection to another rank is lost, which has ended or was killed" in line
    assert "Traceback" not in said
