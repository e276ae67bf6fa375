# SPDX-License-Identifier: Apache-2.0
"""The examples do what they say, with two ranks."""

from pathlib import Path

import pytest
from dcp_saves import run_ranks

from nvidia_resiliency_ext.checkpointing import read_latest, verify_checkpoint

EXAMPLES = Path(__file__).parents[1] / "examples"
pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]


def run(folder, name):
    """Run an example with two ranks; return what both printed."""
    ended = run_ranks(folder, 2, str(EXAMPLES / name))
    texts = [text for _, text in ended]
    assert [code for code, _ in ended] == [0, 0], "\n".join(texts)
    return texts


def test_training_with_dcp_checkpoints(tmp_path):
    """The example keeps the two newest checkpoints and names the last one; it can go on from it."""
    run(tmp_path, "train_dcp.py")
    assert read_latest(tmp_path / "latest") == "00000040"
    assert verify_checkpoint(tmp_path / "00000040").whole
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == [
        "00000030",
        "00000040",
    ]
    assert "is at step 40" in run(tmp_path, "train_dcp.py")[1]


def test_megatrons_way_of_driving(tmp_path):
    """Megatron-LM's calls, with its kind of planner, aborts and moved finalize functions, work."""
    for text in run(tmp_path, "megatron_style.py"):
        assert "has loaded what it saved" in text
