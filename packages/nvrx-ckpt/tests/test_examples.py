# SPDX-License-Identifier: Apache-2.0
"""The examples do what they say, with two ranks."""

import contextlib
from pathlib import Path

import pytest
from dcp_saves import assert_whole, run_ranks
from fork_server import ForkServer

from nvidia_resiliency_ext.checkpointing import read_latest

# With what DistributedDataParallel imports at its first use.
MODULES = ("torch.distributed.checkpoint", "torch._dynamo.utils")
EXAMPLES = Path(__file__).parents[1] / "examples"
pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """Run the examples, the first one twice; return their folder, and what each rank printed."""
    folder = tmp_path_factory.mktemp("examples")
    names = ("train_dcp.py", "train_dcp.py", "megatron_style.py")
    examples = [str(EXAMPLES / name) for name in names]
    with contextlib.closing(ForkServer(MODULES)) as server:
        ranks = run_ranks(server, folder, 2, "examples_in_turn.py", *examples)
    texts = [text for _, text in ranks]
    assert [code for code, _ in ranks] == [0, 0], "\n".join(texts)
    return folder, texts


def test_training_with_dcp_checkpoints(ended):
    """The example keeps the two newest checkpoints and names the last one; it can go on from it."""
    folder, texts = ended
    assert read_latest(folder / "latest") == "00000040"
    assert_whole(folder / "00000040")
    kept = sorted(path.name for path in folder.iterdir() if path.name.isdigit())
    assert kept == ["00000030", "00000040"]
    for text in texts:
        assert text.count("is at step 40") == 2


def test_megatrons_way_of_driving(ended):
    """Megatron-LM's calls, with its kind of planner, aborts and moved finalize functions, work."""
    for text in ended[1]:
        assert "has loaded what it saved" in text
