# SPDX-License-Identifier: Apache-2.0
"""Random kills of writer, trainer or both during a stream of saves: nothing torn is accepted."""

import contextlib
import os
import random
import signal
import time

import pytest
import torch
import torch.distributed.checkpoint as dcp
from dcp_saves import PROGRAMS, assert_whole

from nvidia_resiliency_ext.checkpointing import read_latest, verify_checkpoint
from nvidia_resiliency_ext.shared_utils.procfs import is_running

pytestmark = pytest.mark.slow

DEADLINE_S = 120
# NVRX_TEST_KILLS=200 takes 10 minutes, or 20 on a busy machine.
KILLS = int(os.environ.get("NVRX_TEST_KILLS", "6"))


def kill(pid):
    """Kill a process that may be gone."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def newest_loaded(folder):
    """Load the checkpoint that the tracker names, and check it bit for bit; return its step."""
    name = read_latest(folder / "latest")
    if name is None:
        return 0
    report = verify_checkpoint(folder / name)
    assert report.whole, report.problems
    state = {f"layer{i}": torch.zeros(1 << 18) for i in range(8)} | {"step": 0}
    dcp.load(state, checkpoint_id=folder / name)
    step = state.pop("step")
    assert step == int(name)
    assert all(bool((value == step).all()) for value in state.values())
    return step


@pytest.mark.no_second_try
@pytest.mark.timeout(100 * KILLS)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_random_kills_leave_a_checkpoint_that_loads(fork_server, tmp_path):
    """After each kill the newest checkpoint loads, all that verify as whole do, none is lost."""
    chance = random.Random(7)
    newest, kills = 0, 0
    while kills < KILLS:
        workers = set()
        with fork_server.running(PROGRAMS / "save_stream.py", tmp_path, newest + 1) as trainer:
            for line in trainer.output:
                if not line[0].isdigit():
                    continue
                workers.add(int(line))
                if chance.random() < 0.4:
                    time.sleep(chance.random() * 0.05)
                    kills += 1
                    both = chance.random()
                    if both < 0.7:
                        kill(int(line))
                    if both > 0.5:
                        break
        limit = time.monotonic() + DEADLINE_S
        while any(is_running(pid) for pid in workers):
            assert time.monotonic() < limit
            time.sleep(0.05)
        step = newest_loaded(tmp_path)
        assert step >= newest
        newest = step
    for path in tmp_path.iterdir():
        if path.is_dir() and (path / ".metadata").exists():
            assert_whole(path)
    assert newest > 0
